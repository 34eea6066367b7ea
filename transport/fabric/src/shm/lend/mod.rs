//! Lending: the peer reads messages in the sender's memory.
//!
//! Send memory that may be lent lies in separate files (memfd), whose size and pages are fixed, and
//! to which only their maker can write. A link offers such a file to its peer when the link first
//! wants to lend bytes in the file:
//!
//! | the file is | on | next |
//! |---|---|---|
//! | unknown to the peer | bytes in it are to be lent | offered: LEND, with the descriptor; the message waits |
//! | offered | TAKEN: the peer has mapped it, read-only | taken: bytes in it are lent |
//! | offered | DECLINED: the peer cannot map it | declined: bytes in it are copied |
//! | any of these | its arena is freed, so nothing in it is lent | unknown: UNLEND, and the peer unmaps it |
//!
//! A lease keeps its bytes until it is returned. If the connection ends before that, the reader may
//! still read the bytes. So the first LEND also passes the writing end of a pipe. Each mapping at
//! the reader keeps the pipe open while slices of the mapping exist. A thread keeps the leases
//! until the kernel reports that the pipe has no writing end. At that time the last slice has been
//! dropped, or the process has ended.
//!
//! Lent bytes may be lent on, once, to processes that `same_user` confirms. The programs of both
//! the owner and the process in between must allow this (`Lending::SameUserOnward`), because the
//! last reader maps whole files and so sees everything that the owner lends to the process in
//! between. That process registers the file with its pool as a peer's memory, and passes on the
//! file together with the owner's pipe:
//!
//! | ends first | who keeps the memory |
//! |---|---|
//! | the reader | the process in between returns its lease, and the owner has the memory back |
//! | the process in between, or its connection to the owner | the owner, until the reader's mapping, which has the owner's pipe, is gone |
//! | the owner | the mappings, which keep the file |
//!
//! | module | what |
//! |---|---|
//! | `lender` | the leases of a link, and the files that its peer has mapped |
//! | `borrower` | the memory that a link's peer has lent |
//!
//! A thread keeps the leases of links that have ended:
//!
//! | the thread | on | then |
//! |---|---|---|
//! | does not run | leases are to be kept | starts, and waits |
//! | waits | a pipe no longer has a writing end | ends the leases of that pipe |
//! | waits | more leases are to be kept | also waits for the pipe of those leases |
//! | has no leases | | ends |

pub(super) mod borrower;
pub(super) mod lender;

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use slab::Slab;
use tonic_rdma_memory::{LendScope, LendableBytes, PerProcess, throttled};

use crate::access::{HostProcess, Lending};
use crate::shm::same_user::{process, still_lives};
use crate::shm::socket::Socket;

/// Maximum number of descriptors that this process keeps for peers that lend: a quarter of the
/// usual limit on open files (1,024). Beyond this number, this process lends no further memory on,
/// and declines memory that peers lend on.
const MAX_KEPT: usize = 256;

/// The size of the thread's stack in bytes.
const STACK_SIZE: usize = 128 << 10;

/// The leases of one link, and the pipe whose writing end is closed when the reader is done.
type Kept = (PipeReader, Slab<LendableBytes>);

#[derive(Debug, Default)]
struct Keeper {
    /// Leases that the thread has not taken yet.
    added: Vec<Kept>,
    /// The pipe that wakes the thread. `None` while no thread runs.
    thread: Option<PipeWriter>,
}

static KEEPER: PerProcess<Mutex<Keeper>> = PerProcess::new(Mutex::default);

fn keeper() -> MutexGuard<'static, Keeper> {
    KEEPER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps leases until no process has the writing end of the pipe.
fn keep(reader: PipeReader, leases: Slab<LendableBytes>) {
    let mut keeper = keeper();
    let is_told = !keeper.added.is_empty();
    keeper.added.push((reader, leases));
    if let Some(mut thread) = keeper.thread.as_ref() {
        // The pipe never holds more than one byte, because the thread reads the byte before it
        // takes the added leases. So the pipe is never full.
        if !is_told && let Err(error) = thread.write_all(&[0]) {
            throttled!(error, %error, "the thread that keeps lent memory is not woken");
        }
        return;
    }
    let started = pipe().and_then(|(woken, waker)| {
        let builder = thread::Builder::new().name("tonic-rdma-lent".to_owned());
        builder.stack_size(STACK_SIZE).spawn(move || wait(&woken)).map(|_| waker)
    });
    match started {
        Ok(waker) => keeper.thread = Some(waker),
        // The leases stay in the list, and the next call tries again to start a thread.
        Err(error) => throttled!(warn, %error, "no thread to wait for the readers of lent memory"),
    }
}

fn wait(woken: &PipeReader) {
    let mut kept: Vec<Kept> = Vec::new();
    loop {
        let mut keeper = keeper();
        kept.append(&mut keeper.added);
        if kept.is_empty() {
            keeper.thread = None;
            return;
        }
        drop(keeper);
        let ended = {
            // Nobody writes to the readers' pipes. poll(2) always reports the end of a pipe, even
            // if no events are requested.
            let mut fds: Vec<PollFd<'_>> = std::iter::once(PollFd::new(woken, PollFlags::IN))
                .chain(kept.iter().map(|(reader, _)| PollFd::new(reader, PollFlags::empty())))
                .collect();
            match poll(&mut fds, None) {
                Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
                Err(_) => vec![false; fds.len()],
            }
        };
        if ended.first() == Some(&true) {
            let _ = (&*woken).read(&mut [0]);
        }
        let mut ended = ended.into_iter().skip(1);
        kept.retain(|_| !ended.next().unwrap_or(false));
    }
}

/// Decides for all links of a device which memory may be lent, and to whom.
#[derive(Debug)]
pub(crate) struct Permit {
    lending: Lending,
}

impl Permit {
    pub(crate) fn new(lending: Lending) -> Permit {
        Permit { lending }
    }

    /// The memory that may be lent.
    pub(crate) fn scope(&self) -> LendScope {
        match self.lending {
            Lending::Off => LendScope::Nothing,
            Lending::SameUserRegistered => LendScope::Registered,
            Lending::SameUser | Lending::SameUserOnward | Lending::OneProcess(_) => LendScope::All,
        }
    }

    /// Whether peers may lend on this process's memory, and whether this process may lend on its
    /// peers' memory.
    pub(crate) fn lends_on(&self) -> bool {
        self.lending == Lending::SameUserOnward
    }

    /// Whether the peer of this socket may be lent memory from now on. `known` is the peer's
    /// process, if the handshake has shown that the peer could read this process's memory by other
    /// means (`same_user`).
    pub(crate) fn allows(&self, socket: &Socket, known: Option<HostProcess>) -> bool {
        match self.lending {
            Lending::Off => false,
            Lending::SameUser | Lending::SameUserRegistered | Lending::SameUserOnward => {
                known.is_some_and(still_lives)
            }
            Lending::OneProcess(named) => {
                let known = || known.filter(|known| still_lives(*known));
                process(socket).or_else(known) == Some(named)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_decides_what_is_lent_and_lent_on() {
        let named = HostProcess::by_pid(std::process::id()).unwrap();
        for (lending, scope, lends_on) in [
            (Lending::Off, LendScope::Nothing, false),
            (Lending::SameUser, LendScope::All, false),
            (Lending::SameUserRegistered, LendScope::Registered, false),
            (Lending::SameUserOnward, LendScope::All, true),
            (Lending::OneProcess(named), LendScope::All, false),
        ] {
            let permit = Permit::new(lending);
            assert_eq!((permit.scope(), permit.lends_on()), (scope, lends_on), "{lending:?}");
        }
    }
}
