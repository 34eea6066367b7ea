//! To which processes memory is lent.

use std::sync::{Mutex, PoisonError};

use crate::access::Lending;
use crate::shm::same_user::{Process, process, still_lives};
use crate::shm::socket::seqpacket::Socket;

/// The decision for all links of a device.
#[derive(Debug)]
pub(crate) struct Permit {
    lending: Lending,
    /// The one process, once there is one.
    claimed: Mutex<Option<Process>>,
}

impl Permit {
    pub(crate) fn new(lending: Lending) -> Permit {
        Permit { lending, claimed: Mutex::new(None) }
    }

    /// Whether any peer may be lent memory.
    pub(crate) fn is_off(&self) -> bool {
        self.lending == Lending::Off
    }

    /// Whether memory may be lent on to others of this user, by those that it is lent to, and by
    /// this process that of others.
    pub(crate) fn lends_on(&self) -> bool {
        self.lending == Lending::SameUser
    }

    /// Whether the peer of this socket may be lent memory from now on. The first process that asks
    /// is the one of [`Lending::OneProcess`]. `known`: the peer's process, if the handshake has
    /// shown that it could read this one's memory anyway (`same_user`).
    pub(crate) fn allows(&self, socket: &Socket, known: Option<Process>) -> bool {
        match self.lending {
            Lending::Off => false,
            Lending::SameUser => known.is_some_and(still_lives),
            Lending::OneProcess => {
                let known = || known.filter(|known| still_lives(*known));
                process(socket).or_else(known).is_some_and(|process| {
                    let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
                    *claimed.get_or_insert(process) == process
                })
            }
        }
    }
}
