//! Who is compared.

use clap::ValueEnum;
use std::fmt;
use tonic_rdma::FabricKind;

/// What carries the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Contender {
    /// tonic over TCP
    TonicTcp,
    /// tonic over a unix socket
    TonicUnix,
    /// tonic-rdma over TCP
    Tcp,
    /// tonic-rdma over shared memory
    Shm,
    /// tonic-rdma over RDMA
    Verbs,
}

/// How a contender's two processes find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// tonic's own transport.
    Tonic {
        /// By a unix socket, not by TCP.
        unix: bool,
    },
    /// tonic-rdma, over this fabric or over TCP.
    Ours(Option<FabricKind>),
}

impl Contender {
    /// How it is set up.
    pub fn way(self) -> Way {
        match self {
            Self::TonicTcp => Way::Tonic { unix: false },
            Self::TonicUnix => Way::Tonic { unix: true },
            Self::Tcp => Way::Ours(None),
            Self::Shm => Way::Ours(Some(FabricKind::Shm)),
            Self::Verbs => Way::Ours(Some(FabricKind::Verbs)),
        }
    }

    /// The name that it has on the command line and in the results.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}
