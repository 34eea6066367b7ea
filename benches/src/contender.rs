//! The contenders.

use std::fmt;

use bytes::Bytes;
use clap::ValueEnum;
use tonic_rdma::FabricKind;

/// The implementation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Contender {
    /// tonic over TCP
    TonicTcp,
    /// tonic over a unix socket
    TonicUnix,
    /// Like tonic-tcp, with a codec of this program, which copies the payload
    TonicOwn,
    /// tonic-rdma over TCP, with its codec
    Tcp,
    /// tonic-rdma over TCP, with tonic's codec
    TcpPlain,
    /// tonic-rdma over shared memory, with its codec
    Shm,
    /// Like shm, with a payload on the heap at an odd address that is sent repeatedly
    ShmHeap,
    /// Like shm, and both ends lend what they send
    ShmLent,
    /// Like shm-lent, and the receiver reads each message in full
    ShmLentRead,
    /// Like shm-lent-read, without lending: each message is copied once, and then read
    ShmRead,
    /// tonic-rdma over shared memory, with its codec and an application payload at an odd address,
    /// and with received messages in application buffers that the peer has mapped
    ShmKept,
    /// tonic-rdma over shared memory, with tonic's codec
    ShmPlain,
    /// tonic-rdma over shared memory, with the codec of tonic-own
    ShmOwn,
    /// Like shm-plain, through a channel of tonic's type: `Channel::into_tonic`
    ShmTonic,
    /// Like tcp-plain, through a channel of tonic's type
    TcpTonic,
    /// tonic-rdma over RDMA, with its codec
    Verbs,
    /// Like verbs, with an application payload at an odd address, which is registered
    VerbsRegistered,
    /// Like verbs-registered, and received messages land in application buffers that are registered
    /// for each transfer
    VerbsLanded,
    /// Like verbs-landed, with buffers that stay registered
    VerbsKept,
    /// tonic-rdma over RDMA, with tonic's codec
    VerbsPlain,
    /// tonic-rdma over RDMA, with the codec of tonic-own
    VerbsOwn,
    /// Bare SENDs and WRITEs over shared memory
    RawShm,
    /// Bare SENDs and WRITEs over RDMA
    RawVerbs,
    /// A copy within this process, of memory in the cache
    MemcpyHot,
    /// A copy within this process, of memory that is not in the cache
    MemcpyCold,
    /// Like memcpy-cold, with source and destination as far apart as the row says
    MemcpyApart,
    /// Like memcpy-apart, with the transport's own copy function
    Copy,
    /// tonic over rdma-io-tonic: HTTP/2 over RDMA
    RdmaIoTonic,
    /// ruapc, another RPC stack, over RDMA
    Ruapc,
    /// iceoryx2: request and response in shared memory, without gRPC
    Iceoryx2,
}

/// The codec of a contender's stubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StubCodec {
    /// tonic's codec.
    Tonic,
    /// tonic-rdma's codec.
    ZeroCopy,
    /// [`OwnCodec`](crate::own_codec::OwnCodec).
    Own,
}

/// An implementation of another project, which runs in a separate program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// tonic over rdma-io-tonic.
    RdmaIoTonic,
    /// The RPC stack ruapc over RDMA.
    Ruapc,
    /// The message passing library iceoryx2.
    Iceoryx2,
}

/// The kind of memory for payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The best memory for the transport, which is pinned memory if the transport has some.
    Best,
    /// Like `Best`, with a pool that is large enough for messages of any length.
    LongPool,
    /// The heap, at an odd address.
    Heap,
    /// The heap, at an odd address, registered with the device.
    Registered,
}

impl Source {
    /// Whether payloads come from the pool of a connection, if the connection has a pool.
    pub fn is_pool(self) -> bool {
        matches!(self, Self::Best | Self::LongPool)
    }

    /// Maximum length in bytes of a payload from the pool. This is half of the default pool's send
    /// budget, unless the pool is larger.
    pub fn max_pinned(self) -> usize {
        if self == Self::LongPool { 256 << 20 } else { 8 << 20 }
    }

    /// Allocates a payload on the heap.
    pub fn heap(self, fill: u8, length: usize) -> Bytes {
        if self.is_pool() {
            return Bytes::from(vec![fill; length]);
        }
        let all = Bytes::from(vec![fill; length + LINE]);
        let at = (ODD + LINE - all.as_ptr().addr() % LINE) % LINE;
        all.slice(at..at + length)
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;
/// Offset in a cache line of a payload at an odd address.
const ODD: usize = 7;

/// How application buffers that messages land in are registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LandsIn {
    /// The buffers are registered for each transfer.
    Once,
    /// The buffers are registered once for all transfers.
    Kept,
}

/// The copy function and the memory of a contender that copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// The C library copies memory in the cache.
    MemcpyHot,
    /// The C library copies uncached memory. Source and destination begin at the same offset in a
    /// page.
    MemcpyCold,
    /// The C library copies uncached memory at the row's distance (`WorkKind::Phase`).
    MemcpyApart,
    /// The transport copies uncached memory at the row's distance.
    Transport,
}

