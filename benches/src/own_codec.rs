//! An example of a codec that a program defines itself: fixed fields, then the payload, which is
//! copied.

use bytes::{Buf as _, BufMut as _};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use crate::pb::Blob;

/// Bytes of `reply` and `count`, in big-endian order, before the payload.
const HEADER: usize = 16;

/// The codec of [`Blob`].
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnCodec(());

impl Codec for OwnCodec {
    type Encode = Blob;
    type Decode = Blob;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for OwnCodec {
    type Item = Blob;
    type Error = Status;

    fn encode(&mut self, blob: Blob, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.reserve(HEADER + blob.payload.len());
        out.put_u64(blob.reply);
        out.put_u64(blob.count);
        out.put(blob.payload);
        Ok(())
    }
}

impl Decoder for OwnCodec {
    type Item = Blob;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Blob>, Status> {
        if bytes.remaining() < HEADER {
            return Err(Status::internal(format!("a message of {} bytes", bytes.remaining())));
        }
        let (reply, count) = (bytes.get_u64(), bytes.get_u64());
        let payload = bytes.copy_to_bytes(bytes.remaining());
        Ok(Some(Blob { payload, reply, count }))
    }
}
