//! Messages on the socket.
//!
//! | message | bytes | descriptors |
//! |---|---|---|
//! | HELLO | kind, magic, slots u32, slot_size u32, takes u8, private data | |
//! | ACCEPT | kind, magic, slots u32, slot_size u32, takes u8, runtime u64, nonce u64, private data | ring |
//! | RING | kind, the nonce of ACCEPT u64; with a channel also its number u64, runtime u64, end u8 | ring of the shape that HELLO named; if the other end may not have them, the eventfd of the channel that the client waits for, the one that the server waits for, and the page |
//! | REJECT | kind, magic, private data | |
//! | REFUSED | kind, magic, text | |
//! | OTHER_USER | kind, magic, the user that is refused u32; REFUSED follows | |
//! | NO_ROOM | kind, magic, the error u32 that a limit of the process or its host has caused, in place of REFUSED | |
//! | CHUNK | kind, rkey u32, address u64, length u64 | file |
//! | FORGET | kind, rkey u32 | |
//! | WAKE | kind | |
//! | LEND | kind, key u32, address u64, length u64, lend_on u8 | file; with the first also the writing end of a pipe; with what is lent on also that of its owner |
//! | OPEN | kind: the server has taken RING, and the connection is open | |
//! | TAKEN, DECLINED | kind, key u32: the answers to LEND and NAME; DECLINED also to CHUNK | |
//! | UNLEND | kind, key u32 | |
//! | NAME | kind, key u32, address u64, length u64 | file |
//! | UNNAME | kind, key u32 | |
//!
//! Numbers are little-endian. The magic ends with the version; an end that speaks another is
//! refused, and finds the version of the one that refuses it in the magic of the answer.
//! `takes` tells what its sender takes: 1 for LEND, 2 for NAME, 3 for both. Another kind, and an
//! answer to a kind that nobody may have offered, is a breach.
//! `runtime` of ACCEPT is 0 when the server takes no wake-up channel: both then wake each other by
//! WAKE. Otherwise it tells the server's runtime from others of its process, as `runtime` of RING
//! does for the client. The nonce is a number that nobody guesses: who sends RING has read ACCEPT.
//! `end` is 0 when the client has made the channel, 1 when the server has.

use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::Takes;
use crate::shm::ring::Shape;
use crate::shm::wakeup::channel_name::ChannelName;
use crate::shm::wakeup::event_fd::End;

/// The version of the protocol.
pub(crate) const VERSION: u8 = 11;
const PROTOCOL: [u8; 6] = *b"trdshm";
/// Protocol and version.
const MAGIC: [u8; 7] = {
    let [a, b, c, d, e, f] = PROTOCOL;
    [a, b, c, d, e, f, VERSION]
};

const HELLO: u8 = 1;
const ACCEPT: u8 = 2;
const REJECT: u8 = 3;
const REFUSED: u8 = 4;
const CHUNK: u8 = 5;
const FORGET: u8 = 6;
const WAKE: u8 = 7;
const RING: u8 = 8;
const OTHER_USER: u8 = 9;
const LEND: u8 = 10;
const TAKEN: u8 = 11;
const DECLINED: u8 = 12;
const UNLEND: u8 = 13;
const NAME: u8 = 14;
const UNNAME: u8 = 15;
const OPEN: u8 = 16;
const NO_ROOM: u8 = 17;

