//! Lists a program's tonic-rdma channels, servers and connections for operators, as a gRPC service
//! in the manner of gRPC's channelz.
//!
//! ```no_run
//! use tonic_rdma::{Endpoint, Server};
//! use tonic_rdma_channelz::Channelz;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let channelz = Channelz::new();
//! let channel = Endpoint::from_static("http://10.0.0.1:50051").connect().await?;
//! channelz.add_channel("store", &channel);
//!
//! let public = Server::builder();
//! channelz.add_server("public", &public);
//! // public.add_service(...).serve(...)
//!
//! // The list, on an address that only operators reach.
//! let mut admin = Server::builder();
//! admin.add_service(channelz.service()).serve("127.0.0.1:50052".parse()?).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The service works on any server of tonic or tonic-rdma, over TCP and over a fast path.
//! [`pb`] has the service's messages and client. `rpc-demo top` shows the list in a terminal.
//!
//! # Who may read it
//!
//! The list tells whoever can call the service about **other clients**: their addresses and process
//! IDs, when they connected, how much they call and transfer, and why they use TCP. The list also
//! discloses the names under which the program has added its channels and servers, and this host's
//! devices and addresses. The list contains no payload, no metadata and no keys. Nobody can change
//! anything through the service.
//!
//! So serve the list on an address that only operators can reach, as above, or behind an
//! interceptor:
//!
//! ```
//! use tonic::service::interceptor::InterceptedService;
//! use tonic::{Request, Status};
//! # let channelz = tonic_rdma_channelz::Channelz::new();
//!
//! fn operators_only(request: Request<()>) -> Result<Request<()>, Status> {
//!     match request.metadata().get("authorization") {
//!         Some(token) if token == "Bearer secret" => Ok(request),
//!         _ => Err(Status::unauthenticated("for operators only")),
//!     }
//! }
//!
//! let service = InterceptedService::new(channelz.service(), operators_only);
//! tonic_rdma::Server::builder().add_service(service);
//! ```
//!
//! # Cost
//!
//! The list adds no work to calls. A connection has an entry from its beginning to its end. An
//! answer has at most [`MAX_RESULTS`] entries. The service locks each fast-path connection of the
//! answer while it reads the connection's counters.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::{Request, Response, Status};
use tonic_rdma::{
    Channel, ChannelObserver, ConnectionInfo, ConnectionUsage, PathInfo, Server, ServerObserver,
    TransportStats,
};

use crate::pb::channelz_server::ChannelzServer;

/// The messages, the client and the server of `tonic_rdma.channelz.v1.Channelz`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod pb {
    include!("generated/tonic_rdma.channelz.v1.rs");
}

/// Maximum number of entries in an answer.
pub const MAX_RESULTS: u32 = 1000;
/// The maximum number of entries in an answer if the request states 0.
const DEFAULT_RESULTS: u32 = 100;
/// Maximum length of names, in bytes.
const MAX_NAME: usize = 256;
/// Maximum length of the details of a reason, in bytes.
const MAX_DETAIL: usize = 512;

/// The channels and servers that a program lists. Clones share the list.
///
/// An entry keeps neither a channel nor a server alive. The entry disappears once the channel is
/// closed, or the builder is dropped and its servers have ended.
#[derive(Clone, Debug, Default)]
pub struct Channelz(Arc<Mutex<Owners>>);

#[derive(Debug, Default)]
struct Owners {
    /// Sorted by id.
    entries: Vec<Listed>,
    /// The id of the entry that was added last.
    last: u64,
    /// If a new entry makes the list longer than this number, the entries of ended channels and
    /// servers are removed.
    sweep_at: usize,
}

#[derive(Clone, Debug)]
struct Listed {
    id: u64,
    name: Arc<str>,
    observer: Observer,
}

#[derive(Clone, Debug)]
enum Observer {
    Channel(ChannelObserver),
    Server(ServerObserver),
}

impl Channelz {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a channel under a name, for example its server's. The list shows at most the first 256
    /// bytes of a name. Adding a clone of a channel gives a second entry.
    pub fn add_channel(&self, name: &str, channel: &Channel) {
        self.add(name, Observer::Channel(channel.observer()));
    }

    /// Adds the servers made from a builder and its clones, under one name.
    pub fn add_server<L>(&self, name: &str, server: &Server<L>) {
        self.add(name, Observer::Server(server.observer()));
    }

    /// Returns the service, for [`Server::add_service`]. Before you serve it, read [who may read
    /// the list](crate#who-may-read-it).
    pub fn service(&self) -> ChannelzServer<Channelz> {
        ChannelzServer::new(self.clone())
    }

