//! State that a channel's clones, calls and manager share.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tonic_rdma_memory::Pool;

use crate::connection::{FastClient, Origin};
use crate::path::PathInfo;
use crate::path::policy::EnvError;
use crate::path::reason::{Reason, ReasonCode};
use crate::tcp::TcpClient;
use crate::telemetry::metrics::Durations;
use crate::telemetry::stats::Counters;

/// An established fast path.
#[derive(Debug, Clone)]
pub(crate) struct Fast {
    pub(crate) client: FastClient,
    pub(crate) pool: Pool,
}

/// State of a channel's fast path.
///
/// | state | on | next |
/// |---|---|---|
/// | Idle | [`Start`] | Trying |
/// | Trying | fast path up | Up |
/// | Trying | the attempt failed, or takes longer than `connect` waits | Down |
/// | Up | the connection is lost, takes no new calls or cannot reach its peer for now, and no other rail replaces it | Down |
/// | Down | the pause is over | Trying, keeping the reason |
/// | Down | a late attempt succeeded | Up |
///
/// A channel whose policy is off, or whose environment is invalid, stays Down.
#[derive(Debug, Clone)]
pub(crate) enum FastPathState {
    Idle,
    Trying { since: Reason },
    Up(Fast),
    Down(Reason),
}

impl FastPathState {
    pub(crate) fn is_decided(&self) -> bool {
        matches!(self, FastPathState::Up(_) | FastPathState::Down(_))
    }

    pub(crate) fn info(&self) -> PathInfo {
        match self {
            FastPathState::Idle => {
                PathInfo::tcp(Reason::new(ReasonCode::Pending, "no second call has been made yet"))
            }
            FastPathState::Trying { since: reason } | FastPathState::Down(reason) => {
                PathInfo::tcp(reason.clone())
            }
            FastPathState::Up(fast) => PathInfo::fast(fast.client.peer()),
        }
    }
}

/// State of a channel, or of one of its connections over further rails.
#[derive(Debug)]
pub(crate) struct ChannelState {
    pub(crate) tcp: Arc<TcpClient>,
    pub(crate) state: watch::Sender<FastPathState>,
    pub(crate) counters: Arc<Counters>,
    /// Measures calls for the metrics recorder.
    pub(crate) durations: Durations,
    /// Whether calls must take the fast path, and otherwise fail.
    pub(crate) required: bool,
    /// How long `connect`, or a call that requires the fast path, waits for the fast path.
    pub(crate) fast_path_timeout: Duration,
    /// An environment variable with a bad value, if any. With a bad value, every call fails.
    pub(crate) bad_env: Option<EnvError>,
    /// Scheme, authority and user agent of calls on the fast path. On TCP, tonic sets these fields.
    pub(crate) origin: Arc<Origin>,
    pub(crate) start: Start,
    /// Notified when a call finds that the fast path takes no new calls, and when the connection is
    /// handed over.
    pub(crate) stale: Notify,
}

/// The destination of the next call.
pub(crate) enum Route {
    Fast(Fast),
    Tcp,
    /// No destination yet, because the fast path is required and not up.
    Wait,
}

impl ChannelState {
    pub(crate) fn new(
        tcp: TcpClient,
        state: FastPathState,
        required: bool,
        fast_path_timeout: Duration,
        bad_env: Option<EnvError>,
        origin: Arc<Origin>,
        durations: Durations,
    ) -> Self {
        Self {
            counters: tcp.counters.clone(),
            durations,
            tcp: Arc::new(tcp),
            state: watch::Sender::new(state),
            required,
            fast_path_timeout,
            bad_env,
            origin,
            start: Start::default(),
            stale: Notify::new(),
        }
    }

    /// Returns the state of another connection of the channel. The other connection never requires
    /// the fast path, because calls take the first connection until the other connection is up.
    pub(crate) fn further(&self) -> Self {
        let TcpClient { channel, counters, methods, .. } = &*self.tcp;
        let tcp = TcpClient::new(channel.clone(), counters.clone(), methods.clone());
        Self::new(
            tcp,
            FastPathState::Idle,
            false,
            self.fast_path_timeout,
            None,
            self.origin.clone(),
            self.durations.clone(),
        )
    }

    /// The fast path, whether or not it takes calls.
    pub(crate) fn established(&self) -> Option<Fast> {
        match &*self.state.borrow() {
            FastPathState::Up(fast) => Some(fast.clone()),
            FastPathState::Idle | FastPathState::Trying { .. } | FastPathState::Down(_) => None,
        }
    }

    /// Whether the fast path takes calls.
    pub(crate) fn is_up(&self) -> bool {
        matches!(&*self.state.borrow(), FastPathState::Up(fast) if fast.client.is_open())
    }