/// Whether the peer may lend on what is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LendOn {
    /// It is for the peer alone.
    Never = 0,
    /// To processes of the same user.
    Allowed = 1,
    /// It is lent on already, with the pipe of its owner.
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
    Ring { nonce: u64, channel: Option<ChannelName> },
    Open,
    Lend { key: u32, addr: u64, len: u64, lend_on: LendOn },
    Taken { key: u32 },
    Declined { key: u32 },
    Unlend { key: u32 },
    Name { key: u32, addr: u64, len: u64 },
    Unname { key: u32 },
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(96);
        let mut head = |kind: u8| {
            out.push(kind);
            out.extend(MAGIC);
        };
        match self {
            Message::Hello { shape, takes, private_data } => {
                head(HELLO);
                out.extend(shape.to_bytes());
                out.push(takes_byte(*takes));
                out.extend(private_data);
            }
            Message::Accept { shape, takes, runtime, nonce, private_data } => {
                head(ACCEPT);
                out.extend(shape.to_bytes());
                out.push(takes_byte(*takes));
                out.extend(runtime.to_le_bytes());
                out.extend(nonce.to_le_bytes());
                out.extend(private_data);
            }
            Message::Reject { private_data } => {
                head(REJECT);
                out.extend(private_data);
            }
            Message::Refused { text } => {
                head(REFUSED);
                out.extend(text.bytes().take(128));
            }
            Message::OtherUser { uid } => {
                head(OTHER_USER);
                out.extend(uid.to_le_bytes());
            }
            Message::NoRoom { errno } => {
                head(NO_ROOM);
                out.extend(errno.to_le_bytes());
            }
            Message::Chunk { rkey: key, addr, len }
            | Message::Lend { key, addr, len, .. }
            | Message::Name { key, addr, len } => {
                out.push(match self {
                    Message::Chunk { .. } => CHUNK,
                    Message::Lend { .. } => LEND,
                    _ => NAME,
                });
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
            | Message::Unname { key } => {
                out.push(match self {
                    Message::Forget { .. } => FORGET,
                    Message::Taken { .. } => TAKEN,
                    Message::Declined { .. } => DECLINED,
                    Message::Unlend { .. } => UNLEND,
                    _ => UNNAME,
                });
                out.extend(key.to_le_bytes());
            }
            Message::Wake => out.push(WAKE),
            Message::Open => out.push(OPEN),
            Message::Ring { nonce, channel } => {
                out.push(RING);
                out.extend(nonce.to_le_bytes());
                if let Some(ChannelName { number, runtime, end }) = channel {
                    out.extend(number.to_le_bytes());
                    out.extend(runtime.to_le_bytes());
                    out.push(u8::from(*end == End::Taker));
                }
            }
        }
        out
    }

    /// `None` when it makes no sense.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Message> {
        let (kind, rest) = bytes.split_first()?;
        match *kind {
            HELLO | ACCEPT => {
                let (slots, rest) = u32_of(rest.strip_prefix(&MAGIC)?)?;
                let (slot_size, rest) = u32_of(rest)?;
                let shape = Shape { slots, slot_size };
                let (takes, rest) = rest.split_first()?;
                let takes = takes_of(*takes)?;
                let (runtime, nonce, rest) = match *kind {
                    HELLO => (0, 0, rest),
                    _ => {
                        let (runtime, rest) = u64_of(rest)?;
                        let (nonce, rest) = u64_of(rest)?;
                        (runtime, nonce, rest)
                    }
                };
                let private_data = rest.to_vec();
                if !shape.is_sound() || private_data.len() > MAX_PRIVATE_DATA {
                    return None;
                }
                Some(match *kind {
                    HELLO => Message::Hello { shape, takes, private_data },
                    _ => Message::Accept { shape, takes, runtime, nonce, private_data },
                })
            }
            REJECT => {
                let private_data = rest.strip_prefix(&MAGIC)?.to_vec();
                (private_data.len() <= MAX_PRIVATE_DATA).then_some(Message::Reject { private_data })
            }
            REFUSED => {
                let text = String::from_utf8_lossy(rest.strip_prefix(&MAGIC)?).into_owned();
                Some(Message::Refused { text })
            }
            OTHER_USER => {
                let (uid, rest) = u32_of(rest.strip_prefix(&MAGIC)?)?;
                rest.is_empty().then_some(Message::OtherUser { uid })
            }
            NO_ROOM => {
                let (errno, rest) = u32_of(rest.strip_prefix(&MAGIC)?)?;
                rest.is_empty().then_some(Message::NoRoom { errno })
            }
            CHUNK | LEND | NAME => {
                let (key, rest) = u32_of(rest)?;
                let (addr, rest) = u64_of(rest)?;
                let (len, rest) = u64_of(rest)?;
                let message = match (*kind, rest) {
                    (CHUNK, []) => Message::Chunk { rkey: key, addr, len },
                    (NAME, []) => Message::Name { key, addr, len },
                    (LEND, [0]) => Message::Lend { key, addr, len, lend_on: LendOn::Never },
                    (LEND, [1]) => Message::Lend { key, addr, len, lend_on: LendOn::Allowed },
                    (LEND, [2]) => Message::Lend { key, addr, len, lend_on: LendOn::Done },
                    _ => return None,
                };
                addr.checked_add(len).is_some().then_some(message)
            }
            FORGET | TAKEN | DECLINED | UNLEND | UNNAME => {
                let (key, rest) = u32_of(rest)?;
                let message = match *kind {
                    FORGET => Message::Forget { rkey: key },
                    TAKEN => Message::Taken { key },
                    DECLINED => Message::Declined { key },
                    UNLEND => Message::Unlend { key },
                    _ => Message::Unname { key },
                };
                rest.is_empty().then_some(message)
            }
            WAKE => rest.is_empty().then_some(Message::Wake),
            OPEN => rest.is_empty().then_some(Message::Open),
            RING => {
                let (nonce, rest) = u64_of(rest)?;
                if rest.is_empty() {
                    return Some(Message::Ring { nonce, channel: None });
                }
                let (number, rest) = u64_of(rest)?;
                let (runtime, rest) = u64_of(rest)?;
                let end = match rest {
                    [0] => End::Maker,
                    [1] => End::Taker,
                    _ => return None,
                };
                Some(Message::Ring { nonce, channel: Some(ChannelName { number, runtime, end }) })
            }
            _ => None,
        }
    }
}

/// The version of a message of a handshake, if it is not this end's.
pub(crate) fn other_version(bytes: &[u8]) -> Option<u8> {
    match bytes {
        [HELLO | ACCEPT | REJECT | REFUSED | OTHER_USER | NO_ROOM, rest @ ..] => {
            let version = *rest.strip_prefix(&PROTOCOL)?.first()?;
            (version != VERSION).then_some(version)
        }
        _ => None,
    }
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
            Message::Open,
            Message::Ring { nonce: 1, channel: None },
            Message::Ring {
                nonce: 0,
                channel: Some(ChannelName { number: 1, runtime: 2, end: End::Maker }),
            },
            Message::Ring {
                nonce: 0,
                channel: Some(ChannelName { number: 1, runtime: 2, end: End::Taker }),
            },
        ] {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
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
        assert_eq!(other_version(&[REFUSED]), None);
        assert_eq!(other_version(b"\x07trdshm\x03"), None, "no message of a handshake");
        assert_eq!(
            Message::decode(&Message::Chunk { rkey: 1, addr: u64::MAX, len: 1 }.encode()),
            None
        );
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = Message::decode(&bytes);
        }
    }
}
