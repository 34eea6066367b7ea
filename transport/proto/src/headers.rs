//! Header blocks.
//!
//! A block is a list of fields. A field is one of
//!
//! | first byte | what follows | meaning |
//! |---|---|---|
//! | 0 | name length (2), name, value length (2), value | literal |
//! | 1 to 127 | value length (2), value | name number n of the static table |
//! | 128 to 255 | nothing | name and value number n - 128 of the static pairs |
//!
//! On the wire, fields that a connection has seen before are shorter still: see `table`.
//!
//! Names are lower-case as in HTTP/2. Pseudo-fields (`:path`, `:status` ...) come as ordinary fields; what
//! they mean is for the layer above.

pub(crate) mod table;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::error::Breach;

/// Static names, from number 1.
const NAMES: [&str; 22] = [
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

/// Static pairs, from number 128.
const PAIRS: [(&str, &str); 8] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("grpc-status", "0"),
    ("grpc-accept-encoding", "identity"),
];

/// A field of a decoded block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name, not checked for the characters that HTTP allows.
    pub name: Bytes,
    /// Value, not checked either.
    pub value: Bytes,
}

/// A name or value that does not fit a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("header of {0} bytes, the limit is 65535")]
pub struct TooLong(pub usize);

/// Appends a field to a block.
///
/// # Errors
/// A name or a value longer than 65,535 bytes; nothing is appended then.
pub fn encode(block: &mut BytesMut, name: &str, value: &[u8]) -> Result<(), TooLong> {
    let longest = name.len().max(value.len());
    let (Ok(name_len), Ok(value_len)) = (u16::try_from(name.len()), u16::try_from(value.len())) else {
        return Err(TooLong(longest));
    };
    if let Some(n) = PAIRS.iter().position(|(n, v)| *n == name && v.as_bytes() == value) {
        block.put_u8(128 + n as u8);
        return Ok(());
    }
    block.reserve(5 + name.len() + value.len());
    match NAMES.iter().position(|n| *n == name) {
        Some(n) => block.put_u8(1 + n as u8),
        None => {
            block.put_u8(0);
            block.put_u16_le(name_len);
            block.put_slice(name.as_bytes());
        }
    }
    block.put_u16_le(value_len);
    block.put_slice(value);
    Ok(())
}

/// Decodes a block, field by field, without copying.
#[derive(Clone, Debug)]
pub struct Decoder {
    rest: Bytes,
}

impl Decoder {
    /// Starts at the beginning of a whole block.
    pub fn new(block: Bytes) -> Self {
        Decoder { rest: block }
    }

    fn string(&mut self) -> Result<Bytes, Breach> {
        if self.rest.len() < 2 {
            return Err(Breach::Headers("length cut short"));
        }
        let len = usize::from(self.rest.get_u16_le());
        if self.rest.len() < len {
            return Err(Breach::Headers("string reaches over the end"));
        }
        Ok(self.rest.split_to(len))
    }

    fn field(&mut self, first: u8) -> Result<Field, Breach> {
        if first >= 128 {
            let (name, value) =
                PAIRS.get(usize::from(first - 128)).ok_or(Breach::Headers("unknown static pair"))?;
            return Ok(Field {
                name: Bytes::from_static(name.as_bytes()),
                value: Bytes::from_static(value.as_bytes()),
            });
        }
        let name = match first {
            0 => self.string()?,
            n => {
                let name = NAMES.get(usize::from(n - 1)).ok_or(Breach::Headers("unknown static name"))?;
                Bytes::from_static(name.as_bytes())
            }
        };
        Ok(Field { name, value: self.string()? })
    }
}

impl Iterator for Decoder {
    type Item = Result<Field, Breach>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let first = self.rest.get_u8();
        let field = self.field(first);
        if field.is_err() {
            self.rest.clear();
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
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
        let got: Vec<Field> = Decoder::new(block.freeze()).map(Result::unwrap).collect();
        let want: Vec<Field> = fields
            .iter()
            .map(|(n, v)| Field {
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
    fn too_long_is_refused_whole() {
        let mut block = BytesMut::new();
        assert_eq!(encode(&mut block, "a", &vec![0; 70_000]), Err(TooLong(70_000)));
        assert!(block.is_empty());
    }
}
