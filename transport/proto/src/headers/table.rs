//! Header tables that both ends of a connection keep: a repeated field takes one byte.
//!
//! Each direction of a connection has a table of 64 entries. In a HEADERS frame with the flag
//! INDEXED, a field may define an entry or refer to one (`docs/protocol.md`).
//!
//! Messages arrive in the order in which they were composed, which keeps both tables in sync. A
//! block that takes several frames does not use the tables. The sender chooses the fields to store.

use bytes::{BufMut, Bytes, BytesMut};

use super::PAIRS;
use crate::error::Breach;

/// Number of entries of a table.
pub(crate) const ENTRIES: usize = 64;
/// Maximum length of a stored field in bytes.
pub(crate) const LONGEST: usize = 256;
const DEFINE: u8 = 136;
const ENTRY: u8 = 192;
/// Static names whose fields are usually the same for all calls, or for all calls to a method:
/// `:path`, `:authority`, `user-agent`. Fields with these names are stored on first use if their
/// entry is empty. Other fields are stored on second use, so that an id unique to each call does
/// not evict useful fields.
const AT_ONCE: [u8; 3] = [1, 2, 8];
/// Bytes of the buffer in which blocks are expanded, so that several blocks share an allocation.
const ROOM: usize = 4096;
/// Number of complete blocks that are cached with their compressed form.
const BLOCKS: usize = 8;
/// Maximum length of a cached block in bytes.
const LONGEST_BLOCK: usize = 1024;

/// Length of the field at the beginning of `block`, if it does not refer to the table.
fn plain_len(block: &[u8]) -> Option<usize> {
    let string = |at: usize| {
        let len = block.get(at..at + 2)?;
        Some(at + 2 + usize::from(u16::from_le_bytes([len[0], len[1]])))
    };
    let len = match *block.first()? {
        0 => string(string(1)?)?,
        1..128 => string(1)?,
        n if usize::from(n - 128) < PAIRS.len() => 1,
        _ => return None,
    };
    (len <= block.len()).then_some(len)
}

