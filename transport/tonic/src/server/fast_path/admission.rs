//! The limits on connections and handshakes, and the rejections of clients that do not get a
//! connection.

use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic_rdma_memory::PoolError;
use tonic_rdma_proto::Reject;

use crate::bootstrap::connection::Handshakes;
use crate::bootstrap::service::StaysOnHost;
use crate::bootstrap::tickets::{CAPACITY, LIFETIME, Refused, Ticket, Tickets};
use crate::path::policy::Plaintext;
use crate::path::reason::ReasonCode;
use crate::path::{Path, from_error};

/// Default maximum number of fast-path connections.
pub(crate) const MAX_CONNECTIONS: usize = 4096;
/// Maximum number of descriptors of a fast-path connection and its TCP connection.
#[cfg(feature = "diagnose")]
pub(crate) const DESCRIPTORS: usize = 3;
/// Maximum number of handshakes in progress. A handshake takes a few milliseconds, so this many at
/// a time admit thousands of clients in a second. Clients that stall keep the memory of at most
/// this many connections, 8 KiB each.
pub(crate) const MAX_HANDSHAKES: usize = 64;
/// Number of handshakes that may wait for their turn, for each handshake that may be in progress.
/// All clients that hold a ticket may wait at the same time ([`CAPACITY`]).
pub(crate) const WAITING_FOR_EACH: usize = 16;
const _: () = assert!(MAX_HANDSHAKES * WAITING_FOR_EACH >= CAPACITY);
/// Time limit of the wait for a turn. Clients give up earlier, unless they are configured
/// otherwise.
pub(crate) const TURN_LIMIT: Duration = Duration::from_secs(10);

/// Limits without a public setting. Only tests change the defaults.
#[derive(Clone, Copy)]
pub(crate) struct FixedLimits {
    /// Maximum number of handshakes in progress.
    pub(crate) handshakes: usize,
    /// Maximum number of outstanding tickets.
    pub(crate) tickets: usize,
    pub(crate) ticket_lifetime: Duration,
}

impl Default for FixedLimits {
    fn default() -> Self {
        Self { handshakes: MAX_HANDSHAKES, tickets: CAPACITY, ticket_lifetime: LIFETIME }
    }
}

/// Limits on connections and handshakes.
///
/// | counted | until | beyond the limit |
/// |---|---|---|
/// | every connect request | its handshake is over | refused before the ticket is looked up |
/// | the requests of one client, known by its ticket | their handshakes are over | refused, because a client may have few handshakes at a time |
/// | a handshake in progress | it is over | waits, at most [`TURN_LIMIT`] |
/// | a connection | it ends | refused |
pub(crate) struct ConnectionLimits {
    pub(super) connections: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
    /// Permits for handshakes in progress, and for requests that wait for their turn.
    pub(super) waiting: Arc<Semaphore>,
    /// Permits for bare connections.
    #[cfg(feature = "measure")]
    pub(super) bare: Arc<Semaphore>,
}

impl ConnectionLimits {
    pub(crate) fn new(max_connections: Option<usize>, fixed: FixedLimits) -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        let connections = max_connections.unwrap_or(MAX_CONNECTIONS);
        let FixedLimits { handshakes, .. } = fixed;
        Self {
            connections: permits(connections.min(Semaphore::MAX_PERMITS)),
            handshakes: permits(handshakes),
            waiting: permits(handshakes * (1 + WAITING_FOR_EACH)),
            #[cfg(feature = "measure")]
            bare: permits(1),
        }
    }

    /// Waits for the turn of the request that holds `place` in the queue. `own` counts the client's
    /// handshakes. Returns `None` if the client has too many handshakes, or if the turn does not
    /// come within [`TURN_LIMIT`].
    pub(super) async fn turn(
        &self,
        place: OwnedSemaphorePermit,
        own: Option<Handshakes>,
    ) -> Option<Turn> {
        let own = match own {
            Some(Handshakes(own)) => Some(own.try_acquire_owned().ok()?),
            None => None,
        };
        let turn = self.handshakes.clone().acquire_owned();
        let turn = tokio::time::timeout(TURN_LIMIT, turn).await.ok()?.ok()?;
        Some(Turn { _permits: (turn, place, own) })
    }
}

/// The permits of a handshake, which counts as in progress until this struct is dropped.
pub(super) struct Turn {
    _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit, Option<OwnedSemaphorePermit>),
}

/// Returns the rejection of a connection for which the pool has no memory.
pub(super) fn reject_for(error: &PoolError) -> Reject {
    match error {
        PoolError::File { .. } => Reject::MemoryFiles,
        PoolError::Register(error) => {
            match from_error::landing(error, ReasonCode::PoolExhausted).code() {
                ReasonCode::MemoryFiles => Reject::MemoryFiles,
                ReasonCode::ProcessLimit => {
                    let errno = error.io().raw_os_error().and_then(|errno| errno.try_into().ok());
                    Reject::ProcessLimit { errno: errno.unwrap_or(0) }
                }
                _ => Reject::Resources,
            }
        }
        _ => Reject::Resources,
    }
}

/// Uses a ticket for a connection over `path`. The error contains the rejection, and the reason why
/// the ticket is not valid for the path.
pub(super) fn redeem(
    tickets: &Tickets,
    ticket: Ticket,
    path: Path,
) -> Result<Extensions, (Reject, String)> {
    let mut connection = tickets.redeem(&ticket, Instant::now()).map_err(|refused| {
        let reject = match refused {
            Refused::Withdrawn => Reject::TicketWithdrawn,
            Refused::Unknown | Refused::Used | Refused::Expired => Reject::Ticket,
        };
        (reject, refused.to_string())
    })?;
    match connection.remove::<StaysOnHost>() {
        Some(StaysOnHost) if path.leaves_host() => {
            Err((Reject::Ticket, Plaintext::denied_by_server().to_string()))
        }
        _ => Ok(connection),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::tickets::Holder;

    /// A client may know a device's address from a source other than its Offer.
    #[tokio::test]
    async fn a_ticket_for_shared_memory_alone_admits_to_no_device() {
        let tickets = Tickets::new(4, LIFETIME);
        let issue = |marked: bool| {
            let mut identity = Extensions::new();
            identity.insert(7_u32);
            if marked {
                identity.insert(StaysOnHost);
            }
            tickets.issue(identity, Holder::default(), Instant::now()).unwrap()
        };
        let ticket = issue(true);
        let (_, why) = redeem(&tickets, ticket, Path::Verbs).unwrap_err();
        assert!(why.starts_with("not-encrypted: "), "{why}");
        let (reject, why) = redeem(&tickets, ticket, Path::Shm).unwrap_err();
        assert_eq!((reject, &why[..]), (Reject::Ticket, "ticket already used"));
        for (marked, path) in [(true, Path::Shm), (false, Path::Shm), (false, Path::Verbs)] {
            let identity = redeem(&tickets, issue(marked), path).unwrap();
            assert_eq!((identity.get(), identity.len()), (Some(&7_u32), 1));
        }
    }
}
