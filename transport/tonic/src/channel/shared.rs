//! What the clones of a channel, its calls and its manager share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::channel::attempt::Fast;
use crate::codec::Methods;
use crate::connection::Origin;
use crate::path::PathInfo;
use crate::path::policy::EnvError;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// State of a channel's fast path.
///
/// | state | on | next |
/// |---|---|---|
/// | Idle | first call, or `connect` | Trying |
/// | Trying | fast path up | Up |
/// | Trying | attempt failed, or is later than `connect` waits | Down |
/// | Up | link lost, or the peer takes no new calls | Down |
/// | Down | pause over | Trying, keeping the reason |
/// | Down | a late attempt succeeded | Up |
///
/// A channel whose policy is off, or whose environment is bad, stays Down.
#[derive(Debug, Clone)]
pub(crate) enum State {
    Idle,
    Trying { since: Reason },
    Up(Fast),
    Down(Reason),
}

impl State {
    pub(crate) fn is_decided(&self) -> bool {
        matches!(self, State::Up(_) | State::Down(_))
    }

    pub(crate) fn info(&self) -> PathInfo {
        match self {
            State::Idle => {
                PathInfo::tcp(Reason::new(ReasonCode::Pending, "no call has been made yet"))
            }
            State::Trying { since: reason } | State::Down(reason) => PathInfo::tcp(reason.clone()),
            State::Up(fast) => PathInfo::fast(fast.client.peer()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) tcp: tonic::transport::Channel,
    pub(crate) state: watch::Sender<State>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) methods: Arc<Methods>,
    /// Calls go over the fast path or fail.
    pub(crate) required: bool,
    /// A call without a fast path that is required waits this long for one.
    pub(crate) patience: Duration,
    /// Makes every call fail.
    pub(crate) broken: Option<EnvError>,
    /// Of calls on the fast path; on TCP tonic sets it.
    pub(crate) origin: Arc<Origin>,
    begun: AtomicBool,
    /// The first call has come.
    pub(crate) begin: Notify,
    /// A call found the fast path closed to new calls.
    pub(crate) stale: Notify,
    /// The manager waits for a sign of life of a server that it could not reach.
    watching: AtomicBool,
    /// A call over TCP has been answered meanwhile.
    alive: Notify,
}

/// Where the next call goes.
pub(crate) enum Route {
    Fast(Fast),
    Tcp,
    /// Nowhere yet: the fast path is required.
    Wait,
}

impl Shared {
    /// Of another connection of the channel. Its calls go elsewhere when it is not up, so it is
    /// never required.
    pub(crate) fn lane(&self) -> Self {
        let Self { tcp, counters, patience, origin, .. } = self;
        Self {
            methods: self.methods.clone(),
            ..Self::new(
                tcp.clone(),
                counters.clone(),
                State::Idle,
                false,
                *patience,
                None,
                origin.clone(),
            )
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one call site; each is a different thing")]
    pub(crate) fn new(
        tcp: tonic::transport::Channel,
        counters: Arc<Counters>,
        state: State,
        required: bool,
        patience: Duration,
        broken: Option<EnvError>,
        origin: Arc<Origin>,
    ) -> Self {
        Self {
            tcp,
            state: watch::Sender::new(state),
            counters,
            methods: Arc::default(),
            required,
            patience,
            broken,
            origin,
            begun: AtomicBool::new(false),
            begin: Notify::new(),
            stale: Notify::new(),
            watching: AtomicBool::new(false),
            alive: Notify::new(),
        }
    }

    /// Lets the manager begin; a channel made lazily begins with its first call.
    pub(crate) fn begin(&self) {
        if !self.begun.load(Ordering::Relaxed) && !self.begun.swap(true, Ordering::Relaxed) {
            self.begin.notify_one();
        }
    }

    /// A call over TCP has been answered.
    pub(crate) fn saw_answer(&self) {
        if self.watching.load(Ordering::Relaxed) && self.watching.swap(false, Ordering::Relaxed) {
            self.alive.notify_one();
        }
    }

    /// Waits for a call over TCP to be answered. Cancel safe.
    pub(crate) async fn answered(&self) {
        self.watching.store(true, Ordering::Relaxed);
        self.alive.notified().await;
    }

    /// Whether the next call should hold a place in the TCP connection's queue.
    pub(crate) fn needs_tcp(&self) -> bool {
        !self.required && !matches!(&*self.state.borrow(), State::Up(_))
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
        let State::Up(fast) = &*self.state.borrow() else { return None };
        let open = fast.client.is_open();
        if !open {
            self.stale.notify_one();
        }
        open.then(|| fast.clone())
    }

    /// Waits for a fast path that takes calls, for as long as a call that needs one does; not at
    /// all where somebody has to mend something first.
    pub(crate) async fn usable(&self) -> Result<Fast, Reason> {
        let mut state = self.state.subscribe();
        let decided = |state: &State| match state {
            State::Up(fast) => fast.client.is_open(),
            State::Down(reason) => !reason.code().mends_itself(),
            State::Idle | State::Trying { .. } => false,
        };
        let decided = tokio::time::timeout(self.patience, state.wait_for(decided)).await;
        match decided.as_ref().map(|state| state.as_deref()) {
            Ok(Ok(State::Up(fast))) => return Ok(fast.clone()),
            Ok(Ok(State::Down(reason))) => return Err(reason.clone()),
            Ok(_) => return Err(Reason::new(ReasonCode::LinkLost, "the channel is gone")),
            Err(_) => {}
        }
        let after = format!("no fast path after {} ms", self.patience.as_millis());
        Err(match &*self.state.borrow() {
            State::Trying { since: reason } | State::Down(reason)
                if reason.code() != ReasonCode::Pending =>
            {
                reason.clone().and(&after)
            }
            _ => Reason::new(ReasonCode::HandshakeTimeout, after),
        })
    }

    /// Waits until it is decided whether there is a fast path, for `limit` at most.
    pub(crate) async fn decided(&self, limit: Duration) -> Result<Fast, Reason> {
        let mut state = self.state.subscribe();
        let decided = tokio::time::timeout(limit, state.wait_for(State::is_decided)).await;
        match decided.as_ref().map(|state| state.as_deref()) {
            Ok(Ok(State::Up(fast))) => Ok(fast.clone()),
            Ok(Ok(State::Down(reason))) => Err(reason.clone()),
            Ok(_) => Err(Reason::new(ReasonCode::LinkLost, "the channel is gone")),
            Err(_) => Err(Reason::new(
                ReasonCode::HandshakeTimeout,
                format!("no fast path after {} ms", limit.as_millis()),
            )),
        }
    }
}
