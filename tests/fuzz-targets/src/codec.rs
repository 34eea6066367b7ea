//! The zero-copy codec against prost.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;
use tonic::Code;
use tonic_rdma::codec::{fuzz, pending_messages};
use tonic_rdma_memory::test_util::SharedArena;

/// Everything that can hold bytes.
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
    // In order, so that it encodes the same twice.
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

/// Bytes of a gRPC header.
const HEADER: usize = 5;
/// Messages of one input.
const MESSAGES: usize = 8;
/// Bytes that one input may be made to.
const MAX: usize = 256 << 10;
/// Bytes of a message on its way in.
const LIMIT: usize = 1 << 20;

fn framed(message: &[u8], wire: &mut Vec<u8>) {
    wire.push(0);
    wire.extend((message.len() as u32).to_be_bytes());
    wire.extend(message);
}

/// What messages become on the wire is prost's bytes, and what they decode to is what they were.
///
/// | bytes | what |
/// |---|---|
/// | 1 | bits 0 and 1: up to which length messages stay whole. Bit 2: there is a limit. The rest: fields of bytes are so many times as long, by powers of two |
/// | 2 | the limit, in 16 bytes |
/// | the rest | messages, each behind its length as a varint |
///
/// # Panics
/// Something is wrong.
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
    let got = fuzz::decode::<Tree>(vec![(wire.into(), true)], usize::MAX);
    // Equality of the bytes: what is not a number is not equal to itself, and there is none.
    assert!(got.into_iter().map(Result::unwrap).eq(messages));
    assert_eq!(pending_messages(), 0);
}

/// The fuzzer's inputs are short; segments are not.
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

/// A body that arrives in pieces, some of them landed, decodes as prost decodes the joined
/// messages.
///
/// | bytes | what |
/// |---|---|
/// | 1 | bit 0: the rest is a body as it stands; otherwise it is messages, and bit 1: a field that makes it long enough to be kept apart stands in front of each, bit 2: behind. The rest: how many pieces |
/// | 2 for each piece | bit 0: it landed. The rest: its length, times 1 to 8 |
/// | the rest | the body; or messages, each behind its length in two bytes |
///
/// # Panics
/// Something is wrong.
pub fn decode(data: &[u8]) {
    let Some((wire, cuts)) = body(data) else { return };
    let got = fuzz::decode::<Tree>(pieces(Bytes::copy_from_slice(&wire), &cuts), LIMIT);
    assert_eq!(pending_messages(), 0);
    let mut expected = joined(&wire);
    if expected.last().is_some_and(Option::is_none) && got.len() + 1 == expected.len() {
        // tonic leaves a message that is cut off by good trailers alone.
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

/// Where a body is cut, and whether the piece that begins there has landed.
type Cuts = Vec<(usize, bool)>;

/// A body, and where it is cut: what [`decode`] reads.
fn body(data: &[u8]) -> Option<(Vec<u8>, Cuts)> {
    let (flags, mut rest) = data.split_first()?;
    let mut cuts = Vec::new();
    for n in 0..flags >> 3 {
        let Some((cut, after)) = rest.split_first_chunk() else { break };
        rest = after;
        let cut = u16::from_le_bytes(*cut);
        cuts.push((usize::from(cut >> 1) * (1 + usize::from(n & 7)), cut & 1 == 1));
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

fn pieces(mut rest: Bytes, cuts: &[(usize, bool)]) -> Vec<(Bytes, bool)> {
    let mut pieces = Vec::new();
    for (len, landed) in cuts {
        let piece = rest.split_to((*len).min(rest.len()));
        if !piece.is_empty() {
            pieces.push((piece, *landed));
        }
    }
    if !rest.is_empty() {
        pieces.push((rest, true));
    }
    pieces
}

/// A body of which some pieces have landed where its sender goes on writing: prost never sees a
/// byte that can change, whatever it decodes to is text where it says so, and nothing is left
/// behind.
///
/// | bytes | what |
/// |---|---|
/// | 1 | how many WRITEs come late, one whenever prost has looked |
/// | 3 for each | where, in two bytes, and the byte |
/// | the rest | as for [`decode`] |
///
/// # Panics
/// Something is wrong.
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
    let pieces =
        pieces(arena.bytes().slice(..wire.len()), &cuts).into_iter().map(|(piece, landed)| {
            match landed {
                true => (piece, true),
                // Out of the sender's reach.
                false => (Bytes::copy_from_slice(&piece), false),
            }
        });
    for message in fuzz::decode_watched::<Tree>(pieces.collect(), LIMIT, &arena) {
        let Ok(tree) = message else { continue };
        assert!(!arena.contains(tree.text.as_bytes()) && !arena.contains(&tree.vec));
        assert!(std::str::from_utf8(tree.text.as_bytes()).is_ok(), "text that is none");
    }
    assert_eq!(pending_messages(), 0);
}

/// What prost makes of each message, until the first error; `None`: there is no whole message, or
/// it is compressed.
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