/// The transport between a contender's two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// tonic's own transport.
    Tonic {
        /// Whether tonic uses a unix socket instead of TCP.
        unix: bool,
    },
    /// tonic-rdma, over this fabric, or over TCP if `None`.
    Ours(Option<FabricKind>),
    /// A bare link over this fabric.
    Raw(FabricKind),
    /// A copy within one process.
    Copy(CopyMethod),
    /// The program in `benches/neighbours`.
    Neighbour(Neighbour),
}

impl Contender {
    /// The transport that carries the contender's calls.
    pub fn transport(self) -> Transport {
        match self {
            Self::TonicTcp | Self::TonicOwn => Transport::Tonic { unix: false },
            Self::TonicUnix => Transport::Tonic { unix: true },
            Self::Tcp | Self::TcpPlain | Self::TcpTonic => Transport::Ours(None),
            Self::Shm
            | Self::ShmHeap
            | Self::ShmLent
            | Self::ShmLentRead
            | Self::ShmRead
            | Self::ShmKept
            | Self::ShmPlain
            | Self::ShmOwn
            | Self::ShmTonic => Transport::Ours(Some(FabricKind::Shm)),
            Self::Verbs
            | Self::VerbsRegistered
            | Self::VerbsLanded
            | Self::VerbsKept
            | Self::VerbsPlain
            | Self::VerbsOwn => Transport::Ours(Some(FabricKind::Verbs)),
            Self::RawShm => Transport::Raw(FabricKind::Shm),
            Self::RawVerbs => Transport::Raw(FabricKind::Verbs),
            Self::MemcpyHot => Transport::Copy(CopyMethod::MemcpyHot),
            Self::MemcpyCold => Transport::Copy(CopyMethod::MemcpyCold),
            Self::MemcpyApart => Transport::Copy(CopyMethod::MemcpyApart),
            Self::Copy => Transport::Copy(CopyMethod::Transport),
            Self::RdmaIoTonic => Transport::Neighbour(Neighbour::RdmaIoTonic),
            Self::Ruapc => Transport::Neighbour(Neighbour::Ruapc),
            Self::Iceoryx2 => Transport::Neighbour(Neighbour::Iceoryx2),
        }
    }

    /// The codec of both ends.
    pub fn codec(self) -> StubCodec {
        match self {
            Self::TonicOwn | Self::ShmOwn | Self::VerbsOwn => StubCodec::Own,
            Self::Tcp
            | Self::Shm
            | Self::ShmHeap
            | Self::ShmLent
            | Self::ShmLentRead
            | Self::ShmRead
            | Self::ShmKept
            | Self::Verbs
            | Self::VerbsRegistered
            | Self::VerbsLanded
            | Self::VerbsKept => StubCodec::ZeroCopy,
            _ => StubCodec::Tonic,
        }
    }

    /// Whether both ends lend what they send.
    pub fn lends(self) -> bool {
        matches!(self, Self::ShmLent | Self::ShmLentRead)
    }

    /// Whether both ends read every byte of what they receive.
    pub fn reads(self) -> bool {
        matches!(self, Self::ShmLentRead | Self::ShmRead)
    }

    /// How the application buffers for long messages are registered. `None` if messages land in the
    /// connection's memory.
    pub fn lands_in(self) -> Option<LandsIn> {
        match self {
            Self::VerbsLanded => Some(LandsIn::Once),
            Self::VerbsKept | Self::ShmKept => Some(LandsIn::Kept),
            _ => None,
        }
    }

    /// Whether the client uses a channel of tonic's type.
    pub fn into_tonic(self) -> bool {
        matches!(self, Self::ShmTonic | Self::TcpTonic)
    }

    /// The memory of the contender's payloads.
    pub fn source(self) -> Source {
        match self {
            Self::ShmHeap => Source::Heap,
            Self::VerbsRegistered | Self::VerbsLanded | Self::VerbsKept | Self::ShmKept => {
                Source::Registered
            }
            Self::ShmLent | Self::ShmLentRead | Self::ShmRead => Source::LongPool,
            _ => Source::Best,
        }
    }

    /// Whether the contender runs in the program in `benches/neighbours`.
    pub fn is_neighbour(self) -> bool {
        matches!(self.transport(), Transport::Neighbour(_))
    }

    /// Whether the contender's results depend on the allocator. Bare links and copies reuse the
    /// same memory.
    pub fn allocates(self) -> bool {
        !matches!(self.transport(), Transport::Raw(_) | Transport::Copy(_))
    }

    /// The name on the command line and in the results.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_lie_where_the_source_says() {
        for length in [0, 1, 4096, 1 << 20] {
            let odd = Source::Heap.heap(7, length);
            assert_eq!((odd.len(), odd.iter().all(|byte| *byte == 7)), (length, true));
            assert!(length == 0 || odd.as_ptr().addr() % LINE == ODD);
            assert_eq!(Source::Best.heap(7, length), odd);
        }
    }
}
