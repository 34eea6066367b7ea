//! The codec of the generated stubs: tonic-rdma's zero-copy codec or tonic's plain one. The fabric
//! under test selects it for each end.

use std::cell::Cell;
use std::marker::PhantomData;

use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The codec of a generated stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecKind {
    /// `tonic_rdma::codec::ProstCodec`
    ZeroCopy,
    /// `tonic_prost::ProstCodec`
    Plain,
}

thread_local! {
    static WHICH: Cell<CodecKind> = const { Cell::new(CodecKind::Plain) };
}

/// Sets the codec of stubs created on this thread. Handlers run on the threads of the case's
/// runtime, and the case itself on another thread.
pub fn set_thread_codec(which: CodecKind) {
    WHICH.set(which);
}

/// The codec that `codec_path` in build.rs selects.
#[derive(Clone, Debug)]
pub struct TestCodec<T, U> {
    which: CodecKind,
    _pd: PhantomData<fn(T) -> U>,
}

impl<T, U> Default for TestCodec<T, U> {
    fn default() -> Self {
        Self { which: WHICH.get(), _pd: PhantomData }
    }
}

impl<T, U> Codec for TestCodec<T, U>
where
    T: prost::Message + 'static,
    U: prost::Message + Default + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = AnyEncoder<T>;
    type Decoder = AnyDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        AnyEncoder(match self.which {
            CodecKind::ZeroCopy => Box::new(tonic_rdma::codec::ProstCodec::<T, U>::new().encoder()),
            CodecKind::Plain => Box::new(tonic_prost::ProstCodec::<T, U>::new().encoder()),
        })
    }

    fn decoder(&mut self) -> Self::Decoder {
        AnyDecoder(match self.which {
            CodecKind::ZeroCopy => Box::new(tonic_rdma::codec::ProstCodec::<T, U>::new().decoder()),
            CodecKind::Plain => Box::new(tonic_prost::ProstCodec::<T, U>::new().decoder()),
        })
    }
}

/// Either encoder.
#[allow(missing_debug_implementations)]
pub struct AnyEncoder<T>(Box<dyn Encoder<Item = T, Error = Status> + Send>);

impl<T> Encoder for AnyEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, dst: &mut EncodeBuf<'_>) -> Result<(), Status> {
        self.0.encode(item, dst)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// Either decoder.
#[allow(missing_debug_implementations)]
pub struct AnyDecoder<T>(Box<dyn Decoder<Item = T, Error = Status> + Send>);

impl<T> Decoder for AnyDecoder<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        self.0.decode(src)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}
