//! Header blocks, which are lists of fields. `docs/protocol.md` has the layouts of blocks.
//!
//! Names are lower-case as in HTTP/2. Pseudo-fields (`:path`, `:status` ...) are encoded as
//! ordinary fields. The layer above interprets them. A field that is in the header table takes a
//! single byte: see `table`.

pub(crate) mod table;

use bytes::{BufMut, Bytes};

use crate::error::Breach;

/// The static names, which are numbered from 1.
pub const NAMES: [&str; 22] = [
    ":path",
    ":authority",
    ":scheme",
    ":method",
    ":status",
    "content-type",
    "te",
    "user-agent",
    "grpc-timeout",
    "grpc-encoding",
    "grpc-accept-encoding",
    "grpc-status",
    "grpc-message",
    "grpc-status-details-bin",
    "authorization",
    "traceparent",
    "tracestate",
    "date",
    "content-encoding",
    "accept-encoding",
    "x-request-id",
    "cookie",
];

/// The static pairs, which are numbered from 128.
pub const PAIRS: [(&str, &str); 8] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("grpc-status", "0"),
    ("grpc-accept-encoding", "identity"),
];

/// For each static name, the range of its pairs in [`PAIRS`].
const PAIRS_OF: [(u8, u8); NAMES.len()] = {
    let mut pairs = [(0, 0); NAMES.len()];
    let mut place = 0;
    while place < NAMES.len() {
        let mut n = 0;
        while n < PAIRS.len() {
            if same(PAIRS[n].0, NAMES[place]) {
                pairs[place] =
                    (if pairs[place].1 == 0 { n as u8 } else { pairs[place].0 }, n as u8 + 1);
            }
            n += 1;
        }
        place += 1;
    }
    pairs
};

/// The byte that encodes a static pair in a block.
///
/// # Panics
/// If no static pair has this name and value. Call this function in constants only, where the panic
/// is a compile error.
pub const fn pair(name: &str, value: &str) -> u8 {
    let mut n = 0;
    while !(same(PAIRS[n].0, name) && same(PAIRS[n].1, value)) {
        n += 1;
    }
    128 + n as u8
}

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// Maximum length of a static name in bytes.
const LONGEST_NAME: usize = 23;

/// Indices in [`NAMES`] by length of the name; at most four names have the same length.
const BY_LENGTH: [[u8; 4]; LONGEST_NAME + 1] = {
    let mut places = [[u8::MAX; 4]; LONGEST_NAME + 1];
    let mut place = 0;
    while place < NAMES.len() {
        let same = &mut places[NAMES[place].len()];
        let mut at = 0;
        while same[at] != u8::MAX {
            at += 1;
        }
        same[at] = place as u8;
        place += 1;
    }
    places
};

/// The index in [`NAMES`], if the name is static.
fn place(name: &str) -> Option<u8> {
    let same = BY_LENGTH.get(name.len())?;
    same.iter()
        .copied()
        .take_while(|place| *place != u8::MAX)
        .find(|place| NAMES[usize::from(*place)] == name)
}

/// A field of a decoded block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// The first byte of the field's encoding: 0 for a literal name, otherwise the number of a
    /// static name or pair.
    pub number: u8,
    /// The name; its characters are not validated.
    pub name: Bytes,
    /// The value; its characters are not validated.
    pub value: Bytes,
}

/// A name or value that is too long for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("header of {0} bytes, the limit is 65535")]
pub struct TooLong(pub usize);

/// Appends a field to a block.
///
/// # Errors
/// A name or a value is longer than 65,535 bytes. On an error nothing is appended.
pub fn encode(block: &mut impl BufMut, name: &str, value: &[u8]) -> Result<(), TooLong> {
    let longest = name.len().max(value.len());
    let (Ok(name_len), Ok(value_len)) = (u16::try_from(name.len()), u16::try_from(value.len()))
    else {
        return Err(TooLong(longest));
    };
    let place = place(name);
    let (from, to) = place.map_or((0, 0), |place| PAIRS_OF[usize::from(place)]);
    if let Some(n) = (from..to).find(|n| PAIRS[usize::from(*n)].1.as_bytes() == value) {
        block.put_u8(128 + n);
        return Ok(());
    }
    let [low, high] = value_len.to_le_bytes();
    match place {
        Some(place) => block.put_slice(&[1 + place, low, high]),
        None => {
            block.put_u8(0);
            block.put_u16_le(name_len);
            block.put_slice(name.as_bytes());
            block.put_slice(&[low, high]);
        }
    }
    block.put_slice(value);
    Ok(())
}

