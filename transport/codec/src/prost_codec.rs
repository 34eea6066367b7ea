//! The codec as tonic sees it.

use std::fmt;
use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic_rdma_memory::Window;

use crate::methods;
use crate::pending_messages;
use crate::placeholder::{self, Key, LOST};
use crate::sink::{self, Batching};

/// Initial capacity in bytes of tonic's buffer for a body. Long fields bypass the buffer, and short
/// messages need no more memory. With tonic's own default of 8 KiB, a unary call would allocate 32
/// KiB.
const BUFFER: usize = 1024;
/// Number of message bytes after which tonic emits a frame. The number is tonic's default.
const YIELD: usize = 32 * 1024;

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER, YIELD)
}

/// A [`Codec`] for `application/grpc+proto` in place of `tonic_prost::ProstCodec`. See the
/// [module](super).
pub struct ProstCodec<T, U> {
    _pd: PhantomData<fn(T) -> U>,
}

impl<T, U> ProstCodec<T, U> {
    /// Creates a codec. tonic creates one for each call.
    pub fn new() -> Self {
        Self { _pd: PhantomData }
    }
}

impl<T, U> ProstCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    /// Creates an encoder with custom buffer sizes, for use in a custom codec.
    pub fn raw_encoder(buffer_settings: BufferSettings) -> <Self as Codec>::Encoder {
        ProstEncoder::new(buffer_settings)
    }

    /// Creates a decoder with custom buffer sizes, for use in a custom codec.
    pub fn raw_decoder(buffer_settings: BufferSettings) -> <Self as Codec>::Decoder {
        ProstDecoder::new(buffer_settings)
    }
}

impl<T, U> Codec for ProstCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;

    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        methods::encoder_is_made();
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        methods::decoder_is_made();
        ProstDecoder::default()
    }
}

/// Encodes messages, and leaves long `bytes` fields to the transport of tonic-rdma.
pub struct ProstEncoder<T> {
    settings: BufferSettings,
    next: Batching,
    _pd: PhantomData<fn(T)>,
}

impl<T> ProstEncoder<T> {
    /// Creates an encoder with custom buffer sizes. While messages are long, each message gets a
    /// separate frame, whatever the sizes are.
    pub fn new(buffer_settings: BufferSettings) -> Self {
        Self { settings: buffer_settings, next: Batching::Batch, _pd: PhantomData }
    }
}

impl<T: Message> Encoder for ProstEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        self.next = sink::encode(&item, buf, self.next)?;
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        match self.next {
            Batching::Batch => self.settings,
            Batching::Alone(_) => BufferSettings::new(BUFFER, 1),
        }
    }
}

/// Decodes messages. If a message landed in one piece or is lent, its fields of type `Bytes` are
/// slices of that memory. All other fields are read from private copies.
pub struct ProstDecoder<U> {
    settings: BufferSettings,
    _pd: PhantomData<fn() -> U>,
}

impl<U> ProstDecoder<U> {
    /// Creates a decoder with custom buffer sizes.
    pub fn new(buffer_settings: BufferSettings) -> Self {
        Self { settings: buffer_settings, _pd: PhantomData }
    }
}

impl<U: Message + Default> Decoder for ProstDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let kept = Key::read(&placeholder::IN, buf.chunk()).and_then(pending_messages::take);
        let Some(kept) = kept else {
            let lost = placeholder::is_lost(buf.chunk());
            return U::decode(buf).map(Some).map_err(|error| match lost {
                false => Status::internal(error.to_string()),
                true => {
                    Status::internal(format!("{error}. If the peer did not send it so: {LOST}"))
                }
            });
        };
        let len = buf.remaining();
        buf.advance(len);
        if let Some(method) = kept.method {
            // The placeholder had the message's true length, and tonic accepted it.
            method.has_decoded(len);
        }
        // The peer may still write to the message, so prost reads private copies of it, and borrows
        // only `bytes` fields.
        let mut window = Window::new();
        let message = match kept.message {
            pending_messages::ArrivedMessage::Named(named) => return named.decode().map(Some),
            pending_messages::ArrivedMessage::Whole(message) => message.reader(&mut window),
            pending_messages::ArrivedMessage::Lent(piece) => piece.message(&mut window),
        };
        // Protobuf errors become INTERNAL, as in tonic-prost.
        U::decode(message).map(Some).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.settings
    }
}

/// Implements `Default`, `Clone` and `Debug` without derives, which would add bounds on the message
/// types.
macro_rules! plain_impls {
    ($($name:ident<$($param:ident),*> = $new:expr, $clone:expr;)*) => {$(
        impl<$($param),*> Default for $name<$($param),*> {
            fn default() -> Self {
                $new
            }
        }

        impl<$($param),*> Clone for $name<$($param),*> {
            fn clone(&self) -> Self {
                let clone: fn(&Self) -> Self = $clone;
                clone(self)
            }
        }

        impl<$($param),*> fmt::Debug for $name<$($param),*> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

plain_impls! {
    ProstCodec<T, U> = Self::new(), |_| Self::new();
    ProstEncoder<T> = Self { next: Batching::FIRST, ..Self::new(settings()) },
        |this| Self { settings: this.settings, next: this.next, _pd: PhantomData };
    ProstDecoder<U> = Self::new(settings()), |this| Self::new(this.settings);
}
