//! A descriptor that a task waits for, and that costs a load to ask about while nothing has happened.
//!
//! tokio's readiness is asked for through its own state, with the task's waker handed over each time, and an end of a
//! connection has up to four descriptors that are asked about with every message and hardly ever have anything.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

/// What tokio wakes in the task's place.
#[derive(Debug)]
struct News {
    /// Something may have happened since tokio was last asked.
    rung: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Wake for News {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// A registered descriptor, and who is woken for it.
#[derive(Debug)]
pub(crate) struct Watch<T: std::os::fd::AsRawFd = OwnedFd> {
    fd: AsyncFd<T>,
    news: Arc<News>,
    /// Of `news`.
    waker: Waker,
    /// As in `news`.
    task: Option<Waker>,
}

impl<T: std::os::fd::AsRawFd> Watch<T> {
    pub(crate) fn new(fd: AsyncFd<T>) -> Self {
        let news = Arc::new(News { rung: AtomicBool::new(true), task: Mutex::new(None) });
        Watch { fd, waker: Waker::from(news.clone()), news, task: None }
    }

    pub(crate) fn get_ref(&self) -> &T {
        self.fd.get_ref()
    }

    pub(crate) fn fd(&self) -> &AsyncFd<T> {
        &self.fd
    }

    /// Ready to be read, as far as tokio knows; otherwise the task is woken when it is. Who finds nothing there clears the
    /// guard and asks again.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<AsyncFdReadyGuard<'_, T>>> {
        if self.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            *self.news.task.lock().unwrap_or_else(PoisonError::into_inner) = self.task.clone();
        }
        if !self.news.rung.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // Before tokio is asked: what happens from now on rings again.
        self.news.rung.store(false, Ordering::Relaxed);
        let ready = self.fd.poll_read_ready(&mut Context::from_waker(&self.waker));
        if ready.is_ready() {
            // tokio has no waker now.
            self.news.rung.store(true, Ordering::Relaxed);
        }
        ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::sync::atomic::AtomicUsize;

    fn pipe() -> (Watch, std::io::PipeWriter) {
        let (end, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&end, rustix::fs::OFlags::NONBLOCK).unwrap();
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register(OwnedFd::from(end)) }.unwrap();
        (Watch::new(fd), writer)
    }

    /// All that is there; otherwise the task is woken when there is something.
    fn read(watch: &mut Watch, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = match watch.poll(cx) {
                Poll::Ready(guard) => guard?,
                Poll::Pending => return Poll::Pending,
            };
            let mut bytes = [0; 16];
            if let Ok(read) = guard.try_io(|fd| Ok(rustix::io::read(fd.get_ref().as_fd(), &mut bytes)?)) {
                return Poll::Ready(read);
            }
        }
    }

    #[tokio::test]
    async fn every_write_is_heard_whoever_waits() {
        let (mut watch, mut writer) = pipe();
        for round in 1..=8 {
            let (done, hear) = tokio::sync::oneshot::channel();
            // A task of its own each time.
            let reader = tokio::spawn(async move {
                let mut done = Some(done);
                let read = poll_fn(|cx| {
                    let read = read(&mut watch, cx);
                    done.take().map(|done| done.send(read.is_pending()));
                    read
                });
                (read.await.unwrap(), watch)
            });
            assert!(hear.await.unwrap(), "nothing is there yet");
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
        assert!(read(&mut watch, cx).is_pending(), "and it costs no more than a look");
        drop(writer);
        while count.0.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        assert!(matches!(read(&mut watch, cx), Poll::Ready(Ok(0))));
    }
}