    fn add(&self, name: &str, observer: Observer) {
        let mut owners = self.owners();
        owners.last += 1;
        let entry = Listed { id: owners.last, name: beginning(name, MAX_NAME).into(), observer };
        owners.entries.push(entry);
        if owners.entries.len() > owners.sweep_at {
            owners.entries.retain(|entry| entry.observer.stats().is_some());
            owners.sweep_at = 16 + 2 * owners.entries.len();
        }
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        // Each change leaves the list consistent, so a lock that a panic has poisoned can still be
        // used.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer {
    fn stats(&self) -> Option<TransportStats> {
        match self {
            Observer::Channel(channel) => channel.stats(),
            Observer::Server(server) => server.stats(),
        }
    }

    /// At most `most` connections with ids above `after`, in the order of their ids. `None` if the
    /// owner has ended.
    fn connections(&self, after: u64, most: usize) -> Option<Vec<ConnectionInfo>> {
        match self {
            Observer::Server(server) => server.connections(after, most),
            Observer::Channel(channel) => {
                let mut all = channel.connections()?;
                all.retain(|info| info.id > after);
                all.sort_unstable_by_key(|info| info.id);
                all.truncate(most);
                Some(all)
            }
        }
    }
}

#[tonic::async_trait]
impl pb::channelz_server::Channelz for Channelz {
    async fn list_owners(
        &self,
        request: Request<pb::ListOwnersRequest>,
    ) -> Result<Response<pb::ListOwnersResponse>, Status> {
        let pb::ListOwnersRequest { after, max_results } = request.into_inner();
        let entries: Vec<_> = {
            let owners = self.owners();
            let from = owners.entries.partition_point(|entry| entry.id <= after);
            owners.entries[from..].to_vec()
        };
        // Take one entry more than requested, to see whether the list ends here.
        let most = limit(max_results);
        let mut found: Vec<_> = entries.iter().filter_map(owner).take(most + 1).collect();
        let end = found.len() <= most;
        found.truncate(most);
        Ok(Response::new(pb::ListOwnersResponse { owners: found, end }))
    }