    /// Takes the established fast path from this connection, to make it the channel's first
    /// connection, and notifies this connection's manager. Returns `None` if this connection takes
    /// no calls.
    pub(crate) fn hand_over(&self) -> Option<Fast> {
        let mut taken = None;
        self.state.send_if_modified(|state| {
            let FastPathState::Up(fast) = state else { return false };
            if !fast.client.is_open() {
                return false;
            }
            taken = Some(fast.clone());
            *state = FastPathState::Down(Self::handed_over());
            true
        });
        if taken.is_some() {
            self.stale.notify_one();
        }
        taken
    }

    fn handed_over() -> Reason {
        Reason::new(ReasonCode::Pending, "it has become the channel's first connection")
    }

    /// Why this connection was handed over. `None` if this connection was not handed over.
    pub(crate) fn is_handed_over(&self) -> Option<Reason> {
        (!matches!(&*self.state.borrow(), FastPathState::Up(_))).then(Self::handed_over)
    }

    /// Records a call. If calls require the fast path, the channel begins to set up the fast path
    /// at once.
    pub(crate) fn called(&self) {
        if self.required { self.start.begin() } else { self.start.call() }
    }

    /// Whether the next call should hold a place in the TCP connection's queue.
    pub(crate) fn needs_tcp(&self) -> bool {
        !self.required && !matches!(&*self.state.borrow(), FastPathState::Up(_))
    }

    pub(crate) fn route(&self) -> Route {
        match self.fast() {
            Some(fast) => Route::Fast(fast),
            None if self.required => Route::Wait,
            None => Route::Tcp,
        }
    }

    /// The fast path, if it is up and takes calls.
    pub(crate) fn fast(&self) -> Option<Fast> {
        let FastPathState::Up(fast) = &*self.state.borrow() else { return None };
        let open = fast.client.is_open();
        if !open {
            self.stale.notify_one();
        }
        open.then(|| fast.clone())
    }

    /// Waits for a fast path that takes calls, up to the channel's time limit. Returns at once if
    /// an operator has to fix the cause.
    ///
    /// Cancel safe.
    pub(crate) async fn usable(&self) -> Result<Fast, Reason> {
        let mut state = self.state.subscribe();
        let decided = |state: &FastPathState| match state {
            FastPathState::Up(fast) => fast.client.is_open(),
            FastPathState::Down(reason) => !reason.code().is_transient(),
            FastPathState::Idle | FastPathState::Trying { .. } => false,
        };
        let decided = tokio::time::timeout(self.fast_path_timeout, state.wait_for(decided)).await;
        match decided.as_ref().map(|state| state.as_deref()) {
            Ok(Ok(FastPathState::Up(fast))) => return Ok(fast.clone()),
            Ok(Ok(FastPathState::Down(reason))) => return Err(reason.clone()),
            Ok(_) => return Err(Reason::new(ReasonCode::LinkLost, "the channel is gone")),
            Err(_) => {}
        }
        let after = format!("no fast path after {} ms", self.fast_path_timeout.as_millis());
        Err(match &*self.state.borrow() {
            FastPathState::Trying { since: reason } | FastPathState::Down(reason)
                if reason.code() != ReasonCode::Pending =>
            {
                reason.clone().and(&after)
            }
            _ => Reason::new(ReasonCode::HandshakeTimeout, after),
        })
    }

    /// Waits at most `limit` until the path is decided.
    ///
    /// Cancel safe.
    pub(crate) async fn decided(&self, limit: Duration) -> Result<Fast, Reason> {
        let mut state = self.state.subscribe();
        let decided = tokio::time::timeout(limit, state.wait_for(FastPathState::is_decided)).await;
        match decided.as_ref().map(|state| state.as_deref()) {
            Ok(Ok(FastPathState::Up(fast))) => Ok(fast.clone()),
            Ok(Ok(FastPathState::Down(reason))) => Err(reason.clone()),
            Ok(_) => Err(Reason::new(ReasonCode::LinkLost, "the channel is gone")),
            Err(_) => Err(Reason::new(
                ReasonCode::HandshakeTimeout,
                format!("no fast path after {} ms", limit.as_millis()),
            )),
        }
    }
}

/// A lazy channel that still exists this long after its first call counts as long-lived. A program
/// that connects for each call has usually closed its channel by then. The time was chosen, not
/// measured.
const LIVES_ON: Duration = Duration::from_millis(20);

const AT_REST: u8 = 0;
const CALLED: u8 = 1;
const BEGUN: u8 = 2;

/// Tells the manager of a channel when to begin to set up the fast path.
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
    /// Makes the manager begin now.
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

    /// Waits until the manager is to begin.
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

    /// Returns to the state at rest, and waits until the manager is to begin again.
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
