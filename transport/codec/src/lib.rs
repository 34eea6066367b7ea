//! The protobuf codec of [tonic-rdma](https://docs.rs/tonic-rdma), which does not copy `bytes`
//! fields. tonic-rdma exports it as `tonic_rdma::codec`, whose documentation describes it.
//!
//! Programs depend on tonic-rdma, not on this crate. The codec is a separate crate because the
//! replacement for tonic-prost uses it. That replacement cannot depend on tonic-rdma, because
//! tonic-rdma depends on tonic-prost.
//!
//! | file | what |
//! |---|---|
//! | `prost_codec` | the codec as tonic sees it |
//! | `placeholder` | the format of a placeholder |
//! | `sink` | where the encoder stores segments during the poll of a body |
//! | `body_encoder` | polls a body, replaces placeholders with segments |
//! | `pending_messages` | received messages that wait for their decoder |
//! | `deframer` | finds the messages in a received body, replaces them with placeholders |
//! | `named` | messages whose field lands in an application buffer |
//! | `land_in` | a call's view of such a buffer, and what it holds afterwards |
//! | `methods` | what is learnt about each method |
//! | `fuzz` | both directions without a connection |

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod body_encoder;
mod deframer;
#[cfg(feature = "test-util")]
#[doc(hidden)]
pub mod fuzz;
#[doc(hidden)]
pub mod land_in;
mod methods;
mod named;
mod pending_messages;
mod placeholder;
mod prost_codec;
mod sink;
#[cfg(test)]
mod tests;

#[cfg(feature = "test-util")]
#[doc(hidden)]
pub use self::pending_messages::pending_messages;
pub use self::prost_codec::{ProstCodec, ProstDecoder, ProstEncoder};

/// The interface for the transport. It is not part of the stable interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::body_encoder::{BodyChunk, BodyEncoder, Fifo, Polled};
    pub use crate::deframer::{Deframer, Delivered, Part};
    pub use crate::is_plain_grpc;
    pub use crate::methods::{Call, Method, Methods, Used, serve_first};
    pub use crate::pending_messages::LentPiece;
    pub use crate::placeholder::HEADER;
}

/// Minimum length in bytes of a `bytes` field that the encoder extracts. Copying a shorter field
/// costs less than describing it.
///
/// Encoding a message with an extracted field takes some 1,800 instructions more than encoding a
/// message of 64 bytes, whatever the field's length (`codec-encode-1MiB` and `codec-encode-64` of
/// `make costs`). A copy of 4 KiB touches 64 cache lines twice, and extraction saves two copies:
/// one to tonic's buffer, one to staging. So from about 4 KiB on, extraction costs no more than a
/// copy.
pub const SEGMENT: usize = 4096;

use http::{HeaderMap, header};

/// Whether a body with these headers is a sequence of gRPC messages as the codec encodes them.
pub fn is_plain_grpc(headers: &HeaderMap) -> bool {
    let mut grpc = false;
    // A call has few headers: one pass costs less than three look-ups.
    for (name, value) in headers {
        if *name == header::CONTENT_TYPE {
            // application/grpc-web is not plain gRPC.
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