    async fn list_connections(
        &self,
        request: Request<pb::ListConnectionsRequest>,
    ) -> Result<Response<pb::ListConnectionsResponse>, Status> {
        let pb::ListConnectionsRequest { owner, after, max_results } = request.into_inner();
        let observer = {
            let owners = self.owners();
            let found = owners.entries.binary_search_by_key(&owner, |entry| entry.id);
            found.ok().map(|at| owners.entries[at].observer.clone())
        };
        let most = limit(max_results);
        let found = observer.and_then(|observer| observer.connections(after, most + 1));
        let Some(mut found) = found else {
            return Err(Status::not_found("no channel or server has this id: it may have ended"));
        };
        let end = found.len() <= most;
        found.truncate(most);
        let connections = found.into_iter().map(connection).collect();
        Ok(Response::new(pb::ListConnectionsResponse { connections, end }))
    }
}

fn limit(asked: u32) -> usize {
    let most = if asked == 0 { DEFAULT_RESULTS } else { asked.min(MAX_RESULTS) };
    most as usize
}

/// The entry of a channel or a server. `None` if the channel or server has ended.
fn owner(entry: &Listed) -> Option<pb::Owner> {
    let stats = entry.observer.stats()?;
    let (role, path) = match &entry.observer {
        Observer::Channel(channel) => (pb::Role::Channel, Some(channel.path()?)),
        Observer::Server(_) => (pb::Role::Server, None),
    };
    let (path, reason) = match path {
        Some(PathInfo { path, reason, .. }) => (path.as_str().to_owned(), reason),
        None => (String::new(), None),
    };
    Some(pb::Owner {
        id: entry.id,
        role: role.into(),
        name: entry.name.as_ref().to_owned(),
        path,
        reason: reason.as_ref().map(why),
        calls_fast: stats.calls_fast,
        calls_tcp: stats.calls_tcp,
        bytes_sent_fast: stats.bytes_sent_write + stats.bytes_sent_lent + stats.bytes_sent_send,
        bytes_received_fast: stats.bytes_received_write
            + stats.bytes_received_lent
            + stats.bytes_received_send,
        bytes_sent_tcp: stats.bytes_sent_tcp,
        bytes_received_tcp: stats.bytes_received_tcp,
        connections: stats.connections,
        connections_lost: stats.connections_lost,
    })
}

fn connection(info: ConnectionInfo) -> pb::Connection {
    let text = |addr: Option<std::net::SocketAddr>| addr.map(|addr| addr.to_string());
    pb::Connection {
        id: info.id,
        path: info.path.as_str().to_owned(),
        device: info.device.unwrap_or_default(),
        local: text(info.local_addr).unwrap_or_default(),
        remote: text(info.remote_addr).unwrap_or_default(),
        peer_pid: info.peer_pid,
        age_ms: info.age.as_millis().try_into().unwrap_or(u64::MAX),
        asked: info.asked,
        reason: info.reason.as_ref().map(why),
        usage: info.usage.map(usage),
    }
}

fn usage(usage: ConnectionUsage) -> pb::Usage {
    pb::Usage {
        calls_in_flight: usage.calls_in_flight as u64,
        calls: usage.calls,
        bytes_sent: usage.bytes_sent,
        bytes_received: usage.bytes_received,
        credits: usage.credits,
        peer_credits: usage.peer_credits,
        credit_waits: usage.credit_waits,
        control_memory: usage.control_memory as u64,
        landing_memory: usage.landing_memory as u64,
        granted: usage.granted as u64,
    }
}

fn why(reason: &tonic_rdma::Reason) -> pb::Reason {
    pb::Reason {
        code: reason.code().as_str().to_owned(),
        detail: beginning(reason.detail(), MAX_DETAIL).to_owned(),
        cure: reason.cure().to_owned(),
    }
}

/// The first `most` bytes of `text`, or fewer, so that no character is cut.
fn beginning(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// tonic's clients refuse longer messages, unless they are configured otherwise.
    const MAX_MESSAGE: usize = 4 << 20;

    #[test]
    fn the_largest_answer_fits_a_message() {
        let long = |length: usize| "x".repeat(length);
        let reason = tonic_rdma::ReasonCode::ALL.iter().max_by_key(|code| code.cure().len());
        let reason = pb::Reason {
            code: long(40),
            detail: beginning(&long(1 << 20), MAX_DETAIL).to_owned(),
            cure: reason.unwrap().cure().to_owned(),
        };
        let entry = pb::Connection {
            id: u64::MAX,
            path: long(5),
            // The kernel limits the names of devices to 64 bytes.
            device: long(64),
            local: long(64),
            remote: long(64),
            peer_pid: Some(u32::MAX),
            age_ms: u64::MAX,
            asked: true,
            reason: Some(reason.clone()),
            usage: Some(pb::Usage {
                calls_in_flight: u64::MAX,
                calls: u64::MAX,
                bytes_sent: u64::MAX,
                bytes_received: u64::MAX,
                credits: u32::MAX,
                peer_credits: u32::MAX,
                credit_waits: u64::MAX,
                control_memory: u64::MAX,
                landing_memory: u64::MAX,
                granted: u64::MAX,
            }),
        };
        let connections = vec![entry; limit(u32::MAX)];
        let answer = pb::ListConnectionsResponse { connections, end: false };
        assert!(answer.encoded_len() < MAX_MESSAGE, "{}", answer.encoded_len());
        let entry = pb::Owner {
            id: u64::MAX,
            role: pb::Role::Channel.into(),
            name: beginning(&"ä".repeat(1 << 20), MAX_NAME - 1).to_owned(),
            path: long(5),
            reason: Some(reason),
            calls_fast: u64::MAX,
            calls_tcp: u64::MAX,
            bytes_sent_fast: u64::MAX,
            bytes_received_fast: u64::MAX,
            bytes_sent_tcp: u64::MAX,
            bytes_received_tcp: u64::MAX,
            connections: u64::MAX,
            connections_lost: u64::MAX,
        };
        assert_eq!(entry.name.len(), 254);
        let answer = pb::ListOwnersResponse { owners: vec![entry; limit(u32::MAX)], end: false };
        assert!(answer.encoded_len() < MAX_MESSAGE, "{}", answer.encoded_len());
        assert_eq!([0, 1, 1000, 1001].map(limit), [100, 1, 1000, 1000]);
    }

    #[test]
    fn builders_that_are_gone_leave_no_entries() {
        let channelz = Channelz::new();
        let kept = Server::builder();
        channelz.add_server("kept", &kept);
        for _ in 0..10_000 {
            channelz.add_server("gone", &Server::builder());
        }
        let entries = channelz.owners().entries.len();
        assert!(entries < 100, "{entries}");
        assert_eq!(&*channelz.owners().entries[0].name, "kept");
    }
}
