//! A protobuf codec that sends and receives `bytes` fields without copying them.
//!
//! [`ProstCodec`] replaces `tonic_prost::ProstCodec`: it has the same messages and the same bytes
//! on the wire, so it works with any peer. Over this crate's [`Channel`](crate::Channel) and
//! [`Server`](crate::Server), the codec sends a `bytes` field from the memory that holds the field,
//! and a received field is a slice of the memory in which it landed. Over any other transport, the
//! codec behaves like `tonic_prost::ProstCodec`.
//!
//! Stubs that tonic-rdma-build generates use this codec. With tonic-prost-build, set the codec in
//! the service's `build.rs`. No other change is needed:
//!
//! ```no_run
//! # fn build() -> std::io::Result<()> {
//! tonic_prost_build::configure()
//!     .codec_path("tonic_rdma::codec::ProstCodec")
//!     .bytes(".") // bytes fields as bytes::Bytes
//!     .compile_protos(&["proto/store.proto"], &["proto"])?;
//! # Ok(()) }
//! ```
//!
//! # What is not copied
//!
//! - Sent: fields of type [`Bytes`](bytes::Bytes) of at least [`SEGMENT`] bytes, in messages that
//!   do not fit a control slot. A field that lies in a [`Pool`](crate::Pool) of the connection's
//!   device, or in [registered memory](crate::Context::register), is not copied by the CPU. Any
//!   other field is copied once, to staging memory. Long `string` and `Vec<u8>` fields are copied
//!   once more, as by the plain codec.
//! - Received: the `bytes` fields of type `Bytes` of every message that landed in one piece. The
//!   peer can still write to these fields. So copy such a field before you check it or parse it in
//!   place, or set [`Server::copy_on_delivery`](crate::Server::copy_on_delivery) or
//!   [`Endpoint::copy_on_delivery`](crate::Endpoint::copy_on_delivery). All other fields are
//!   decoded from private copies.
//!
//! # Limits on the size of messages
//!
//! A stub's `max_encoding_message_size` and `max_decoding_message_size` count the whole message, as
//! usual. tonic compares these limits with the bytes in its own buffers, which do not include
//! extracted fields. So when a method's message is longer than all earlier messages, the codec pads
//! the message in tonic's buffers to its true length. If tonic accepts the message, the codec
//! accepts every later message up to that length. The cost of the padding is counted
//! ([`Copied::learning`](crate::Copied::learning)). If several stubs of one method share a channel,
//! the highest of their limits applies to all of them once a message of that length was accepted,
//! because tonic does not tell a codec which stub it serves. A stub that must keep a lower limit
//! needs its own channel. Apart from these limits, a connection carries messages of up to 4 GiB -
//! 1, the longest message that gRPC's header can express. A message that is too long for one piece
//! of landing memory lands in several parts.
//!
//! # Layers
//!
//! Between codec and transport a message may be a *placeholder*: a few bytes that are not protobuf,
//! with an unguessable key that is valid for one message. Layers that only read headers or forward
//! frames unchanged are not affected. Compression by tonic, and any format announced by another
//! `content-type` or a `content-encoding` (grpc-web), disables placeholders for that call. If
//! another layer parses or rewrites messages, the call fails with INTERNAL and a message that names
//! the cause. Such a layer never sees wrong data.
//!
//! The codec is in its own crate, tonic-rdma-codec. So a replacement for tonic-prost can use the
//! codec, although this crate itself depends on tonic-prost. See "Stubs of dependencies" in the
//! repository's docs/zero-copy.md.

pub(crate) use tonic_rdma_codec::internal::{
    BodyChunk, BodyEncoder, Call, Deframer, Delivered, Fifo, HEADER, LentPiece, Method, Methods,
    Part, Polled, Used, is_plain_grpc, serve_first,
};
pub use tonic_rdma_codec::{ProstCodec, ProstDecoder, ProstEncoder, SEGMENT};
#[cfg(feature = "test-util")]
#[doc(hidden)]
pub use tonic_rdma_codec::{fuzz, pending_messages};
