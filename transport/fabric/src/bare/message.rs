//! The messages between the ends of a bare connection, whose layouts are in `docs/protocol.md`, and
//! the errors of a bare connection. Each message is one SEND.

use tonic_rdma_memory::{PoolError, RegisterError};

use crate::error::{LinkError, ONE_VERSION};

/// Maximum length of a message in bytes.
pub(super) const MAX_LEN: usize = 512;
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
    #[error("invalid message from the peer: {}; {}", .0, ONE_VERSION)]
    Message(String),
    /// The peer sent a valid message that was not expected at this point.
    #[error(
        "unexpected message from the peer: expected {expected}, received {received}; {}",
        ONE_VERSION
    )]
    Unexpected {
        /// The messages that were expected.
        expected: &'static str,
        /// The name and the kind of the received message.
        received: String,
    },
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use tonic_rdma_source_rules::golden::{Document, Golden};

    use super::*;
    use crate::bare::end::SLOTS;
    use crate::bare::{BareLimits, MAX_ECHOES};

    /// All values in a message differ, so that no two of its fields can be mistaken for each other.
    fn cases() -> [(&'static str, BareMessage); 5] {
        let first = BarePlace { addr: 0x1817_1615_1413_1211, rkey: 0x2423_2221, len: 0x3433_3231 };
        let second = BarePlace { addr: 0x4847_4645_4443_4241, rkey: 0x5453_5251, len: 0x6463_6261 };
        let writes = Writes { len: 0x1413_1211, count: 0x2423_2221, in_flight: 0x3433_3231 };
        [
            ("ECHO", BareMessage::Echo),
            ("PLACES", BareMessage::Places(vec![first, second])),
            ("PLACES/none", BareMessage::Places(vec![])),
            ("WRITE", BareMessage::Write(writes)),
            ("WRITTEN", BareMessage::Written),
        ]
    }

    /// The bytes of a message, and the values of its fields with their names.
    fn encoded(message: &BareMessage) -> (Vec<u8>, Vec<(&'static str, u64)>) {
        let mut out = vec![0xee; 3];
        let values = match message {
            BareMessage::Echo => {
                echo(4, &mut out);
                vec![]
            }
            BareMessage::Places(all) => {
                places(all, &mut out);
                let names = [["address", "rkey", "len"], ["address_2", "rkey_2", "len_2"]];
                let place = |(names, place): ([_; 3], &BarePlace)| {
                    let BarePlace { addr, rkey, len } = *place;
                    names.into_iter().zip([addr, rkey.into(), len.into()])
                };
                names.into_iter().zip(all).flat_map(place).collect()
            }
            BareMessage::Write(writes) => {
                write(*writes, &mut out);
                let Writes { len, count, in_flight } = *writes;
                vec![("len", len.into()), ("count", count.into()), ("in_flight", in_flight.into())]
            }
            BareMessage::Written => {
                written(&mut out);
                vec![]
            }
        };
        (out, values)
    }

    #[test]
    fn each_message_has_its_bytes_and_its_table() {
        let golden = Golden::parse(include_str!("../../golden/bare.txt"));
        let document = Document::protocol();
        let mut kinds = BTreeSet::new();
        for (name, message) in cases() {
            let (case, (bytes, values)) = (golden.case(name), encoded(&message));
            case.assert_bytes(&bytes);
            assert_eq!(decode(&case.bytes()).unwrap(), message, "{name}");
            case.assert_values(&values, &["kind"]);
            let (title, variant) = name.split_once('/').unwrap_or((name, ""));
            let kind = case.field("kind").number();
            assert_eq!(message.name(), format!("{} (kind {kind})", title.to_lowercase()));
            if variant.is_empty() {
                let is_second = |row: &[String; 3]| row[2].ends_with("_2");
                let rows: Vec<_> =
                    case.layout().into_iter().filter(|row| !is_second(row)).collect();
                document.assert_table(&format!("#### {title}: {kind}"), &rows);
            }
            kinds.insert(kind);
        }
        golden.assert_all_used();
        let is_known = |kind: &u8| {
            let error = decode(&[*kind]).err().map(|error| error.to_string());
            error.is_none_or(|error| !error.contains("unknown kind"))
        };
        let known: BTreeSet<u64> = (0..=u8::MAX).filter(is_known).map(u64::from).collect();
        assert_eq!(kinds, known, "a kind has no case");
    }

    #[test]
    fn the_longest_messages_fit_a_slot() {
        let mut out = Vec::new();
        echo(usize::MAX, &mut out);
        assert_eq!((out.len(), decode(&out).unwrap()), (MAX_LEN, BareMessage::Echo));
        let too_many = [BarePlace { addr: u64::MAX, rkey: 7, len: 1 << 20 }; MAX_PLACES + 1];
        places(&too_many, &mut out);
        assert!(out.len() <= MAX_LEN);
        assert_eq!(decode(&out).unwrap(), BareMessage::Places(too_many[..MAX_PLACES].into()));
    }

    #[test]
    fn the_document_has_the_limits_of_the_code() {
        let BareLimits { place_len, requested, requested_writes, .. } = BareLimits::default();
        let limits = [
            ("MAX_LEN", MAX_LEN as u64),
            ("SLOTS", SLOTS as u64),
            ("MAX_ECHOES", MAX_ECHOES as u64),
            ("MAX_PLACES", MAX_PLACES as u64),
            ("place_len", place_len as u64),
            ("requested", requested),
            ("requested_writes", requested_writes),
        ];
        let limits = limits.map(|(name, value)| [name.to_owned(), value.to_string()]);
        Document::protocol().assert_table("### Limits of bare connections", &limits);
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
            assert!(error.ends_with("; run one version of tonic-rdma at both ends"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_LEN)) {
            let _ = decode(&bytes);
        }
    }
}
