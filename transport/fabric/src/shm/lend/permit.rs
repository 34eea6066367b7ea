//! Decides to which processes memory is lent.

use crate::access::{HostProcess, Lending};
use crate::shm::same_user::{process, still_lives};
use crate::shm::socket::seqpacket::Socket;

/// The decision for all links of a device.
#[derive(Debug)]
pub(crate) struct Permit {
    lending: Lending,
}

impl Permit {
    pub(crate) fn new(lending: Lending) -> Permit {
        Permit { lending }
    }

    /// Whether any peer may be lent memory.
    pub(crate) fn is_off(&self) -> bool {
        self.lending == Lending::Off
    }

    /// Whether peers may lend on this process's memory, and whether this process may lend on its
    /// peers' memory.
    pub(crate) fn lends_on(&self) -> bool {
        self.lending == Lending::SameUserOnward
    }

    /// Whether the peer of this socket may be lent memory from now on. `known` is the peer's
    /// process, if the handshake has shown that it could in any case read this process's memory
    /// (`same_user`).
    pub(crate) fn allows(&self, socket: &Socket, known: Option<HostProcess>) -> bool {
        match self.lending {
            Lending::Off => false,
            Lending::SameUser | Lending::SameUserOnward => known.is_some_and(still_lives),
            Lending::OneProcess(named) => {
                let known = || known.filter(|known| still_lives(*known));
                process(socket).or_else(known) == Some(named)
            }
        }
    }
}
