//! Keeps leases of links that have ended until their readers are done.
//!
//! | the thread | on | then |
//! |---|---|---|
//! | does not run | leases are to be kept | starts, and waits |
//! | waits | a pipe no longer has a writing end | ends the leases of that pipe |
//! | waits | more leases are to be kept | also waits for the pipe of those leases |
//! | has no leases | | ends |

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use slab::Slab;
use tonic_rdma_memory::{LendableBytes, PerProcess, throttled};

/// Bytes of the thread's stack.
const STACK_SIZE: usize = 128 << 10;

/// The leases of one link, and the pipe whose end shows that the reader is done.
type Kept = (PipeReader, Slab<LendableBytes>);

#[derive(Debug, Default)]
struct Keeper {
    /// Leases that the thread has not taken yet.
    added: Vec<Kept>,
    /// The pipe that wakes the thread. `None` until a thread runs.
    thread: Option<PipeWriter>,
}

static KEEPER: PerProcess<Mutex<Keeper>> = PerProcess::new(Mutex::default);

fn keeper() -> MutexGuard<'static, Keeper> {
    KEEPER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps leases until no process has the writing end of the pipe.
pub(super) fn keep(reader: PipeReader, leases: Slab<LendableBytes>) {
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
