//! Proves that a path carries long packets: the first message in each direction is as long as the
//! payload of the longest packet.
//!
//! A path may carry short packets and lose long packets, because a switch has a smaller MTU or the
//! MTUs of the two ends differ. Such a path would carry the handshake, and then lose each call that
//! needs a longer packet. So a connection counts as established only when a message of this length
//! has arrived at both ends. The client sends first, as iWARP requires, and the server answers with
//! its own message. On RoCE and InfiniBand the completion of a SEND shows that the message has
//! arrived. On iWARP only the answer shows that.
//!
//! | state of this end | event | next state |
//! |---|---|---|
//! | nothing | the peer's message | received |
//! | nothing, received | the completion of its own message | sent, both |
//! | both | | the memory goes back to the pool |

use tonic_rdma_memory::{PinnedBuf, Pool};

use crate::error::ConnectError;

/// Length of the message in bytes. No device has a path MTU above 4,096 (InfiniBand Architecture
/// Specification 1.3, section 9.7.1).
const LEN: usize = 4096;

/// The memory from which this end's message is sent, and in which the peer's message lands. The
/// contents do not matter, and the device may read and write this memory at the same time.
#[derive(Debug)]
pub(super) struct PathProof {
    buf: PinnedBuf,
    addr: u64,
    received: bool,
    sent: bool,
}

impl PathProof {
    /// Takes the memory from the pool's control budget.
    pub(super) fn new(pool: &Pool) -> Result<PathProof, ConnectError> {
        let mut buf = pool.control(LEN).map_err(|e| ConnectError::Memory(e.into()))?;
        buf.resize_zeroed(LEN);
        let addr = buf.as_mut_slice().as_mut_ptr().expose_provenance() as u64;
        Ok(PathProof { buf, addr, received: false, sent: false })
    }

    pub(super) fn sge(&self) -> rdma_sys::ibv_sge {
        rdma_sys::ibv_sge { addr: self.addr, length: LEN as u32, lkey: self.buf.lkey() }
    }

    /// Notes that the RECV or the SEND has completed.
    pub(super) fn complete(&mut self, is_recv: bool) {
        *(if is_recv { &mut self.received } else { &mut self.sent }) = true;
    }

    /// True once the peer's message has arrived.
    pub(super) fn is_received(&self) -> bool {
        self.received
    }

    /// True once the device no longer uses the memory.
    pub(super) fn is_done(&self) -> bool {
        self.received && self.sent
    }
}
