//! The header block decoder.

use bytes::{Bytes, BytesMut};
use tonic_rdma_proto::headers::{Decoder, Field, encode};

/// A block must be refused, or its fields must be the same after encoding them again, in no more
/// bytes.
///
/// # Panics
/// The header decoder is wrong.
pub fn headers(data: &[u8]) {
    let mut decoder = Decoder::new(Bytes::copy_from_slice(data));
    let mut fields = Vec::new();
    for field in decoder.by_ref() {
        match field {
            Ok(field) => fields.push(field),
            Err(_) => {
                assert!(decoder.next().is_none(), "nothing comes behind an error");
                return;
            }
        }
    }
    // Names that are not text are refused in a layer above.
    if fields.iter().any(|field| std::str::from_utf8(&field.name).is_err()) {
        return;
    }
    let mut block = BytesMut::new();
    for Field { name, value, .. } in &fields {
        let name = std::str::from_utf8(name).expect("looked at above");
        encode(&mut block, name, value).expect("it came from a block");
    }
    assert!(block.len() <= data.len(), "the encoder knows the shortest form");
    // Compare strings only: a literal may be encoded as an index.
    let strings = |field: Field| (field.name, field.value);
    let again: Result<Vec<_>, _> =
        Decoder::new(block.freeze()).map(|field| field.map(strings)).collect();
    assert_eq!(again, Ok(fields.into_iter().map(strings).collect()));
}
