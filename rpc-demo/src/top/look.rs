//! Fetches a snapshot of a program's channels, servers and connections.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tonic::{Code, Status};
use tonic_rdma_channelz::pb::{
    Connection, ListConnectionsRequest, ListOwnersRequest, Owner, Usage,
};

use crate::net::ChannelzClient;

/// Maximum number of connections, and of owners, that are fetched. A server's default limits are
/// 16,384 TCP connections and 4,096 on the fast path.
const MOST: usize = 20_500;
/// Time limit of each answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Entries to ask for at a time.
const PAGE: u32 = 1000;

/// A snapshot of a program's owners and connections.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) at: Instant,
    /// Owners in the order of their ids, each with its connections.
    pub(crate) owners: Vec<(Owner, Vec<Connection>)>,
}

/// Counters that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) calls: u64,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The growth of counters per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    pub(crate) calls: f64,
    pub(crate) sent: f64,
    pub(crate) received: f64,
}

impl Totals {
    pub(crate) fn of_owner(owner: &Owner) -> Totals {
        Totals {
            calls: owner.calls_fast.saturating_add(owner.calls_tcp),
            sent: owner.bytes_sent_fast.saturating_add(owner.bytes_sent_tcp),
            received: owner.bytes_received_fast.saturating_add(owner.bytes_received_tcp),
        }
    }

    pub(crate) fn of_usage(usage: &Usage) -> Totals {
        Totals { calls: usage.calls, sent: usage.bytes_sent, received: usage.bytes_received }
    }

    /// The growth per second since `before`, which was read `time` earlier. A counter that is below
    /// its earlier value, because the program was restarted, has a rate of 0.
    pub(crate) fn since(self, before: Totals, time: Duration) -> Rates {
        let seconds = time.as_secs_f64().max(0.001);
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        Rates {
            calls: rate(self.calls, before.calls),
            sent: rate(self.sent, before.sent),
            received: rate(self.received, before.received),
        }
    }
}

/// The totals of an earlier snapshot. The key is the owner's id and the connection's id. The
/// connection's id is 0 for the owner's own totals.
pub(crate) type Before = HashMap<(u64, u64), Totals>;

impl Look {
    /// The totals, for the rates of the next snapshot.
    pub(crate) fn totals(&self) -> Before {
        let mut totals = Before::new();
        for (owner, connections) in &self.owners {
            totals.insert((owner.id, 0), Totals::of_owner(owner));
            for connection in connections {
                if let Some(usage) = &connection.usage {
                    totals.insert((owner.id, connection.id), Totals::of_usage(usage));
                }
            }
        }
        totals
    }
}

/// Fetches a snapshot.
pub(crate) async fn look(client: &ChannelzClient) -> Result<Look, Status> {
    let at = Instant::now();
    let mut client = client.clone();
    let mut owners: Vec<(Owner, Vec<Connection>)> = Vec::new();
    let (mut fetched, mut after) = (0, 0);
    loop {
        let before = after;
        let request = ListOwnersRequest { after, max_results: PAGE };
        let page = in_time(client.list_owners(request)).await?;
        for owner in page.owners {
            check(before, owner.id)?;
            after = after.max(owner.id);
            let connections = match connections(&mut client, owner.id, MOST - fetched).await {
                // The owner has ended since it was listed.
                Err(status) if status.code() == Code::NotFound => continue,
                connections => connections?,
            };
            fetched += connections.len();
            owners.push((owner, connections));
        }
        if page.end || owners.len() >= MOST {
            return Ok(Look { at, owners });
        }
        if after == before {
            return Err(astray());
        }
    }
}

async fn connections(
    client: &mut ChannelzClient,
    owner: u64,
    most: usize,
) -> Result<Vec<Connection>, Status> {
    let mut all: Vec<Connection> = Vec::new();
    loop {
        let after = all.last().map_or(0, |connection| connection.id);
        let request = ListConnectionsRequest { owner, after, max_results: PAGE };
        let page = in_time(client.list_connections(request)).await?;
        let is_last = page.end || all.len() + page.connections.len() >= most;
        for connection in page.connections {
            check(after, connection.id)?;
            all.push(connection);
        }
        if is_last {
            return Ok(all);
        }
        if all.last().map_or(0, |connection| connection.id) <= after {
            return Err(astray());
        }
    }
}

/// Fails if ids do not increase, because a server that repeats entries would be asked for ever.
fn check(after: u64, id: u64) -> Result<(), Status> {
    if id > after { Ok(()) } else { Err(astray()) }
}

fn astray() -> Status {
    Status::internal("the server's pages repeat entries")
}

async fn in_time<T>(
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(ANSWER_LIMIT, answer).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => {
            let limit = ANSWER_LIMIT.as_secs();
            Err(Status::unavailable(format!("no answer within {limit} s")))
        }
    }
}
