//! A protobuf codec that sends and receives `bytes` fields without copying them.
//!
//! [`ProstCodec`] replaces `tonic_prost::ProstCodec`: same messages, same bytes on the wire, any
//! peer. Over this crate's [`Channel`](crate::Channel) and [`Server`](crate::Server) it sends a
//! `bytes` field from the memory that holds it, and a received field is a slice of the memory that
//! it landed in. Over any other transport it behaves like the plain codec.
//!
//! Stubs that tonic-rdma-build generates use it. With tonic-prost-build, set it in the `build.rs`
//! of a service; no other change is needed:
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
//!   do not fit a control slot. The CPU does not touch fields that lie in a [`Pool`](crate::Pool)
//!   of the connection; it copies others once, to staging. Long `string` and `Vec<u8>` fields are
//!   copied once more, as by the plain codec.
//! - Received: the `bytes` fields of type `Bytes` of every message that landed in one piece. The
//!   peer can still write to them: copy such a field before you check it or parse it in place, or
//!   set [`Server::copy_on_delivery`](crate::Server::copy_on_delivery) or
//!   [`Endpoint::copy_on_delivery`](crate::Endpoint::copy_on_delivery). All other fields are
//!   decoded from private copies.
//!
//! # Limits on the size of messages
//!
//! A stub's `max_encoding_message_size` and `max_decoding_message_size` count the whole message, as
//! usual. tonic checks them against the bytes in its own buffers, which do not include extracted
//! fields. Therefore the first message of a method that is longer than any before it is padded, in
//! tonic's buffers, to its true length: tonic decides, and a length that it accepted once is
//! accepted again. The cost of the padding is counted
//! ([`Copied::learning`](crate::Copied::learning)). If several stubs of one method share a channel,
//! the highest of their limits applies once a message has made use of it, because tonic does not
//! tell a codec which stub it serves. A stub that must keep a lower limit needs its own channel.
//! Apart from these limits, a connection carries messages of up to 256 MiB, and gRPC of less than 4
//! GiB.
//!
//! # Layers
//!
//! Between codec and transport a message may be a *placeholder*: a few bytes that are not protobuf,
//! and an unguessable key that is valid for one message. Layers that only read headers or forward
//! frames unchanged are not affected. Compression by tonic, and any format announced by another
//! `content-type` or a `content-encoding` (grpc-web), disables placeholders for that call. If any
//! other layer parses or rewrites messages, the call fails with INTERNAL and a message that names
//! the cause; such a layer never sees wrong data.
//!
//! | file | what |
//! |---|---|
//! | `prost` | the codec as tonic sees it |
//! | `placeholder` | the format of a placeholder |
//! | `sink` | where the encoder stores segments during the poll of a body |
//! | `body_encoder` | polls a body, replaces placeholders with segments |
//! | `pending_messages` | received messages that wait for their decoder |
//! | `deframer` | finds the messages in a received body, replaces them with placeholders |
//! | `lent_piece` | a piece of a body that the peer has lent |
//! | `named` | messages whose field lands in a buffer of the application |
//! | `methods` | what is learnt about each method |
//! | `fuzz` | both directions without a connection |

mod body_encoder;
mod deframer;
#[cfg(feature = "test-util")]
#[doc(hidden)]
pub mod fuzz;
mod lent_piece;
mod methods;
mod named;
mod pending_messages;
mod placeholder;
mod prost;
mod sink;
#[cfg(test)]
mod tests;

pub(crate) use self::body_encoder::{BodyEncoder, Chunk, Polled};
pub(crate) use self::deframer::{Deframer, Delivered, Part};
pub(crate) use self::lent_piece::LentPiece;
pub(crate) use self::methods::{Call, Method, Methods, Used};
#[cfg(feature = "test-util")]
pub use self::pending_messages::pending_messages;
pub(crate) use self::placeholder::HEADER;
pub use self::prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Minimum length in bytes of a `bytes` field that the encoder extracts. Copying a shorter one
/// costs less than describing it.
///
/// Encoding a message with an extracted field takes some 1,800 instructions more than one of 64
/// bytes, whatever its length (`codec-encode-1MiB` and `codec-encode-64` of `make costs`). A copy
/// of 4 KiB touches 64 cache lines twice, and extraction saves two copies: one to tonic's buffer,
/// one to staging. So from about 4 KiB on extraction costs no more.
pub const SEGMENT: usize = 4096;

use http::{HeaderMap, header};

/// Whether a body with these headers is a sequence of gRPC messages as the codec encodes them.
pub(crate) fn is_plain_grpc(headers: &HeaderMap) -> bool {
    let mut grpc = false;
    // A call has few headers: one pass costs less than three look-ups.
    for (name, value) in headers {
        if *name == header::CONTENT_TYPE {
            // Not application/grpc-web.
            let rest = value.as_bytes().strip_prefix(b"application/grpc");
            grpc = rest.is_some_and(|rest| !rest.starts_with(b"-"));
        } else if *name == header::CONTENT_ENCODING
            || (name == "grpc-encoding" && value != "identity")
        {
            return false;
        }
    }
    grpc
}
