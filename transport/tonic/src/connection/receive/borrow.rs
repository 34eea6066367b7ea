//! What the peer has lent, and what of it returns.

use tonic_rdma_fabric::{Lent, Link};
use tonic_rdma_memory::throttled;
use tonic_rdma_proto::{CloseCode, Flow, LentBody, LentPlace, StreamId};

use crate::codec::{LentPiece, Part};
use crate::connection::lifecycle::Life;
use crate::connection::receive::unread::Place;
use crate::connection::state::ConnectionState;
use crate::path::reason::{Reason, ReasonCode};

impl ConnectionState {
    /// Delivers a piece of a body, most of which is lent. A peer that has lent no such
    /// memory has broken the protocol.
    pub(crate) fn borrow(&mut self, stream: StreamId, lent: LentBody, end: bool) {
        let Some(link) = self.link.get_mut() else { return };
        let LentBody { head, place: LentPlace { lease, key, addr }, len, tail } = lent;
        match link.borrow(Lent { lease, key, addr }, len) {
            Ok(lent) => {
                let piece = LentPiece { head, lent: lent.into(), tail };
                let part = Part::Lent(Box::new(piece));
                self.deliver(stream, part, Flow::Lent, Place::Lent, end);
            }
            Err(error) => {
                let text = error.to_string();
                throttled!(warn, peer = %self.lifecycle.peer, %error, "the peer lends what is not there; closing the connection");
                self.conn.close(CloseCode::Breach, &text);
                self.end(Life::Closing(Reason::from_peer(ReasonCode::LinkLost, text)));
            }
        }
    }
}
