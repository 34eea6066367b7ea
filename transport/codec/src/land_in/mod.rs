//! An application buffer in which a message field lands, and its contents after the call.
//!
//! | file | what |
//! |---|---|
//! | `target` | the call's side: claims the buffer, and reports its outcome |

mod target;

pub use self::target::{Claimed, Target};

/// The contents of an application buffer after its call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The field was written to the buffer by the device, or by a peer that has mapped it.
    #[non_exhaustive]
    Landed {
        /// Length of the field, which is at the start of the buffer.
        len: usize,
    },
    /// The field was copied to the buffer.
    #[non_exhaustive]
    Copied {
        /// Length of the field, which is at the start of the buffer.
        len: usize,
        /// The reason for the copy.
        why: WhyCopied,
    },
    /// No field landed, and the content of the buffer is meaningless.
    #[non_exhaustive]
    Empty {
        /// The reason why no field landed.
        why: WhyEmpty,
    },
}

impl Outcome {
    /// Length of the field, which is at the start of the buffer.
    pub fn filled(&self) -> usize {
        match self {
            Outcome::Landed { len } | Outcome::Copied { len, .. } => *len,
            Outcome::Empty { .. } => 0,
        }
    }
}

/// Why a field was copied to its buffer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyCopied {
    /// The call went over TCP.
    #[error("the call went over TCP")]
    Tcp,
    /// The call went over shared memory, and the peer has not mapped the buffer. Either the buffer
    /// is not a `LandableBuf` that stays registered, or the peer does not map buffers
    /// (`ContextBuilder::map_peer_buffers`), or the peer has mapped as many files as it may.
    #[error("the call went over shared memory")]
    SharedMemory,
    /// The message was too short for a WRITE, or the sender's codec does not tell where the fields
    /// lie.
    #[error("the message came in control messages, or without the place of its field")]
    NotApart,
    /// Landed bytes are copied before anything reads them
    /// (`Endpoint::copy_on_delivery`).
    #[error("the endpoint copies on delivery")]
    CopyOnDelivery,
    /// The device did not register the buffer.
    #[error("the buffer was not registered: {0}")]
    NotRegistered(String),
}

/// Why a buffer came back without a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyEmpty {
    /// No call has used the buffer, or the call ended without a message.
    #[error("no message was received")]
    NoMessage,
    /// The stub does not use [`ProstCodec`](crate::ProstCodec), or had sent no message when
    /// the reply came.
    #[error("the stub does not use tonic_rdma::codec::ProstCodec")]
    Codec,
    /// The message has no field of type `Bytes`, or only empty fields of this type.
    #[error("the message has no bytes field")]
    NoField,
    /// The field is longer than the buffer, so the call failed with OUT_OF_RANGE.
    #[error("a field of {field} bytes does not fit a buffer of {buffer} bytes")]
    #[non_exhaustive]
    TooLong {
        /// Bytes of the field.
        field: usize,
        /// Bytes of the buffer.
        buffer: usize,
    },
    /// Bytes of another message in the buffer are still in use.
    #[error("the buffer was in use")]
    InUse,
}
