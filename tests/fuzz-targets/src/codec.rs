//! The zero-copy codec against prost.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;
use tonic::Code;
use tonic_rdma::codec::fuzz::{self, Came};
use tonic_rdma::codec::pending_messages;
use tonic_rdma_memory::test_util::SharedArena;

/// A message with every kind of field that holds bytes.
#[derive(Clone, PartialEq, Message)]
struct Tree {
    #[prost(bytes = "bytes", tag = "1")]
    data: Bytes,
    #[prost(uint64, tag = "2")]
    number: u64,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    parts: Vec<Bytes>,
    #[prost(message, repeated, tag = "4")]
    nested: Vec<Tree>,
    #[prost(oneof = "Kind", tags = "5, 6, 7")]
    kind: Option<Kind>,
    // Ordered, so that it always encodes to the same bytes.
    #[prost(btree_map = "uint32, message", tag = "8")]
    map: BTreeMap<u32, Tree>,
    #[prost(bytes = "vec", tag = "9")]
    vec: Vec<u8>,
    #[prost(string, tag = "10")]
    text: String,
    #[prost(bytes = "bytes", optional, tag = "70000")]
    last: Option<Bytes>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Kind {
    #[prost(bytes = "bytes", tag = "5")]
    Raw(Bytes),
    #[prost(message, tag = "6")]
    Inner(Box<Tree>),
    #[prost(string, tag = "7")]
    Text(String),
}

/// The length of a gRPC message header, in bytes.
const HEADER: usize = 5;
/// The maximum number of messages in an input.
const MESSAGES: usize = 8;
/// The maximum number of bytes to which an input is expanded.
const MAX: usize = 256 << 10;
/// The decoder's limit on a message, in bytes.
const LIMIT: usize = 1 << 20;

fn framed(message: &[u8], wire: &mut Vec<u8>) {
    wire.push(0);
    wire.extend((message.len() as u32).to_be_bytes());
    wire.extend(message);
}

/// The encoder must produce prost's bytes, and decoding them must restore the messages.
///
/// | bytes | meaning |
/// |---|---|
/// | 1 | bits 0 and 1: select the length up to which messages stay in one segment. Bit 2: whether there is a limit. Bits 4 to 7: the exponent of the power of two by which the lengths of `bytes` fields are multiplied |
/// | 2 | the limit, in units of 16 bytes |
/// | the rest | messages, each after its length as a varint |
///
/// # Panics
/// The encoder or the decoder is wrong.
pub fn encode(data: &[u8]) {
    let [flags, low, high, rest @ ..] = data else { return };
    let mut rest = rest;
    let whole = [0, 4091, 8187, 40_000][usize::from(flags & 3)];
    let limit = (flags & 4 != 0).then(|| usize::from(u16::from_le_bytes([*low, *high])) * 16);
    let mut room = MAX;
    let mut messages = Vec::new();
    while messages.len() < MESSAGES
        && !rest.is_empty()
        && let Ok(mut tree) = Tree::decode_length_delimited(&mut rest)
    {
        lengthen(&mut tree, 1 << (flags >> 4), &mut room);
        messages.push(tree);
    }
    let mut wire = Vec::new();
    for message in &messages {
        framed(&message.encode_to_vec(), &mut wire);
    }
    let too_long = |limit| messages.iter().any(|message| message.encoded_len() > limit);
    match fuzz::encode(messages.clone(), whole, limit) {
        Ok(sent) => {
            assert!(!limit.is_some_and(too_long), "one is longer than the limit");
            assert!(sent.concat().concat() == wire, "other bytes than prost's: {messages:?}");
        }
        Err(status) => {
            assert_eq!(status.code(), Code::OutOfRange, "{status}");
            assert!(limit.is_some_and(too_long), "{status}");
            return;
        }
    }
    let got = fuzz::decode::<Tree>(vec![(wire.into(), Came::Landed)], usize::MAX);
    // The decoder must restore the messages.
    assert!(got.into_iter().map(Result::unwrap).eq(messages));
    assert_eq!(pending_messages(), 0);
}

/// Lengthens `bytes` fields, because the fuzzer's inputs are too short to make several segments.
fn lengthen(tree: &mut Tree, times: usize, room: &mut usize) {
    let longer = |bytes: &mut Bytes, room: &mut usize| {
        let len = bytes.len() * times;
        if len <= *room {
            *room -= len;
            *bytes = bytes.repeat(times).into();
        }
    };
    longer(&mut tree.data, room);
    tree.parts.iter_mut().for_each(|part| longer(part, room));
    tree.last.iter_mut().for_each(|last| longer(last, room));
    match &mut tree.kind {
        Some(Kind::Raw(raw)) => longer(raw, room),
        Some(Kind::Inner(inner)) => lengthen(inner, times, room),
        _ => {}
    }
    tree.nested
        .iter_mut()
        .chain(tree.map.values_mut())
        .for_each(|tree| lengthen(tree, times, room));
}

/// A body that arrives in pieces, some of which have landed, must decode to the same messages that
/// prost decodes from the joined bytes.
///
/// | bytes | meaning |
/// |---|---|
/// | 1 | bit 0: the rest is a raw body; otherwise it is messages. Bits 1 and 2: each message gets a field in front (1) or behind (2) that makes it long enough to be kept as a pending message. Bits 3 to 7: the number of pieces |
/// | 2 for each piece | bit 0: the piece has landed, or is lent if bit 1 is also set. The rest, bit 1 included: its length, to be multiplied by 1 to 8 |
/// | the rest | the body, or messages, each after its length in two bytes |
///
/// # Panics
/// The decoder is wrong.
pub fn decode(data: &[u8]) {
    let Some((wire, cuts)) = body(data) else { return };
    let got = fuzz::decode::<Tree>(pieces(Bytes::copy_from_slice(&wire), &cuts), LIMIT);
    assert_eq!(pending_messages(), 0);
    let mut expected = joined(&wire);
    if expected.last().is_some_and(Option::is_none) && got.len() + 1 == expected.len() {
        // tonic ignores a message that is cut off if the trailers report success.
        expected.pop();
    }
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.into_iter().zip(expected) {
        match expected {
            Some(Ok(tree)) => assert!(got.expect("prost took it") == tree, "other than prost's"),
            Some(Err(text)) => {
                let (code, got) = got.expect_err("prost refused it");
                assert!(
                    code == Code::Internal && got.starts_with(&text),
                    "{code:?} {got}; prost: {text}"
                );
            }
            None => assert!(got.is_err(), "a body that breaks off or is compressed"),
        }
    }
}

/// The lengths of the pieces of a body, and how each arrived.
type Cuts = Vec<(usize, Came)>;

/// Reads the body and its pieces from the input of [`decode`].
fn body(data: &[u8]) -> Option<(Vec<u8>, Cuts)> {
    let (flags, mut rest) = data.split_first()?;
    let mut cuts = Vec::new();
    for n in 0..flags >> 3 {
        let Some((cut, after)) = rest.split_first_chunk() else { break };
        rest = after;
        let cut = u16::from_le_bytes(*cut);
        let came = match cut & 3 {
            0 | 2 => Came::InMessages,
            1 => Came::Landed,
            _ => Came::Lent,
        };
        cuts.push((usize::from(cut >> 1) * (1 + usize::from(n & 7)), came));
    }
    let mut wire = Vec::new();
    if flags & 1 == 1 {
        wire.extend_from_slice(rest);
    } else {
        for _ in 0..MESSAGES {
            let Some((len, after)) = rest.split_first_chunk() else { break };
            let (message, after) =
                after.split_at(usize::from(u16::from_le_bytes(*len)).min(after.len()));
            rest = after;
            let long = |bit: u8| Tree {
                vec: vec![bit; usize::from(flags & bit) * 2500],
                ..Tree::default()
            };
            let message = [&long(2).encode_to_vec(), message, &long(4).encode_to_vec()].concat();
            framed(&message, &mut wire);
        }
    }
    Some((wire, cuts))
}

fn pieces(mut rest: Bytes, cuts: &[(usize, Came)]) -> Vec<(Bytes, Came)> {
    let mut pieces = Vec::new();
    for (len, came) in cuts {
        let piece = rest.split_to((*len).min(rest.len()));
        if !piece.is_empty() {
            pieces.push((piece, *came));
        }
    }
    if !rest.is_empty() {
        pieces.push((rest, Came::Landed));
    }
    pieces
}

/// The sender continues to write to pieces that have landed. prost must never see a byte that can
/// change, every decoded string must be valid UTF-8, and no pending message may remain.
///
/// | bytes | meaning |
/// |---|---|
/// | 1 | the number of late WRITEs, one of which happens after each access by prost |
/// | 3 for each | the offset, in two bytes, and the byte to write |
/// | the rest | as for [`decode`] |
///
/// # Panics
/// The decoder is wrong.
pub fn landed(data: &[u8]) {
    let Some((count, mut rest)) = data.split_first() else { return };
    let mut writes = Vec::new();
    for _ in 0..*count {
        let Some(([low, high, byte], after)) = rest.split_first_chunk() else { break };
        rest = after;
        writes.push((usize::from(u16::from_le_bytes([*low, *high])), *byte));
    }
    let Some((wire, cuts)) = body(rest) else { return };
    let arena = SharedArena::new(wire.len()).expect("a file in memory, mapped twice");
    arena.write(0, &wire);
    arena.plan(writes);
    let pieces = pieces(arena.bytes().slice(..wire.len()), &cuts).into_iter().map(
        |(piece, came)| match came {
            // A copy that the sender cannot reach.
            Came::InMessages => (Bytes::copy_from_slice(&piece), came),
            Came::Landed | Came::Lent => (piece, came),
        },
    );
    for message in fuzz::decode_watched::<Tree>(pieces.collect(), LIMIT, &arena) {
        let Ok(tree) = message else { continue };
        assert!(!arena.contains(tree.text.as_bytes()) && !arena.contains(&tree.vec));
        assert!(std::str::from_utf8(tree.text.as_bytes()).is_ok(), "text that is none");
    }
    assert_eq!(pending_messages(), 0);
}

/// prost's result for each message, up to the first error. `None` stands for a message that is
/// incomplete or compressed.
fn joined(mut wire: &[u8]) -> Vec<Option<Result<Tree, String>>> {
    let mut all = Vec::new();
    while !wire.is_empty() {
        let message = wire.first_chunk::<HEADER>().and_then(|[flag, a, b, c, d]| {
            let len = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
            wire.get(HEADER..HEADER.checked_add(len)?).filter(|_| *flag == 0)
        });
        let Some(message) = message else {
            all.push(None);
            break;
        };
        wire = &wire[HEADER + message.len()..];
        let decoded = Tree::decode(message).map_err(|error| error.to_string());
        let failed = decoded.is_err();
        all.push(Some(decoded));
        if failed {
            break;
        }
    }
    all
}