/// Decodes a block, field by field, without copying.
#[derive(Clone, Debug)]
pub struct Decoder {
    block: Bytes,
    /// Bytes decoded so far.
    at: usize,
}

impl Decoder {
    /// Creates a decoder for a complete block.
    pub fn new(block: Bytes) -> Self {
        Decoder { block, at: 0 }
    }

    fn string(&mut self) -> Result<Bytes, Breach> {
        let from = self.at + 2;
        let &[low, high] = self
            .block
            .get(self.at..from)
            .and_then(<[u8]>::first_chunk)
            .ok_or(Breach::Headers("length cut short"))?;
        let to = from + usize::from(u16::from_le_bytes([low, high]));
        if self.block.len() < to {
            return Err(Breach::Headers("string reaches over the end"));
        }
        self.at = to;
        Ok(self.block.slice(from..to))
    }

    fn field(&mut self, number: u8) -> Result<Field, Breach> {
        if number >= 128 {
            let (name, value) = PAIRS
                .get(usize::from(number - 128))
                .ok_or(Breach::Headers("unknown static pair"))?;
            return Ok(Field {
                number,
                name: Bytes::from_static(name.as_bytes()),
                value: Bytes::from_static(value.as_bytes()),
            });
        }
        let name = match number {
            0 => self.string()?,
            n => {
                let name =
                    NAMES.get(usize::from(n - 1)).ok_or(Breach::Headers("unknown static name"))?;
                Bytes::from_static(name.as_bytes())
            }
        };
        Ok(Field { number, name, value: self.string()? })
    }
}

impl Iterator for Decoder {
    type Item = Result<Field, Breach>;

    fn next(&mut self) -> Option<Self::Item> {
        let number = *self.block.get(self.at)?;
        self.at += 1;
        let field = self.field(number);
        if field.is_err() {
            self.at = self.block.len();
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;

    #[test]
    fn fields_round_trip_in_order() {
        let fields: [(&str, &[u8]); 6] = [
            (":method", b"POST"),
            (":path", b"/a.B/C"),
            ("x-mine-bin", b"\x00\xff"),
            ("x-mine-bin", b""),
            ("grpc-status", b"0"),
            ("grpc-status", b"5"),
        ];
        let mut block = BytesMut::new();
        for (n, v) in fields {
            encode(&mut block, n, v).unwrap();
        }
        let numbers = [128, 1, 0, 0, 134, 12];
        let got: Vec<Field> = Decoder::new(block.freeze()).map(Result::unwrap).collect();
        let want: Vec<Field> = fields
            .iter()
            .zip(numbers)
            .map(|((n, v), number)| Field {
                number,
                name: Bytes::copy_from_slice(n.as_bytes()),
                value: Bytes::copy_from_slice(v),
            })
            .collect();
        assert_eq!(got, want);
    }

    #[test]
    fn malformed_blocks_are_errors() {
        for bad in [&b"\x00"[..], b"\x00\x05\x00ab", b"\x01\xff\xff", b"\x7f\x00\x00", b"\xff"] {
            assert!(Decoder::new(Bytes::copy_from_slice(bad)).any(|f| f.is_err()), "{bad:?}");
        }
    }

    #[test]
    fn all_that_is_static_is_found() {
        let encoded = |name: &str, value: &str| {
            let mut block = BytesMut::new();
            encode(&mut block, name, value.as_bytes()).unwrap();
            block
        };
        for (n, (name, value)) in PAIRS.into_iter().enumerate() {
            assert_eq!(encoded(name, value)[..], [128 + n as u8]);
        }
        for (n, name) in NAMES.into_iter().enumerate() {
            assert_eq!(encoded(name, "x")[..], [1 + n as u8, 1, 0, b'x']);
        }
    }

    #[test]
    fn too_long_is_refused_whole() {
        let mut block = BytesMut::new();
        assert_eq!(encode(&mut block, "a", &vec![0; 70_000]), Err(TooLong(70_000)));
        assert!(block.is_empty());
    }
}
