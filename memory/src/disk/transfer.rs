//! The result of a read or write, which can be awaited or waited for.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::{fmt, io};

/// A read or write in flight. It resolves to the number of bytes and to the memory, which belongs
/// to its owner again.
///
/// # Cancel safety
/// The memory belongs to the work (R10). If the transfer is dropped, the work continues, and the
/// memory is dropped when the kernel is done with it.
#[must_use = "the bytes are not transferred before it has resolved"]
pub struct Transfer<T>(Arc<Mutex<TransferState<T>>>);

enum TransferState<T> {
    /// The kernel is not done. The waker wakes the task that waits, if any.
    InFlight(Option<Waker>),
    Done(io::Result<usize>, T),
    /// The result has been taken.
    Taken,
}

/// The side of a transfer that completes it.
pub(super) struct Completer<T>(Arc<Mutex<TransferState<T>>>);

pub(super) fn transfer<T>() -> (Completer<T>, Transfer<T>) {
    let state = Arc::new(Mutex::new(TransferState::InFlight(None)));
    (Completer(state.clone()), Transfer(state))
}

fn lock<T>(state: &Mutex<TransferState<T>>) -> MutexGuard<'_, TransferState<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Completer<T> {
    pub(super) fn complete(self, result: io::Result<usize>, memory: T) {
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
    /// If it is polled after it has resolved.
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
