//! Transfers between files and pool memory through io_uring(7), with O_DIRECT if the file was
//! opened with it. With O_DIRECT the disk accesses the same memory as the RDMA device, without a
//! copy by the processor.
//!
//! | state of a piece of work | its memory belongs to | becomes |
//! |---|---|---|
//! | queued: the ring is full | the work | posted, when other work ends |
//! | posted | the work; the kernel reads or writes it (R10) | posted again after EINTR and EAGAIN; done |
//! | done | whoever holds the [`Transfer`]; nobody if that has been dropped | |
//!
//! | module | what |
//! |---|---|
//! | `ring` | [`Ring`]: posting, and the thread that takes completions |
//! | `fixed` | arenas that are also registered with the ring |
//! | `unsupported` | the [`Ring`] of other systems, which cannot be made |

#![cfg_attr(not(target_os = "linux"), allow(dead_code))]

#[cfg(target_os = "linux")]
pub(crate) mod fixed;
#[cfg(target_os = "linux")]
mod ring;
#[cfg(not(target_os = "linux"))]
mod unsupported;

#[cfg(target_os = "linux")]
pub use ring::Ring;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Ring;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::{fmt, io};

/// A read or write in flight. The future resolves to the number of bytes and to the memory, which
/// the caller then owns again.
///
/// # Cancel safety
/// The memory belongs to the work (R10). If the transfer is dropped, the work continues, and the
/// memory is dropped when the kernel is done with it.
#[must_use = "the bytes are not transferred before it has resolved"]
pub struct Transfer<T>(Arc<Mutex<TransferState<T>>>);

enum TransferState<T> {
    /// The kernel is not done. The waker, if any, wakes the task that waits for the transfer.
    InFlight(Option<Waker>),
    Done(io::Result<usize>, T),
    /// The result has been taken.
    Taken,
}

/// Completes a transfer.
struct Completer<T>(Arc<Mutex<TransferState<T>>>);

fn transfer<T>() -> (Completer<T>, Transfer<T>) {
    let state = Arc::new(Mutex::new(TransferState::InFlight(None)));
    (Completer(state.clone()), Transfer(state))
}

fn lock<T>(state: &Mutex<TransferState<T>>) -> MutexGuard<'_, TransferState<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Completer<T> {
    fn complete(self, result: io::Result<usize>, memory: T) {
        let before = std::mem::replace(&mut *lock(&self.0), TransferState::Done(result, memory));
        if let TransferState::InFlight(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Transfer<T> {
    /// Blocks this thread until the kernel is done.
    pub fn wait(mut self) -> (io::Result<usize>, T) {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match Pin::new(&mut self).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(done) => return done,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl<T> Future for Transfer<T> {
    type Output = (io::Result<usize>, T);

    /// # Panics
    /// If the transfer is polled after it has resolved.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.0);
        match std::mem::replace(&mut *state, TransferState::Taken) {
            TransferState::Done(result, memory) => Poll::Ready((result, memory)),
            TransferState::InFlight(_) => {
                *state = TransferState::InFlight(Some(cx.waker().clone()));
                Poll::Pending
            }
            TransferState::Taken => panic!("a transfer was polled after it had resolved"),
        }
    }
}

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").finish_non_exhaustive()
    }
}
