//! Messages on the socket, whose layouts are in `docs/protocol.md`.
//!
//! In the messages of the handshake, except READY, a magic follows the kind. The magic ends with
//! the version. An end that speaks another version is refused. The refused end finds the version of
//! the other end in the magic of the answer.

use std::ops::RangeInclusive;

use crate::error::ONE_VERSION;
use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::Takes;
use crate::shm::ring::Shape;
use crate::shm::wakeup::event_fd::{ChannelEnd, ChannelName};

/// The version of the protocol.
pub(crate) const VERSION: u8 = 12;
const PROTOCOL: [u8; 6] = *b"trdshm";
/// Maximum length of the text of REFUSED, in bytes.
pub(crate) const MAX_TEXT: usize = 128;
/// Protocol and version.
const MAGIC: [u8; 7] = {
    let [a, b, c, d, e, f] = PROTOCOL;
    [a, b, c, d, e, f, VERSION]
};

macro_rules! message_kinds {
    ($($kind:ident = $code:literal,)*) => {
        /// The kind of a message: its first byte.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum MessageKind { $($kind = $code,)* }

        impl MessageKind {
            /// All kinds, in the order of their codes.
            #[cfg(test)]
            pub(crate) const ALL: &[MessageKind] = &[$(MessageKind::$kind,)*];

            fn from_code(code: u8) -> Option<MessageKind> {
                match code {
                    $($code => Some(MessageKind::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

message_kinds! {
    Hello = 1,
    Accept = 2,
    Reject = 3,
    Refused = 4,
    Chunk = 5,
    Forget = 6,
    Wake = 7,
    Ready = 8,
    OtherUser = 9,
    Lend = 10,
    Taken = 11,
    Declined = 12,
    Unlend = 13,
    Name = 14,
    Unname = 15,
    NoRoom = 16,
}

impl MessageKind {
    /// Whether protocol and version follow the kind, because a peer of another version may read the
    /// message.
    fn has_magic(self) -> bool {
        match self {
            MessageKind::Hello
            | MessageKind::Accept
            | MessageKind::Reject
            | MessageKind::Refused
            | MessageKind::OtherUser
            | MessageKind::NoRoom => true,
            MessageKind::Chunk
            | MessageKind::Forget
            | MessageKind::Wake
            | MessageKind::Ready
            | MessageKind::Lend
            | MessageKind::Taken
            | MessageKind::Declined
            | MessageKind::Unlend
            | MessageKind::Name
            | MessageKind::Unname => false,
        }
    }

    /// The lengths in bytes that a message of this kind may have.
    fn lengths(self) -> RangeInclusive<usize> {
        const HEAD: usize = 1 + MAGIC.len();
        match self {
            MessageKind::Hello => HEAD + 9..=HEAD + 9 + MAX_PRIVATE_DATA,
            MessageKind::Accept => HEAD + 25..=HEAD + 25 + MAX_PRIVATE_DATA,
            MessageKind::Reject => HEAD..=HEAD + MAX_PRIVATE_DATA,
            MessageKind::Refused => HEAD..=HEAD + MAX_TEXT,
            MessageKind::OtherUser | MessageKind::NoRoom => HEAD + 4..=HEAD + 4,
            MessageKind::Chunk | MessageKind::Name => 21..=21,
            MessageKind::Lend => 22..=22,
            MessageKind::Forget
            | MessageKind::Taken
            | MessageKind::Declined
            | MessageKind::Unlend
            | MessageKind::Unname => 5..=5,
            MessageKind::Wake => 1..=1,
            MessageKind::Ready => 9..=26,
        }
    }
}

/// Whether the peer may lend on the memory that it borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LendOn {
    /// Only the peer may read the memory.
    Never = 0,
    /// The peer may lend the memory on to processes of the same user.
    Allowed = 1,
    /// The memory has already been lent on, and comes with its owner's pipe.
    Done = 2,
}

/// A message on the unix socket, without its descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Hello { shape: Shape, takes: Takes, private_data: Vec<u8> },
    Accept { shape: Shape, takes: Takes, runtime: u64, nonce: u64, private_data: Vec<u8> },
    Reject { private_data: Vec<u8> },
    Refused { text: String },
    OtherUser { uid: u32 },
    NoRoom { errno: u32 },
    Chunk { rkey: u32, addr: u64, len: u64 },
    Forget { rkey: u32 },
    Wake,
    Ready { nonce: u64, channel: Option<ChannelName> },
    Lend { key: u32, addr: u64, len: u64, lend_on: LendOn },
    Taken { key: u32 },
    Declined { key: u32 },
    Unlend { key: u32 },
    Name { key: u32, addr: u64, len: u64 },
    Unname { key: u32 },
}

impl Message {
    pub(crate) fn kind(&self) -> MessageKind {
        match self {
            Message::Hello { .. } => MessageKind::Hello,
            Message::Accept { .. } => MessageKind::Accept,
            Message::Reject { .. } => MessageKind::Reject,
            Message::Refused { .. } => MessageKind::Refused,
            Message::OtherUser { .. } => MessageKind::OtherUser,
            Message::NoRoom { .. } => MessageKind::NoRoom,
            Message::Chunk { .. } => MessageKind::Chunk,
            Message::Forget { .. } => MessageKind::Forget,
            Message::Wake => MessageKind::Wake,
            Message::Ready { .. } => MessageKind::Ready,
            Message::Lend { .. } => MessageKind::Lend,
            Message::Taken { .. } => MessageKind::Taken,
            Message::Declined { .. } => MessageKind::Declined,
            Message::Unlend { .. } => MessageKind::Unlend,
            Message::Name { .. } => MessageKind::Name,
            Message::Unname { .. } => MessageKind::Unname,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(96);
        let kind = self.kind();
        out.push(kind as u8);
        if kind.has_magic() {
            out.extend(MAGIC);
        }
        match self {
            Message::Hello { shape, takes, private_data } => {
                out.extend(shape.to_bytes());
                out.push(takes_byte(*takes));
                out.extend(private_data);
            }
            Message::Accept { shape, takes, runtime, nonce, private_data } => {
                out.extend(shape.to_bytes());
                out.push(takes_byte(*takes));
                out.extend(runtime.to_le_bytes());
                out.extend(nonce.to_le_bytes());
                out.extend(private_data);
            }
            Message::Reject { private_data } => out.extend(private_data),
            Message::Refused { text } => out.extend(text.bytes().take(MAX_TEXT)),
            Message::OtherUser { uid: word } | Message::NoRoom { errno: word } => {
                out.extend(word.to_le_bytes());
            }
            Message::Chunk { rkey: key, addr, len }
            | Message::Lend { key, addr, len, .. }
            | Message::Name { key, addr, len } => {
                out.extend(key.to_le_bytes());
                out.extend(addr.to_le_bytes());
                out.extend(len.to_le_bytes());
                if let Message::Lend { lend_on, .. } = self {
                    out.push(*lend_on as u8);
                }
            }
            Message::Forget { rkey: key }
            | Message::Taken { key }
            | Message::Declined { key }
            | Message::Unlend { key }
            | Message::Unname { key } => out.extend(key.to_le_bytes()),
            Message::Wake => {}
            Message::Ready { nonce, channel } => {
                out.extend(nonce.to_le_bytes());
                if let Some(ChannelName { number, runtime, end }) = channel {
                    out.extend(number.to_le_bytes());
                    out.extend(runtime.to_le_bytes());
                    out.push(u8::from(*end == ChannelEnd::Taker));
                }
            }
        }
        out
    }

    /// Decodes a message. `None` if the message is invalid.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Message> {
        let (code, rest) = bytes.split_first()?;
        let kind = MessageKind::from_code(*code)?;
        let rest = if kind.has_magic() { rest.strip_prefix(&MAGIC)? } else { rest };
        let (message, rest) = match kind {
            MessageKind::Hello => {
                let (shape, takes, rest) = greeting(rest)?;
                (Message::Hello { shape, takes, private_data: private_data(rest)? }, &[][..])
            }
            MessageKind::Accept => {
                let (shape, takes, rest) = greeting(rest)?;
                let (runtime, rest) = u64_of(rest)?;
                let (nonce, rest) = u64_of(rest)?;
                let private_data = private_data(rest)?;
                (Message::Accept { shape, takes, runtime, nonce, private_data }, &[][..])
            }
            MessageKind::Reject => (Message::Reject { private_data: private_data(rest)? }, &[][..]),
            MessageKind::Refused => {
                let text = String::from_utf8_lossy(rest).into_owned();
                (Message::Refused { text }, &[][..])
            }
            MessageKind::OtherUser => {
                let (uid, rest) = u32_of(rest)?;
                (Message::OtherUser { uid }, rest)
            }
            MessageKind::NoRoom => {
                let (errno, rest) = u32_of(rest)?;
                (Message::NoRoom { errno }, rest)
            }
            MessageKind::Chunk => {
                let (rkey, addr, len, rest) = file(rest)?;
                (Message::Chunk { rkey, addr, len }, rest)
            }
            MessageKind::Name => {
                let (key, addr, len, rest) = file(rest)?;
                (Message::Name { key, addr, len }, rest)
            }
            MessageKind::Lend => {
                let (key, addr, len, rest) = file(rest)?;
                let (lend_on, rest) = rest.split_first()?;
                let lend_on = match lend_on {
                    0 => LendOn::Never,
                    1 => LendOn::Allowed,
                    2 => LendOn::Done,
                    _ => return None,
                };
                (Message::Lend { key, addr, len, lend_on }, rest)
            }
            MessageKind::Forget => {
                let (rkey, rest) = u32_of(rest)?;
                (Message::Forget { rkey }, rest)
            }
            MessageKind::Taken => {
                let (key, rest) = u32_of(rest)?;
                (Message::Taken { key }, rest)
            }
            MessageKind::Declined => {
                let (key, rest) = u32_of(rest)?;
                (Message::Declined { key }, rest)
            }
            MessageKind::Unlend => {
                let (key, rest) = u32_of(rest)?;
                (Message::Unlend { key }, rest)
            }
            MessageKind::Unname => {
                let (key, rest) = u32_of(rest)?;
                (Message::Unname { key }, rest)
            }
            MessageKind::Wake => (Message::Wake, rest),
            MessageKind::Ready => {
                let (nonce, rest) = u64_of(rest)?;
                let channel = match rest {
                    [] => None,
                    rest => Some(channel_name(rest)?),
                };
                (Message::Ready { nonce, channel }, &[][..])
            }
        };
        rest.is_empty().then_some(message)
    }
}

/// The messages that a connecting end expects as an answer, for [`unexpected`].
pub(crate) const ANSWERS: &str =
    "Accept with descriptors, or Reject, Refused, OtherUser or NoRoom without";

/// The messages that the end of an established link expects, for [`unexpected`].
pub(crate) const OF_A_LINK: &str = "Chunk, Lend or Name with descriptors, or Forget, Wake, Taken, \
                                    Declined, Unlend, Unname or Refused without";

/// Describes a message that came where `expected` was expected: its kind, its length, and whether
/// it is valid and has descriptors.
pub(crate) fn unexpected(expected: &str, bytes: &[u8], has_fds: bool) -> String {
    let len = bytes.len();
    let kind = bytes.first().map(|code| (code, MessageKind::from_code(*code)));
    let received = match kind {
        None => "an empty message".to_owned(),
        Some((code, None)) => format!("{len} bytes of the unknown kind {code}"),
        Some((code, Some(kind))) => {
            let lengths = kind.lengths();
            let fault = match (lengths.contains(&len), Message::decode(bytes)) {
                (false, None) if lengths.start() == lengths.end() => {
                    format!(" instead of {}", lengths.start())
                }
                (false, None) => format!(" instead of {} to {}", lengths.start(), lengths.end()),
                (true, None) => " with an invalid field".to_owned(),
                (_, Some(_)) => String::new(),
            };
            format!("{kind:?} (kind {code}) of {len} bytes{fault}")
        }
    };
    let with = if has_fds { ", with descriptors" } else { "" };
    format!("expected {expected}, received {received}{with}")
}

/// The text of REFUSED for a message that came instead of a greeting.
pub(crate) fn not_a_greeting(bytes: &[u8]) -> String {
    format!("{}; {ONE_VERSION}", unexpected("Hello (kind 1)", bytes, false))
}

/// The version of a handshake message, if it differs from this end's version.
pub(crate) fn other_version(bytes: &[u8]) -> Option<u8> {
    let (code, rest) = bytes.split_first()?;
    if !MessageKind::from_code(*code)?.has_magic() {
        return None;
    }
    let version = *rest.strip_prefix(&PROTOCOL)?.first()?;
    (version != VERSION).then_some(version)
}

/// Decodes the common beginning of HELLO and ACCEPT.
fn greeting(bytes: &[u8]) -> Option<(Shape, Takes, &[u8])> {
    let (slots, rest) = u32_of(bytes)?;
    let (slot_size, rest) = u32_of(rest)?;
    let shape = Shape { slots, slot_size };
    let (takes, rest) = rest.split_first()?;
    shape.is_sound().then_some((shape, takes_of(*takes)?, rest))
}

fn private_data(bytes: &[u8]) -> Option<Vec<u8>> {
    (bytes.len() <= MAX_PRIVATE_DATA).then(|| bytes.to_vec())
}

/// Decodes key, address and length of a file, which must lie within the address space.
fn file(bytes: &[u8]) -> Option<(u32, u64, u64, &[u8])> {
    let (key, rest) = u32_of(bytes)?;
    let (addr, rest) = u64_of(rest)?;
    let (len, rest) = u64_of(rest)?;
    addr.checked_add(len).map(|_| (key, addr, len, rest))
}

fn channel_name(bytes: &[u8]) -> Option<ChannelName> {
    let (number, rest) = u64_of(bytes)?;
    let (runtime, rest) = u64_of(rest)?;
    let end = match rest {
        [0] => ChannelEnd::Maker,
        [1] => ChannelEnd::Taker,
        _ => return None,
    };
    Some(ChannelName { number, runtime, end })
}

fn takes_byte(takes: Takes) -> u8 {
    u8::from(takes.lent) | u8::from(takes.named) << 1
}

fn takes_of(byte: u8) -> Option<Takes> {
    (byte < 4).then_some(Takes { lent: byte & 1 != 0, named: byte & 2 != 0 })
}

fn u32_of(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*number), rest))
}

fn u64_of(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::socket::MAX_MESSAGE;

    #[test]
    fn messages_round_trip_and_nothing_else_does() {
        let shape = Shape { slots: 3, slot_size: 128 };
        let private_data = vec![7; MAX_PRIVATE_DATA];
        let takes = Takes { lent: true, named: false };
        let named = Takes { lent: false, named: true };
        for message in [
            Message::Hello { shape, takes, private_data: private_data.clone() },
            Message::Hello { shape, takes: Takes::ALL, private_data: vec![] },
            Message::Accept { shape, takes, runtime: u64::MAX, nonce: 1, private_data: vec![] },
            Message::Accept { shape, takes: named, runtime: 0, nonce: 0, private_data: vec![9; 3] },
            Message::Reject { private_data: private_data.clone() },
            Message::Refused { text: "no".into() },
            Message::OtherUser { uid: 1000 },
            Message::NoRoom { errno: 24 },
            Message::Chunk { rkey: 1, addr: 2, len: 3 },
            Message::Lend { key: 1, addr: 2, len: 3, lend_on: LendOn::Never },
            Message::Lend { key: 1, addr: 2, len: 3, lend_on: LendOn::Allowed },
            Message::Lend { key: 1, addr: 2, len: 3, lend_on: LendOn::Done },
            Message::Forget { rkey: 9 },
            Message::Wake,
            Message::Ready { nonce: 1, channel: None },
            Message::Ready {
                nonce: 0,
                channel: Some(ChannelName { number: 1, runtime: 2, end: ChannelEnd::Maker }),
            },
            Message::Ready {
                nonce: 0,
                channel: Some(ChannelName { number: 1, runtime: 2, end: ChannelEnd::Taker }),
            },
        ] {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            assert!(message.kind().lengths().contains(&bytes.len()), "{message:?}");
            assert_eq!(Message::decode(&bytes[..bytes.len().min(3) - 1]), None, "{message:?}");
        }
        assert_eq!(Message::decode(&[]), None);
        assert_eq!(Message::decode(&[99; 40]), None);
        let too_much = Message::Hello { shape, takes, private_data: vec![7; MAX_PRIVATE_DATA + 1] };
        assert_eq!(Message::decode(&too_much.encode()), None);
        let no_shape =
            Message::Hello { shape: Shape { slots: 0, slot_size: 64 }, takes, private_data };
        assert_eq!(Message::decode(&no_shape.encode()), None);
        let mut unknown = Message::Hello { shape, takes, private_data: vec![] }.encode();
        assert_eq!(unknown.pop(), Some(1));
        unknown.push(4);
        assert_eq!(Message::decode(&unknown), None, "takes what there is not");
        let mut other = Message::Reject { private_data: vec![] }.encode();
        other[7] = 1;
        assert_eq!(Message::decode(&other), None, "another version");
        assert_eq!(other_version(&other), Some(1));
        other[7] = VERSION;
        assert_eq!(other_version(&other), None);
        let mut refused = Message::Refused { text: "of another version".into() }.encode();
        refused[7] = 3;
        assert_eq!(other_version(&refused), Some(3));
        assert_eq!(other_version(&[MessageKind::Refused as u8]), None);
        assert_eq!(other_version(b"\x07trdshm\x03"), None, "no message of a handshake");
        assert_eq!(
            Message::decode(&Message::Chunk { rkey: 1, addr: u64::MAX, len: 1 }.encode()),
            None
        );
    }

    #[test]
    fn an_unexpected_message_is_described_by_its_kind_and_length() {
        let (shape, takes) = (Shape { slots: 3, slot_size: 128 }, Takes::default());
        let hello = Message::Hello { shape, takes, private_data: vec![7; 4] }.encode();
        let mut unsound = hello.clone();
        unsound[8..12].fill(0);
        let cases: [(&[u8], &str); 7] = [
            (&[], "an empty message"),
            (b"GET / HTTP/1.1", "14 bytes of the unknown kind 71"),
            (&hello[..12], "Hello (kind 1) of 12 bytes instead of 17 to 73"),
            (&unsound, "Hello (kind 1) of 21 bytes with an invalid field"),
            (&hello, "Hello (kind 1) of 21 bytes"),
            (&[MessageKind::Taken as u8, 1], "Taken (kind 11) of 2 bytes instead of 5"),
            (&Message::Wake.encode(), "Wake (kind 7) of 1 bytes"),
        ];
        for (bytes, received) in cases {
            let text = unexpected("Accept", bytes, false);
            assert_eq!(text, format!("expected Accept, received {received}"));
            assert_eq!(unexpected("Accept", bytes, true), text + ", with descriptors");
        }
    }

    #[test]
    fn the_refusal_of_a_greeting_is_not_cut() {
        let messages =
            (0..=u8::MAX).flat_map(|kind| [1, 73, MAX_MESSAGE].map(|len| vec![kind; len]));
        for message in messages.chain([vec![]]) {
            let text = not_a_greeting(&message);
            assert!(text.ends_with("; run one version of tonic-rdma at both ends"), "{text}");
            let refused = Message::Refused { text };
            assert_eq!(Message::decode(&refused.encode()), Some(refused));
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = Message::decode(&bytes);
        }
    }
}
