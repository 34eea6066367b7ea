//! Decides when a channel begins to make its fast path.

use std::future::Future;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// A lazy channel that still exists this long after its first call counts as long-lived. A program
/// that connects for each call has usually closed its channel by then. The time was chosen, not
/// measured.
const LIVES_ON: Duration = Duration::from_millis(20);

const AT_REST: u8 = 0;
const CALLED: u8 = 1;
const BEGUN: u8 = 2;

/// Tells the manager of a channel when to begin.
///
/// | state | on | next |
/// |---|---|---|
/// | at rest | `begin` | begun |
/// | at rest | first call | called |
/// | called | second call, or [`LIVES_ON`] is over | begun |
/// | begun | the manager waits again | at rest |
#[derive(Debug, Default)]
pub(crate) struct Start {
    state: AtomicU8,
    called: Notify,
    begun: Notify,
}

impl Start {
    /// Makes the channel begin now.
    pub(crate) fn begin(&self) {
        if self.state.load(Ordering::Relaxed) != BEGUN
            && self.state.swap(BEGUN, Ordering::Relaxed) != BEGUN
        {
            self.begun.notify_one();
        }
    }

    /// Records a call. The second call begins the fast path.
    pub(crate) fn call(&self) {
        if self.state.load(Ordering::Relaxed) == BEGUN {
            return;
        }
        let state = &self.state;
        match state.compare_exchange(AT_REST, CALLED, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => self.called.notify_one(),
            Err(_) => self.begin(),
        }
    }

    /// Waits until the channel begins.
    ///
    /// Cancel safe.
    pub(crate) async fn wait(&self) {
        let lives_on = async {
            self.called.notified().await;
            tokio::time::sleep(LIVES_ON).await;
            self.state.store(BEGUN, Ordering::Relaxed);
        };
        tokio::select! {
            () = self.begun.notified() => {}
            () = lives_on => {}
        }
    }

    /// Returns to the state at rest, and waits until the channel begins again.
    ///
    /// Cancel safe.
    pub(crate) fn wait_again(&self) -> impl Future<Output = ()> {
        self.state.store(AT_REST, Ordering::Relaxed);
        self.begun.notified()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_call_begins_when_the_channel_lives_on() {
        let (start, begun) = (Start::default(), Instant::now());
        let hour = Duration::from_secs(3600);
        assert!(tokio::time::timeout(hour, start.wait()).await.is_err());
        let called = Instant::now();
        start.call();
        start.wait().await;
        assert_eq!(called.elapsed(), LIVES_ON);
        assert_eq!(begun.elapsed(), hour + LIVES_ON);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_call_begins_at_once() {
        let (start, now) = (Start::default(), Instant::now());
        start.call();
        start.call();
        start.wait().await;
        assert_eq!(now.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_begun_begins_once_until_it_rests() {
        let start = Start::default();
        start.begin();
        start.wait().await;
        start.begin();
        start.call();
        start.call();
        let minute = Duration::from_secs(60);
        let again = start.wait_again();
        assert!(tokio::time::timeout(minute, again).await.is_err(), "nobody has asked since");
        start.begin();
        start.wait_again().await;
    }
}
