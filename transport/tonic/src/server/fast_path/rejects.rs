//! Rejections of clients that do not get a connection.

use http::Extensions;
use tokio::time::Instant;
use tonic_rdma_memory::PoolError;
use tonic_rdma_proto::Reject;

use crate::bootstrap::service::StaysOnHost;
use crate::bootstrap::tickets::{Refused, Ticket, Tickets};
use crate::path::policy::Plaintext;
use crate::path::reason::ReasonCode;
use crate::path::{Path, from_error};

/// The rejection if this process has no room for a connection.
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
    use crate::bootstrap::tickets::{Holder, LIFETIME};

    /// A client may know a device's address from elsewhere than its Offer.
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
