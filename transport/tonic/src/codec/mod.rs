//! A codec for protobuf that leaves `bytes` fields where they lie.
//!
//! [`ProstCodec`] stands in for `tonic_prost::ProstCodec`: same messages, same bytes on the wire,
//! any peer. Over this crate's [`Channel`](crate::Channel) and [`Server`](crate::Server) a `bytes`
//! field then is sent from where it lies, and on receipt is a slice of the memory that it landed
//! in. Over any other transport it does what the plain codec does.
//!
//! A service is turned over in its `build.rs`, and nowhere else:
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
//! # What is kept apart
//!
//! - Sent: fields of type [`Bytes`](bytes::Bytes) of at least [`SEGMENT`] bytes, in messages that
//!   do not fit a control slot. Those that lie in a [`Pool`](crate::Pool) of the connection are not
//!   touched by the CPU at all; others are copied once, to staging. Long `string` and `Vec<u8>`
//!   fields are copied once more, as by the plain codec.
//! - Received: the `bytes` fields of type `Bytes` of every message that landed in one piece. The
//!   peer can still write to them: copy such a field before you check it or parse it in place, or
//!   set [`Server::copy_on_delivery`](crate::Server::copy_on_delivery) or
//!   [`Endpoint::copy_on_delivery`](crate::Endpoint::copy_on_delivery). Everything else of a
//!   message is decoded from private copies.
//!
//! # Limits on the size of messages
//!
//! A stub's `max_encoding_message_size` and `max_decoding_message_size` count the whole message, as
//! ever. tonic checks them against what passes through its buffers, and what is kept apart does
//! not. So the first message of a method that is longer than any before it is filled up, in tonic's
//! buffers, to its true length: tonic decides, and what it lets pass once is let pass again. What
//! this costs is counted ([`Copied::learning`](crate::Copied::learning)). Where several stubs of
//! one method share a channel, the highest of their limits counts once a message has made use of
//! it; tonic tells a codec nothing of its stub. A stub that must keep a lower limit needs a channel
//! of its own. Apart from that, a connection carries messages up to 256 MiB, and gRPC up to 4 GiB -
//! 1.
//!
//! # Layers
//!
//! Between codec and transport a message may be a *placeholder*: a few bytes that are not protobuf,
//! and an unguessable key that is good for one message. Layers that look at headers, or pass frames
//! on as they are, do not notice. Compression by tonic, and whatever announces itself by another
//! `content-type` or a `content-encoding` (grpc-web), switches placeholders off for that call. Any
//! other layer that takes messages apart makes the call fail with INTERNAL, and the text says why;
//! it never sees wrong data.
//!
//! | file | what |
//! |---|---|
//! | `prost` | the codec as tonic sees it |
//! | `placeholder` | what a placeholder looks like |
//! | `sink` | where the encoder leaves segments, for the poll of one body |
//! | `body_encoder` | polls a body, puts segments in the place of placeholders |
//! | `pending_messages` | received messages that wait for their decoder |
//! | `deframer` | finds the messages in a received body, puts placeholders in their place |
//! | `methods` | what has been learnt of each method |
//! | `fuzz` | both directions without a connection |

mod body_encoder;
mod deframer;
#[cfg(feature = "test-util")]
#[doc(hidden)]
pub mod fuzz;
mod methods;
mod pending_messages;
mod placeholder;
mod prost;
mod sink;
#[cfg(test)]
mod tests;

pub(crate) use self::body_encoder::{BodyEncoder, Chunk, Polled};
pub(crate) use self::deframer::{Deframer, Delivered, Part};
pub(crate) use self::methods::{Call, Method, Methods, Used};
#[cfg(feature = "test-util")]
pub use self::pending_messages::pending_messages;
pub(crate) use self::placeholder::HEADER;
pub use self::prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// `bytes` fields of at least this many bytes are kept apart when they are encoded. Shorter ones
/// cost less to copy than to describe.
///
/// Where a field lies apart, encoding a message of it takes some 1,800 instructions more than one
/// of 64 bytes, whatever its length (`codec-encode-1MiB` and `codec-encode-64` of `make costs`);
/// each copy of 4 KiB touches 64 cache lines twice, and of two, one to tonic's buffer and one to
/// staging, neither is made. So from about 4 KiB on it is no loss.
pub const SEGMENT: usize = 4096;

use http::{HeaderMap, header};

/// Whether a body with these headers is a sequence of gRPC messages as the codec makes them.
pub(crate) fn is_plain_grpc(headers: &HeaderMap) -> bool {
    let mut grpc = false;
    // There are a few of them: looking at each costs less than looking for three.
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
