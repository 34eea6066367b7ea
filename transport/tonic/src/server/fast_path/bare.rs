//! Bare connections, which carry SENDs and WRITEs without calls for a client's diagnosis to
//! measure.
//!
//! The server serves one bare connection at a time, for [`BARE_LIMIT`] at most, and grants it
//! landing memory for eight WRITEs at a time. A bare connection needs a ticket and counts towards
//! the limit of connections, like any other.

use tonic_rdma_fabric::bare::{self, BareError, BareLimits};
use tonic_rdma_fabric::{Incoming, LinkError};
use tonic_rdma_memory::{Pool, throttled};
use tonic_rdma_proto::{Accept, Hello, Reject, Side};

use super::admission::{Turn, reject_for};
use super::{ACCEPT_LIMIT, FastPath, draining};
use crate::bootstrap::tickets::BARE_LIMIT;
use crate::path::from_error;

impl FastPath {
    /// Serves a bare connection. `handshake` is held until the connection is established.
    pub(super) async fn serve_bare(
        &self,
        mut incoming: Incoming,
        pool: Pool,
        hello: &Hello,
        handshake: Turn,
    ) {
        let Ok(_turn) = self.limits.bare.clone().try_acquire_owned() else {
            return self.refuse(incoming, Reject::Bare, &Reject::Bare.to_string());
        };
        let link = bare::config();
        let need = incoming.control_bytes(&link);
        let room = pool.may_land().and_then(|()| pool.control(need).map(drop));
        if let Err(error) = room {
            return self.refuse(incoming, reject_for(&error), &error.to_string());
        }
        let (grows, env_tos) = (incoming.grows(), self.env_type_of_service);
        let options = self.context.configure(Side::Server, &pool, grows, env_tos);
        let accept =
            Accept { version: hello.version(), settings: options.proto.settings() }.encode();
        incoming.refuse_with(&Reject::Resources.encode());
        let peer = incoming.peer_addr();
        let accepted = incoming.accept(&link, &pool, &accept, ACCEPT_LIMIT).await;
        drop(handshake);
        let link = match accepted {
            Ok(link) => link,
            Err(error) => {
                let reason = from_error::connect(error);
                return tracing::debug!(%peer, %reason, "bare connection not established");
            }
        };
        tracing::debug!(%peer, "bare connection open");
        tokio::select! {
            ended = bare::serve(link, pool.clone(), BareLimits::default()) => match ended {
                Ok(()) | Err(BareError::Link(LinkError::Disconnected { .. })) => {
                    tracing::debug!(%peer, "bare connection closed");
                }
                Err(error) => throttled!(in self.log.ends, info, %peer, %error, "bare connection ended"),
            },
            () = tokio::time::sleep(BARE_LIMIT) => {
                throttled!(in self.log.ends, info, %peer, limit_s = BARE_LIMIT.as_secs(), "bare connection closed: too old");
            }
            () = draining(self.drain.clone()) => {}
        }
        // Return the memory at once, because there may be no other connection that would return it.
        pool.trim_now();
    }
}
