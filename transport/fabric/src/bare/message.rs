//! The messages between the ends of a bare connection, which are SENDs of at most [`MAX_LEN`]
//! bytes, and the errors of a bare connection.
//!
//! | kind | fields (little-endian) | answer |
//! |---|---|---|
//! | 1 echo | any | the same bytes |
//! | 2 places | n times: address u64, key u32, bytes u32 | places of the answering end |
//! | 3 write | bytes u32, number u32, in flight u32 | 4, after the last WRITE |
//! | 4 written | | |

use tonic_rdma_memory::{PoolError, RegisterError};

use crate::error::LinkError;

/// Maximum length of a message in bytes.
const MAX_LEN: usize = 512;
/// Maximum number of places of one end.
pub(super) const MAX_PLACES: usize = 16;
const PLACE_LEN: usize = 16;

/// Memory that the other end may WRITE to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BarePlace {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    /// The length in bytes.
    pub(super) len: u32,
}

/// The length of each WRITE, the number of WRITEs, and the number in flight at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Writes {
    pub(super) len: u32,
    pub(super) count: u32,
    pub(super) in_flight: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum BareMessage {
    Echo,
    Places(Vec<BarePlace>),
    Write(Writes),
    Written,
}

impl BareMessage {
    /// The name and the kind, for errors.
    fn name(&self) -> String {
        let (name, kind) = match self {
            BareMessage::Echo => ("echo", ECHO),
            BareMessage::Places(_) => ("places", PLACES),
            BareMessage::Write(_) => ("write", WRITE),
            BareMessage::Written => ("written", WRITTEN),
        };
        format!("{name} (kind {kind})")
    }

    /// The error for this message, which came where `expected` was expected.
    pub(super) fn instead_of(&self, expected: &'static str) -> BareError {
        BareError::Unexpected { expected, received: self.name() }
    }
}

const ECHO: u8 = 1;
const PLACES: u8 = 2;
const WRITE: u8 = 3;
const WRITTEN: u8 = 4;

/// Writes an echo of `len` bytes, at least 1, to `out`.
pub(super) fn echo(len: usize, out: &mut Vec<u8>) {
    out.clear();
    out.resize(len.clamp(1, MAX_LEN), 0xa5);
    out[0] = ECHO;
}

pub(super) fn places(places: &[BarePlace], out: &mut Vec<u8>) {
    out.clear();
    out.push(PLACES);
    for place in places.iter().take(MAX_PLACES) {
        out.extend(place.addr.to_le_bytes());
        out.extend(place.rkey.to_le_bytes());
        out.extend(place.len.to_le_bytes());
    }
}

pub(super) fn write(writes: Writes, out: &mut Vec<u8>) {
    out.clear();
    out.push(WRITE);
    for field in [writes.len, writes.count, writes.in_flight] {
        out.extend(field.to_le_bytes());
    }
}

pub(super) fn written(out: &mut Vec<u8>) {
    out.clear();
    out.push(WRITTEN);
}

/// Decodes an untrusted message.
pub(super) fn decode(bytes: &[u8]) -> Result<BareMessage, BareError> {
    let invalid = |fault: String| {
        BareError::Message(format!("{fault}, received {} bytes: {:02x?}", bytes.len(), head(bytes)))
    };
    let Some((kind, fields)) = bytes.split_first() else {
        return Err(invalid("expected a kind".to_owned()));
    };
    match *kind {
        ECHO => Ok(BareMessage::Echo),
        PLACES
            if fields.len().is_multiple_of(PLACE_LEN) && fields.len() <= MAX_PLACES * PLACE_LEN =>
        {
            Ok(BareMessage::Places(fields.chunks_exact(PLACE_LEN).filter_map(place).collect()))
        }
        WRITE => match words(fields) {
            Some([len, count, in_flight]) => {
                Ok(BareMessage::Write(Writes { len, count, in_flight }))
            }
            None => Err(invalid("write (kind 3): expected 13 bytes".to_owned())),
        },
        WRITTEN if fields.is_empty() => Ok(BareMessage::Written),
        PLACES => Err(invalid(format!(
            "places (kind 2): expected 1 byte and {PLACE_LEN} for each of at most {MAX_PLACES} places"
        ))),
        WRITTEN => Err(invalid("written (kind 4): expected 1 byte".to_owned())),
        unknown => Err(invalid(format!("unknown kind {unknown}: expected 1 to 4"))),
    }
}

