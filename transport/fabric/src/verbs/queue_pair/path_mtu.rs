//! The path MTU of a queue pair: the smaller of both ends' MTUs.
//!
//! A connect request names the path MTU of the connecting end's port, and rdma_cm gives that MTU to
//! both queue pairs. If the accepting end's port takes only shorter packets, it loses each longer
//! packet. So an accepting end that brings its queue pair up itself uses the smaller MTU, and names
//! that MTU in the byte of its answer after the private data. rdma_cm fills this byte with zero. So
//! if librdmacm brings the queue pair up, the answer names no MTU, and the path MTU of the request
//! stays.
//!
//! # Proof of the path
//!
//! [`PathProof`] proves that a path carries long packets: the first message in each direction is as
//! long as the payload of the longest packet.
//!
//! A path may carry short packets and lose long packets, because a switch has a smaller MTU or the
//! MTUs of the two ends differ. Such a path would carry the handshake, and then lose each call that
//! needs a longer packet. So a connection counts as established only when a message of this length
//! has arrived at both ends. The client sends first, as iWARP requires, and the server answers with
//! its own message. On RoCE and InfiniBand the completion of a SEND shows that the message has
//! arrived. On iWARP only the answer shows that the message has arrived.
//!
//! | state of this end | event | next state |
//! |---|---|---|
//! | nothing, sent | the peer's message | received, both |
//! | nothing, received | the completion of its own message | sent, both |
//! | both | | the memory goes back to the pool |

use tonic_rdma_memory::{PinnedBuf, Pool};

use crate::error::ConnectError;
use crate::link::MAX_PRIVATE_DATA;

/// Length of an answer in bytes: the private data, and the byte after the private data.
pub(crate) const MAX_ANSWER: usize = MAX_PRIVATE_DATA + 1;

/// A path MTU, as its code in `enum ibv_mtu`: 1 is 256 bytes, 5 is 4,096. Longer packets have
/// greater codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PathMtu(u32);

impl PathMtu {
    /// The path MTU with the given code. `None` if no device has such an MTU.
    pub(crate) fn new(code: u32) -> Option<PathMtu> {
        (1..=5).contains(&code).then_some(PathMtu(code))
    }

    pub(crate) fn code(self) -> u32 {
        self.0
    }

    /// The payload of the longest packet in bytes.
    pub(crate) fn bytes(self) -> u32 {
        128 << self.0
    }
}

/// An upper limit of a queue pair's path MTU. The connect request also limits the path MTU.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MtuLimit {
    /// The MTU of this end's port. The accepting side uses this limit.
    OfPort,
    /// The MTU that the peer's answer names. The connecting side uses this limit.
    Named(Option<PathMtu>),
}

/// The private data of an answer that names a path MTU.
pub(crate) fn answer(private_data: &[u8], mtu: PathMtu) -> Vec<u8> {
    let mut answer = private_data.to_vec();
    answer.resize(MAX_PRIVATE_DATA, 0);
    answer.push(mtu.0 as u8);
    answer
}

/// The path MTU that an answer names. `None` if the answer names no path MTU.
///
/// # Errors
/// The peer names a path MTU that no device has.
pub(crate) fn named(answer: &[u8]) -> Result<Option<PathMtu>, UnknownMtu> {
    match answer.get(MAX_PRIVATE_DATA) {
        None | Some(0) => Ok(None),
        Some(code) => PathMtu::new((*code).into()).map(Some).ok_or(UnknownMtu(*code)),
    }
}

/// The code of a path MTU that no device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnknownMtu(pub(crate) u8);

/// Length of the message in bytes. No device has a path MTU above 4,096 (InfiniBand Architecture
/// Specification 1.3, section 9.7.1).
const LEN: usize = 4096;

/// The memory from which this end's message is sent, and in which the peer's message lands. The
/// contents do not matter, and the device may read and write this memory at the same time.
#[derive(Debug)]
pub(crate) struct PathProof {
    buf: PinnedBuf,
    addr: u64,
    received: bool,
    sent: bool,
}

impl PathProof {
    /// Takes the memory from the pool's control budget.
    pub(crate) fn new(pool: &Pool) -> Result<PathProof, ConnectError> {
        let mut buf = pool.control(LEN).map_err(|e| ConnectError::Memory(e.into()))?;
        buf.resize_zeroed(LEN);
        let addr = buf.as_mut_slice().as_mut_ptr().expose_provenance() as u64;
        Ok(PathProof { buf, addr, received: false, sent: false })
    }

    pub(crate) fn sge(&self) -> rdma_sys::ibv_sge {
        rdma_sys::ibv_sge { addr: self.addr, length: LEN as u32, lkey: self.buf.lkey() }
    }

    /// Notes that the RECV or the SEND has completed.
    pub(crate) fn complete(&mut self, is_recv: bool) {
        *(if is_recv { &mut self.received } else { &mut self.sent }) = true;
    }

    /// True once the peer's message has arrived.
    pub(crate) fn is_received(&self) -> bool {
        self.received
    }

    /// True once the device no longer uses the memory.
    pub(crate) fn is_done(&self) -> bool {
        self.received && self.sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_carries_the_path_mtu_behind_the_private_data() {
        for private_data in [&[][..], &[7; 3], &[7; MAX_PRIVATE_DATA]] {
            for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
                let mtu = PathMtu::new(code).unwrap();
                assert_eq!(mtu.bytes(), bytes);
                let mut answer = answer(private_data, mtu);
                assert_eq!(answer.len(), MAX_ANSWER);
                assert_eq!(answer[..private_data.len()], *private_data);
                // The connection manager pads the answer.
                answer.resize(196, 0);
                assert_eq!(named(&answer), Ok(Some(mtu)));
            }
        }
    }

    #[test]
    fn an_answer_without_a_path_mtu_names_none() {
        assert_eq!(named(&[]), Ok(None));
        assert_eq!(named(&[7; MAX_PRIVATE_DATA]), Ok(None));
        assert_eq!(named(&[0; 196]), Ok(None));
    }

    #[test]
    fn a_path_mtu_that_no_device_has_is_refused() {
        for code in 6..=u8::MAX {
            let mut answer = [0; 196];
            answer[MAX_PRIVATE_DATA] = code;
            assert_eq!(named(&answer), Err(UnknownMtu(code)));
        }
        assert_eq!((PathMtu::new(0), PathMtu::new(6)), (None, None));
    }
}
