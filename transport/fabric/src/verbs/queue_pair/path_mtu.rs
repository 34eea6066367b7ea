//! The path MTU of a queue pair: the smaller of both ends' MTUs.
//!
//! A connect request names the path MTU of the connecting end's port, and rdma_cm gives that MTU to
//! both queue pairs. If the accepting end's port takes only shorter packets, it loses each longer
//! packet. So an accepting end that brings its queue pair up itself uses the smaller MTU, and names
//! that MTU in the byte of its answer behind the private data. rdma_cm fills this byte with zero.
//! So if librdmacm brings the queue pair up, the answer names no MTU, and the path MTU of the
//! request stays.

use crate::link::MAX_PRIVATE_DATA;

/// Length of an answer in bytes: the private data, and the byte behind it.
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

    /// The payload of the longest packet.
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
