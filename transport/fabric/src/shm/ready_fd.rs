//! A descriptor that a task waits for. While the descriptor is not ready, a poll costs one atomic
//! load.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::task::{Context, Poll};

use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

use crate::wake_gate::WakeGate;

/// A registered descriptor.
#[derive(Debug)]
pub(crate) struct ReadyFd<T: AsRawFd = OwnedFd> {
    fd: AsyncFd<T>,
    gate: WakeGate,
}

impl<T: AsRawFd> ReadyFd<T> {
    #[inline]
    pub(crate) fn new(fd: AsyncFd<T>) -> Self {
        ReadyFd { fd, gate: WakeGate::new() }
    }

    #[inline]
    pub(crate) fn fd(&self) -> &AsyncFd<T> {
        &self.fd
    }

    /// Ready when the descriptor can be read, as far as tokio knows. Otherwise the task is woken
    /// when the descriptor can be read. A caller that finds nothing to read clears the guard and
    /// polls again.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<AsyncFdReadyGuard<'_, T>>> {
        let ReadyFd { fd, gate } = self;
        gate.poll(cx, |cx| fd.poll_read_ready(cx))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    fn pipe() -> (ReadyFd, std::io::PipeWriter) {
        let (end, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&end, rustix::fs::OFlags::NONBLOCK).unwrap();
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register(OwnedFd::from(end)) }.unwrap();
        (ReadyFd::new(fd), writer)
    }

    /// Reads everything available. If nothing is, the task is woken when something arrives.
    fn read(watch: &mut ReadyFd, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = match watch.poll(cx) {
                Poll::Ready(guard) => guard?,
                Poll::Pending => return Poll::Pending,
            };
            let mut bytes = [0; 16];
            if let Ok(read) =
                guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref().as_fd(), &mut bytes)?))
            {
                return Poll::Ready(read);
            }
        }
    }

    #[tokio::test]
    async fn every_write_wakes_whichever_task_waits() {
        let (mut watch, mut writer) = pipe();
        for round in 1..=8 {
            let (done, pending) = tokio::sync::oneshot::channel();
            // Each round has its own task.
            let reader = tokio::spawn(async move {
                let mut done = Some(done);
                let read = poll_fn(|cx| {
                    let read = read(&mut watch, cx);
                    done.take().map(|done| done.send(read.is_pending()));
                    read
                });
                (read.await.unwrap(), watch)
            });
            assert!(pending.await.unwrap(), "nothing is there yet");
            writer.write_all(&[7; 16][..round]).unwrap();
            let (got, back) = reader.await.unwrap();
            assert_eq!(got, round);
            watch = back;
        }
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn what_is_left_is_found_and_a_wake_is_never_taken_for_an_old_one() {
        let (mut watch, mut writer) = pipe();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let cx = &mut Context::from_waker(&waker);
        assert!(read(&mut watch, cx).is_pending());
        writer.write_all(&[7; 40]).unwrap();
        while count.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        for left in [16, 16, 8] {
            assert!(matches!(read(&mut watch, cx), Poll::Ready(Ok(got)) if got == left));
        }
        assert!(read(&mut watch, cx).is_pending());
        assert!(read(&mut watch, cx).is_pending(), "again");
        drop(writer);
        while count.0.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(read(&mut watch, cx), Poll::Ready(Ok(0))));
    }
}