fn head(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(16)]
}

fn place(bytes: &[u8]) -> Option<BarePlace> {
    let (addr, rest) = bytes.split_first_chunk()?;
    let [rkey, len] = words(rest)?;
    Some(BarePlace { addr: u64::from_le_bytes(*addr), rkey, len })
}

fn words<const N: usize>(bytes: &[u8]) -> Option<[u32; N]> {
    let mut words = [0; N];
    if bytes.len() != N * 4 {
        return None;
    }
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(words)
}

/// The reason why a bare connection ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BareError {
    /// The link failed, or the peer has closed the link.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The pool has no memory to WRITE from.
    #[error("no memory to WRITE from: {0}")]
    Pool(#[from] PoolError),
    /// Memory to WRITE to could not be registered.
    #[error("no memory to WRITE to: {0}")]
    Register(#[from] RegisterError),
    /// Pool memory has no registration.
    #[error("no memory to WRITE from: the pool does not know its own")]
    NoSource,
    /// The peer granted no place that is long enough.
    #[error("no place for a WRITE of {len} bytes: the peer's longest has {longest}")]
    TooLong {
        /// The length of the WRITE in bytes.
        len: usize,
        /// The length of the longest place in bytes.
        longest: usize,
    },
    /// The peer wanted more bytes than this end writes on one request.
    #[error("the peer wants {wanted} bytes written, at most {limit} are")]
    TooMuch {
        /// The number of bytes that the peer wants.
        wanted: u64,
        /// The maximum number of bytes.
        limit: u64,
    },
    /// The peer wanted longer WRITEs than this end does.
    #[error("the peer wants WRITEs of {len} bytes, each may have at most {limit}")]
    LongWrites {
        /// The length of each WRITE in bytes.
        len: u32,
        /// The maximum length in bytes.
        limit: usize,
    },
    /// The peer wanted more WRITEs than this end does on one request.
    #[error("the peer wants {wanted} WRITEs, at most {limit} are done at a request")]
    TooMany {
        /// The number of WRITEs that the peer wants.
        wanted: u32,
        /// The maximum number of WRITEs.
        limit: u64,
    },
    /// The peer sent a message that cannot be decoded.
    #[error("invalid message from the peer: {0}")]
    Message(String),
    /// The peer sent a valid message that was not expected at this point.
    #[error("unexpected message from the peer: expected {expected}, received {received}")]
    Unexpected {
        /// The messages that were expected.
        expected: &'static str,
        /// The name and the kind of the received message.
        received: String,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let mut out = Vec::new();
        echo(64, &mut out);
        assert_eq!((out.len(), decode(&out).unwrap()), (64, BareMessage::Echo));
        let all = [BarePlace { addr: u64::MAX, rkey: 7, len: 1 << 20 }; MAX_PLACES];
        places(&all, &mut out);
        assert!(out.len() <= MAX_LEN);
        assert_eq!(decode(&out).unwrap(), BareMessage::Places(all.into()));
        let writes = Writes { len: 4096, count: u32::MAX, in_flight: 8 };
        write(writes, &mut out);
        assert_eq!(decode(&out).unwrap(), BareMessage::Write(writes));
        written(&mut out);
        assert_eq!(decode(&out).unwrap(), BareMessage::Written);
    }

    #[test]
    fn what_is_none_is_named() {
        let places = "places (kind 2): expected 1 byte and 16 for each of at most 16 places";
        let cases: [(&[u8], &str); 7] = [
            (&[], "expected a kind"),
            (&[0], "unknown kind 0: expected 1 to 4"),
            (&[5, 1], "unknown kind 5: expected 1 to 4"),
            (&[4, 0], "written (kind 4): expected 1 byte"),
            (&[3; 12], "write (kind 3): expected 13 bytes"),
            (&[2; 18], places),
            (&[2; 273], places),
        ];
        for (bytes, fault) in cases {
            let error = decode(bytes).unwrap_err().to_string();
            let received = format!("{fault}, received {} bytes: ", bytes.len());
            assert!(
                error.starts_with(&format!("invalid message from the peer: {received}")),
                "{error}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_LEN)) {
            let _ = decode(&bytes);
        }
    }
}
