//! Doing without landing memory: the rest of a body comes by DATA, within the stream's window.
//!
//! One direction of a stream changes to it, once and for good:
//!
//! | a stream's body is received | on | next |
//! |---|---|---|
//! | by WRITE and DATA | [`Connection::decline_landing`]: DECLINE is sent | by DATA |
//! | by WRITE and DATA | DECLINE with OWN | by DATA |
//!
//! | a stream's body is sent | on | next |
//! |---|---|---|
//! | by WRITE and DATA | DECLINE | by DATA |
//! | by WRITE and DATA | a GRANT of memory that this side cannot write to ([`Connection::cannot_write`]): ABORT, and DECLINE with OWN | by DATA |
//!
//! What was granted before is written, and ends with DONE or, after a RECALL, with ABORT. Then the
//! rest of the message in front goes by DATA, and all that is behind it. The receiver forgets
//! REQUESTs that cross its DECLINE.

use super::connection::Connection;
use crate::frame::Frame;
use crate::ids::StreamId;

impl Connection {
    /// This side has no landing memory for what the peer sends on a stream, and waiting brings
    /// none: the rest comes by DATA. Does nothing for unknown streams.
    pub fn decline_landing(&mut self, id: StreamId) {
        let Some(key) = self.streams.key(id.0) else { return };
        let stream = &mut self.streams[key];
        if !std::mem::replace(&mut stream.landing.declined, true) {
            stream.landing.requests.clear();
            self.output.control.push(Frame::Decline { stream: id.0, own: false });
        }
    }

    /// This side cannot write to the peer's memory with this key, of which no GRANT has been
    /// received yet. What is granted there goes by DATA, until
    /// [`forget_unwritable`](Self::forget_unwritable).
    pub fn cannot_write(&mut self, rkey: u32) {
        self.peer_grants.set_unwritable(rkey);
    }

    /// The peer has taken back the memory with this key.
    pub fn forget_unwritable(&mut self, rkey: u32) {
        self.peer_grants.forget_unwritable(rkey);
    }

    pub(super) fn on_own_decline(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        stream.landing.declined = true;
        stream.landing.requests.clear();
    }
}