/// Returns the hash of a field, which determines the two entries that the field may be in. The hash
/// need not resist chosen fields, because collisions only cost bytes.
fn hash(field: &[u8]) -> u64 {
    let mut hash = field.len() as u64;
    for word in field.chunks(8) {
        let mut bytes = [0; 8];
        bytes[..word.len()].copy_from_slice(word);
        hash =
            (hash ^ u64::from_le_bytes(bytes)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    hash
}

/// Caches blocks whose compressed form consists only of references and static pairs. Maps one form
/// of a block, compressed or not, to the other. The cache is cleared when an entry changes.
#[derive(Debug, Default)]
struct Blocks([Option<(Bytes, Bytes)>; BLOCKS]);

impl Blocks {
    /// The place of a block in the cache. The sender looks up the uncompressed block, the receiver
    /// the compressed block.
    fn place(key: &[u8]) -> usize {
        (key.len() + usize::from(key.last().copied().unwrap_or(0))) % BLOCKS
    }

    fn get(&self, key: &[u8]) -> Option<&Bytes> {
        self.0[Self::place(key)].as_ref().and_then(|(known, other)| (known == key).then_some(other))
    }

    fn put(&mut self, key: &[u8], other: &[u8]) {
        if key.len().max(other.len()) <= LONGEST_BLOCK {
            let both = (Bytes::copy_from_slice(key), Bytes::copy_from_slice(other));
            self.0[Self::place(key)] = Some(both);
        }
    }
}

/// The table for sending, which the peer mirrors.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Empty until a block that has a field other than static pairs is compressed.
    entries: Vec<TableEntry>,
    blocks: Blocks,
}

#[derive(Clone, Debug, Default)]
struct TableEntry {
    field: Vec<u8>,
    /// Hash of the last field that mapped to this entry and was not in the table.
    seen: u64,
}

impl Sent {
    /// Compresses `block` into `to`, which is at least as long as `block`, and returns the
    /// compressed length.
    ///
    /// Returns `None`, and writes nothing, if the block consists of static pairs only, or is not a
    /// list of fields.
    pub(crate) fn shorten(&mut self, block: &[u8], to: &mut [u8]) -> Option<usize> {
        if let Some(short) = self.blocks.get(block) {
            to[..short.len()].copy_from_slice(short);
            return Some(short.len());
        }
        let (mut at, mut literals) = (0, 0);
        while at < block.len() {
            literals += usize::from(block[at] < 128);
            at += plain_len(&block[at..])?;
        }
        if literals == 0 {
            return None;
        }
        self.entries.resize(ENTRIES, TableEntry::default());
        let (mut rest, mut len) = (block, 0);
        while let Some(field_len) = plain_len(rest) {
            let (field, behind) = rest.split_at(field_len);
            rest = behind;
            // Leave space for the fields that follow, in case none of them becomes shorter.
            let room = to.len() - len - rest.len();
            len += self.field(field, &mut to[len..len + room]);
        }
        if to[..len].iter().all(|byte| *byte >= 128 && *byte != DEFINE) {
            self.blocks.put(block, &to[..len]);
        }
        Some(len)
    }

    fn field(&mut self, field: &[u8], to: &mut [u8]) -> usize {
        let mut start = 0;
        if field[0] < 128 && field.len() <= LONGEST {
            let hash = hash(field);
            // If two fields that occur in every call hash to the same entry, the second field takes
            // that entry's twin.
            let (first, twin) = (hash as usize % ENTRIES, (hash as usize % ENTRIES) ^ 1);
            let holds = |number: &usize| self.entries[*number].field == field;
            if let Some(number) = [first, twin].into_iter().find(holds) {
                to[0] = ENTRY + number as u8;
                return 1;
            }
            let free = |number: &usize| self.entries[*number].field.is_empty();
            let number = [first, twin].into_iter().find(free).unwrap_or(first);
            let entry = &mut self.entries[number];
            let first = entry.field.is_empty() && AT_ONCE.contains(&field[0]);
            if (first || entry.seen == hash) && to.len() >= field.len() + 2 {
                entry.field.clear();
                entry.field.extend_from_slice(field);
                self.blocks = Blocks::default();
                to[..2].copy_from_slice(&[DEFINE, number as u8]);
                start = 2;
            }
            entry.seen = hash;
        }
        to[start..start + field.len()].copy_from_slice(field);
        start + field.len()
    }
}

/// The table for receiving, which mirrors the peer's.
#[derive(Debug, Default)]
pub(crate) struct Received {
    /// Empty before the first entry is defined.
    entries: Vec<Vec<u8>>,
    blocks: Blocks,
    room: BytesMut,
}

impl Received {
    /// Expands a block; `None` if the result would exceed `limit` bytes.
    ///
    /// # Errors
    /// [`Breach::Headers`].
    pub(crate) fn expand(&mut self, block: &[u8], limit: usize) -> Result<Option<Bytes>, Breach> {
        if let Some(known) = self.blocks.get(block) {
            return Ok(Some(known.clone()).filter(|known| known.len() <= limit));
        }
        let whole = block;
        let mut block = block;
        let mut repeats = true;
        self.room.clear();
        if self.room.capacity() < ROOM / 8 {
            self.room.reserve(ROOM);
        }
        while let Some(&first) = block.first() {
            let field = if first >= ENTRY {
                block = &block[1..];
                match self.entries.get(usize::from(first - ENTRY)) {
                    Some(field) if !field.is_empty() => &field[..],
                    _ => return Err(Breach::Headers("an entry of the table that was never made")),
                }
            } else {
                repeats &= (128..DEFINE).contains(&first);
                let number = (first == DEFINE).then(|| block.get(1).copied().unwrap_or(u8::MAX));
                let from = if number.is_some() { 2.min(block.len()) } else { 0 };
                let len = plain_len(&block[from..])
                    .ok_or(Breach::Headers("a field that is cut short, or unknown"))?;
                let (field, rest) = block[from..].split_at(len);
                block = rest;
                if let Some(number) = number {
                    self.define(number, field)?;
                }
                field
            };
            if self.room.len() + field.len() > limit {
                return Ok(None);
            }
            self.room.put_slice(field);
        }
        if repeats && !whole.is_empty() {
            self.blocks.put(whole, &self.room);
        }
        Ok(Some(self.room.split().freeze()))
    }

    fn define(&mut self, number: u8, field: &[u8]) -> Result<(), Breach> {
        if usize::from(number) >= ENTRIES || field.len() > LONGEST || field[0] >= 128 {
            return Err(Breach::Headers("an entry that the table does not take"));
        }
        self.entries.resize(ENTRIES, Vec::new());
        self.blocks = Blocks::default();
        let entry = &mut self.entries[usize::from(number)];
        entry.clear();
        entry.extend_from_slice(field);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::encode;
    use super::*;

    const LIMIT: usize = 65_536;

    fn block(fields: &[(&str, &str)]) -> Bytes {
        let mut block = BytesMut::new();
        for (name, value) in fields {
            encode(&mut block, name, value.as_bytes()).unwrap();
        }
        block.freeze()
    }

    /// Sends a block and returns its length on the wire.
    fn send(sent: &mut Sent, received: &mut Received, block: &Bytes) -> usize {
        let mut wire = vec![0; block.len()];
        let Some(len) = sent.shorten(block, &mut wire) else { return block.len() };
        assert_eq!(received.expand(&wire[..len], LIMIT).unwrap().unwrap(), block);
        len
    }

    #[test]
    fn a_call_like_the_last_takes_a_byte_for_each_field() {
        let (mut sent, mut received) = Default::default();
        let call = |id: &str| {
            block(&[
                (":method", "POST"),
                (":scheme", "http"),
                (":authority", "host:1"),
                (":path", "/a.B/C"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "mine"),
                ("x-token", "the same"),
                ("x-id", id),
            ])
        };
        let id = "x-id".len() + 5;
        let whole = call("1").len();
        // The slot ends with the block, so there is no space to define entries.
        assert_eq!(send(&mut sent, &mut received, &call("1")), whole);
        let mut wire = [0; 256];
        let mut lens = (2..6).map(|n| {
            let block = call(&n.to_string());
            let len = sent.shorten(&block, &mut wire).unwrap();
            assert_eq!(received.expand(&wire[..len], LIMIT).unwrap().unwrap(), block);
            len
        });
        // Three fields are stored on first use, the token on second use.
        assert_eq!(lens.next(), Some(whole + 4 * 2));
        assert_eq!(lens.next(), Some(8 + id + 1));
        assert_eq!(lens.next(), Some(8 + id + 1));
    }

    #[test]
    fn two_fields_with_one_entry_are_both_stored() {
        let path = |n: usize| block(&[(":path", &format!("/{n}"))]);
        let entry = |block: &Bytes| hash(block) as usize % ENTRIES;
        let twin = (1..).map(path).find(|other| entry(other) == entry(&path(0))).unwrap();
        let both = Bytes::from([path(0), twin].concat());
        let (mut sent, mut received) = (Sent::default(), Received::default());
        let mut wire = [0; 256];
        for expected in [both.len() + 4, 2, 2] {
            let len = sent.shorten(&both, &mut wire).unwrap();
            assert_eq!(received.expand(&wire[..len], LIMIT).unwrap().unwrap(), both);
            assert_eq!(len, expected);
        }
    }

    #[test]
    fn short_blocks_are_left_alone() {
        let mut sent = Sent::default();
        assert_eq!(
            sent.shorten(&block(&[(":status", "200"), ("grpc-status", "0")]), &mut [0; 64]),
            None
        );
        assert_eq!(sent.shorten(b"not a block", &mut [0; 64]), None);
        assert_eq!(sent.shorten(&[], &mut []), None);
        assert!(sent.entries.is_empty());
    }

    #[test]
    fn a_peer_that_breaks_the_rules_is_found_out() {
        let path = block(&[(":path", "/x")]);
        let define = |number: u8, field: &[u8]| [&[DEFINE, number], field].concat();
        let long = block(&[("x", &"y".repeat(LONGEST))]);
        for bad in [
            vec![ENTRY],
            vec![DEFINE],
            vec![DEFINE, 0],
            define(ENTRIES as u8, &path),
            define(0, &long),
            define(0, &[128]),
            define(0, &path[..path.len() - 1]),
            vec![137],
            vec![191],
            path[..2].to_vec(),
        ] {
            let mut received = Received::default();
            assert!(matches!(received.expand(&bad, LIMIT), Err(Breach::Headers(_))), "{bad:?}");
        }
        // A few bytes that expand to a large block.
        let mut received = Received::default();
        let long = block(&[("x", &"y".repeat(LONGEST - 10))]);
        let bomb = [define(0, &long), vec![ENTRY; 10_000]].concat();
        assert_eq!(received.expand(&bomb, LIMIT), Ok(None));
        assert_eq!(received.expand(&[ENTRY], LIMIT).unwrap().unwrap(), long);
    }

    proptest! {
        #[test]
        fn what_is_sent_is_what_arrives(
            blocks in proptest::collection::vec(
                proptest::collection::vec((0..5usize, 0..4u8, 0..300usize), 0..8), 0..60),
            spare in 0..40usize,
        ) {
            let names = [":path", "user-agent", "x-a", "x-b", "te"];
            let (mut sent, mut received) = (Sent::default(), Received::default());
            for fields in blocks {
                let values: Vec<String> = fields.iter().map(|(_, v, len)| {
                    char::from(b'a' + v).to_string().repeat(if *v == 0 { *len } else { 3 })
                }).collect();
                let fields: Vec<_> = fields.iter().zip(&values).map(|((n, ..), v)| (names[*n], &v[..])).collect();
                let block = block(&fields);
                let mut wire = vec![0; block.len() + spare];
                if let Some(len) = sent.shorten(&block, &mut wire) {
                    prop_assert!(len <= wire.len());
                    prop_assert_eq!(received.expand(&wire[..len], LIMIT).unwrap().unwrap(), block);
                }
            }
        }

        #[test]
        fn no_bytes_bring_it_down(blocks in proptest::collection::vec(any::<Vec<u8>>(), 0..10)) {
            let mut received = Received::default();
            for block in blocks {
                if received.expand(&block, 1000).is_ok_and(|block| block.is_some_and(|block| block.len() > 1000)) {
                    prop_assert!(false, "over the limit");
                }
            }
        }
    }
}
