//! Decides how long an end polls for a message before it sleeps.
//!
//! A sleep costs system calls at both ends, context switches, cold caches and the time until this
//! end runs again. Polling costs processor time. An end that polls for as long as the price of a
//! sleep, and then sleeps, never spends more than twice the cost of the best choice (ski rental:
//! Karlin et al., "Competitive snoopy caching", 1988). The time of a wake-up differs by two orders
//! of magnitude between machines, so this time is measured (`shm::wakeup::wake_cost`,
//! `verbs::wake_cost`). The price of a sleep is [`PRICE`] wake-ups.
//!
//! An end learns from each wait whether polling pays. For this, the end computes how long the wait
//! would have taken if neither end had slept: the length of the wait, less one wake-up if this end
//! slept, and less another wake-up if the peer slept and had to be woken. So two ends that sleep
//! learn that both could poll, without having to try. There are two [`WaitEstimate`]s: one for
//! waits that follow a SEND, and one for waits that follow a received message. So a server that
//! works for a long time before it answers does not poll while it works, but may poll for the next
//! request. A message that concerns only the transport, such as a grant, changes nothing: an end
//! that waited for an answer still waits for that answer.
//!
//! | expected wait | what the end does |
//! |---|---|
//! | no longer than the price of a sleep | polls for that price, and one wake-up longer if the peer had to be woken |
//! | longer | sleeps at once |
//!
//! | state | event | next state |
//! |---|---|---|
//! | Idle | message, or something sent | Ready; Sleeping after a SEND if a long wait is expected |
//! | Ready | queue empty | Polling; Sleeping if a long wait is expected or the budget allows no poll; Idle if the peer shares the processor |
//! | Polling | message | Ready |
//! | Polling | poll time over, or the peer shares the processor now | Sleeping |
//! | Polling, Sleeping | first SEND since a message came | Ready, or Sleeping if a long wait is expected |
//! | Polling, Sleeping | later SEND | unchanged: the wait goes on, and the poll is not extended |
//! | Sleeping | later SEND, after a long wait | as for a first SEND |
//! | Sleeping | message | Ready |
//! | Ready | the message concerned only the transport | as before the message: Idle, or Ready for the same wait |
//!
//! In the long run, unsuccessful polls of all links of a process together take at most 1 /
//! [`DIVISOR`] of one processor. When this budget is used up, an end whose last poll was successful
//! may poll once more. If that poll fails, its time is charged, and the end does not poll until the
//! debt is paid. An end without traffic since it last slept does not poll.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic_rdma_memory::PerProcess;

/// No poll begins if a wake-up takes less than this time, or if the limit of a poll is shorter.
const MIN_COST: Duration = Duration::from_micros(2);
/// Number of checks between two yields to other tasks. At 40 to 140 cycles each, the checks take
/// one or two microseconds.
const SPINS: u32 = 32;
/// The price of a sleep, in wake-ups. With one sleep, a call of 4 KiB took 40 us, and 64 us of
/// processor time at both ends together. Without the sleep, the call took 15 us, and 30 us of
/// processor time. A wake-up took 8 us on that machine (`compare --rows full --only up-4KiB-x1`, an
/// Intel Xeon, family 6 model 207).
const PRICE: u32 = 4;
/// A wait counts as at most this many prices, so that an endless wait is forgotten after five short
/// waits.
const MAX_PRICES: u32 = 4;

/// The clock, and the budget of unsuccessful polls.
pub(crate) trait Machine {
    fn now(&self) -> Instant;
    /// Whether there is budget left for unsuccessful polls.
    fn may_poll(&self, now: Instant) -> bool;
    /// Charges the budget with an unsuccessful poll.
    fn charge(&self, now: Instant, time: Duration);
}

/// The host that this process runs on.
#[derive(Debug, Default)]
pub(crate) struct Host;

impl Machine for Host {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn may_poll(&self, now: Instant) -> bool {
        may_poll(now)
    }

    fn charge(&self, now: Instant, time: Duration) {
        charge(now, time);
    }
}

/// The event after which a wait begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitKind {
    Received,
    Sent,
}

/// The estimate for waits of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct WaitEstimate {
    /// A moving average of how long a wait takes, without the time of wake-ups.
    expected: Duration,
    /// Whether the last poll was successful.
    hit: bool,
}

impl WaitEstimate {
    /// Records a wait that took `took` without the time of wake-ups, which take `cost` each.
    fn learn(&mut self, took: Duration, cost: Duration) {
        let most = cost * PRICE * MAX_PRICES;
        self.expected = self.expected.min(most) * 3 / 4 + took.min(most) / 4;
    }
}

#[derive(Debug, Clone, Copy)]
enum PollState {
    /// Nothing has been sent or received since this end last slept.
    Idle,
    /// A wait begins as soon as the queue is empty.
    Ready(WaitKind),
    Polling {
        kind: WaitKind,
        since: Instant,
        until: Instant,
    },
    Sleeping {
        kind: WaitKind,
        since: Instant,
    },
}

impl PollState {
    /// The kind of the wait that has begun or is about to begin.
    fn kind(self) -> Option<WaitKind> {
        match self {
            PollState::Idle => None,
            PollState::Ready(kind)
            | PollState::Polling { kind, .. }
            | PollState::Sleeping { kind, .. } => Some(kind),
        }
    }
}

/// The next step when the queue is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollStep {
    /// Poll again, after other tasks have run.
    PollAgain,
    /// Sleep until the peer wakes this end.
    Sleep,
}

/// Decides whether one end of a link polls or sleeps.
#[derive(Debug)]
pub(crate) struct BusyPoll<M = Host> {
    /// The longest poll.
    limit: Duration,
    /// The time that a wake-up takes.
    cost: Duration,
    received: WaitEstimate,
    sent: WaitEstimate,
    /// Whether the peer has to be woken before it answers the last SEND.
    peer_sleeps: bool,
    /// Whether `peer_sleeps` is a guess.
    peer_sleeps_is_guess: bool,
    state: PollState,
    /// The kind of the wait that the last message ended or forestalled. `None` if this end was
    /// idle.
    ended: Option<WaitKind>,
    machine: M,
}

impl BusyPoll {
    /// Creates a state that polls for `limit` at most, or never if `limit` is zero. `cost` is the
    /// time of a wake-up, as far as it is known.
    pub(crate) fn new(limit: Duration, cost: Duration) -> BusyPoll {
        BusyPoll::on(Host, limit, cost)
    }
}

impl<M: Machine> BusyPoll<M> {
    fn on(machine: M, limit: Duration, cost: Duration) -> BusyPoll<M> {
        BusyPoll {
            limit,
            cost,
            received: WaitEstimate::default(),
            sent: WaitEstimate::default(),
            peer_sleeps: false,
            peer_sleeps_is_guess: false,
            state: PollState::Idle,
            ended: None,
            machine,
        }
    }

    /// The time that a wake-up takes, as far as it is known.
    #[cfg(feature = "shm")]
    pub(crate) fn cost(&self) -> Duration {
        self.cost
    }

    /// Sets the time that a wake-up takes.
    pub(crate) fn set_cost(&mut self, cost: Duration) {
        self.cost = cost;
    }

    fn estimate(&self, kind: WaitKind) -> &WaitEstimate {
        match kind {
            WaitKind::Received => &self.received,
            WaitKind::Sent => &self.sent,
        }
    }

    fn estimate_mut(&mut self, kind: WaitKind) -> &mut WaitEstimate {
        match kind {
            WaitKind::Received => &mut self.received,
            WaitKind::Sent => &mut self.sent,
        }
    }

    fn learn(&mut self, kind: WaitKind, took: Duration) {
        let cost = self.cost;
        self.estimate_mut(kind).learn(took, cost);
    }

    /// The number of the peer's wake-ups that are part of a wait.
    fn peer_wake_ups(&self, kind: WaitKind) -> u32 {
        u32::from(kind == WaitKind::Sent && self.peer_sleeps)
    }

    /// The length of a poll. `None` means that this end sleeps at once.
    fn poll_length(&self, kind: WaitKind) -> Option<Duration> {
        let poll_length = (self.cost * (PRICE + self.peer_wake_ups(kind))).min(self.limit);
        (self.estimate(kind).expected <= self.cost * PRICE && self.cost.min(self.limit) >= MIN_COST)
            .then_some(poll_length)
    }

    /// Records that this end has sent something that the peer may answer. `woken` says whether the
    /// peer slept and was woken. `None` means that the device does not say. The peer then counts as
    /// sleeping if the last answer took longer than a wake-up.
    pub(crate) fn sent(&mut self, woken: Option<bool>) {
        match self.state {
            PollState::Idle | PollState::Ready(WaitKind::Received) => self.begin_wait(woken),
            PollState::Ready(WaitKind::Sent) | PollState::Polling { kind: WaitKind::Sent, .. } => {
                self.peer_sleeps |= woken == Some(true);
            }
            PollState::Polling { kind: WaitKind::Received, since, until } => {
                // No message came before this end sent.
                self.poll_failed(WaitKind::Received, since, until);
                self.learn(WaitKind::Received, Duration::MAX);
                self.begin_wait(woken);
            }
            PollState::Sleeping { kind: WaitKind::Received, .. } => {
                self.learn(WaitKind::Received, Duration::MAX);
                self.begin_wait(woken);
            }
            PollState::Sleeping { kind: WaitKind::Sent, since } => {
                if self.machine.now().saturating_duration_since(since)
                    > self.cost * PRICE * MAX_PRICES
                {
                    // The earlier SEND needs no answer, or its answer is slow.
                    self.learn(WaitKind::Sent, Duration::MAX);
                    self.begin_wait(woken);
                } else {
                    self.peer_sleeps |= woken == Some(true);
                }
            }
        }
    }

    /// Begins a wait for an answer.
    fn begin_wait(&mut self, woken: Option<bool>) {
        self.peer_sleeps_is_guess = woken.is_none();
        self.peer_sleeps = woken.unwrap_or(self.peer_sleeps);
        self.state = match self.poll_length(WaitKind::Sent) {
            Some(_) => PollState::Ready(WaitKind::Sent),
            None => PollState::Sleeping { kind: WaitKind::Sent, since: self.machine.now() },
        };
    }

    /// The maximum length of a poll that begins now. `None` means that this end sleeps at once.
    /// Calls `now` only if the answer depends on the budget.
    fn allowed_poll(&self, kind: WaitKind, now: impl FnOnce() -> Instant) -> Option<Duration> {
        self.poll_length(kind).filter(|_| self.estimate(kind).hit || self.machine.may_poll(now()))
    }

    /// Whether polling is worthwhile now.
    pub(crate) fn is_ready(&self) -> bool {
        match self.state {
            PollState::Ready(kind) => self.allowed_poll(kind, || self.machine.now()).is_some(),
            PollState::Idle | PollState::Polling { .. } | PollState::Sleeping { .. } => false,
        }
    }

    /// Records a message. Returns whether this end polled for the message.
    pub(crate) fn received(&mut self) -> bool {
        let polled = matches!(self.state, PollState::Polling { .. });
        match self.state {
            PollState::Polling { kind, since, .. } => {
                let took = if self.peer_wake_ups(kind) == 0 {
                    // The wait took at most the price of a sleep. It counts as zero, so that this
                    // end need not read the clock.
                    Duration::ZERO
                } else {
                    let waited = self.machine.now().saturating_duration_since(since);
                    self.peer_sleeps = waited > self.cost;
                    waited.saturating_sub(self.cost)
                };
                self.estimate_mut(kind).hit = true;
                self.learn(kind, took);
            }
            PollState::Sleeping { kind, since } => {
                let waited = self.machine.now().saturating_duration_since(since);
                self.peer_sleeps |=
                    self.peer_sleeps_is_guess && kind == WaitKind::Sent && waited > self.cost * 2;
                let wake_ups = self.cost * (1 + self.peer_wake_ups(kind));
                self.learn(kind, waited.saturating_sub(wake_ups));
            }
            PollState::Idle | PollState::Ready(_) => {}
        }
        self.ended = self.state.kind();
        self.state = PollState::Ready(WaitKind::Received);
        polled
    }

    /// Continues the wait that the last message ended, because the message concerned only the
    /// transport.
    pub(crate) fn wait_goes_on(&mut self) {
        if let PollState::Ready(WaitKind::Received) = self.state {
            self.state = self.ended.map_or(PollState::Idle, PollState::Ready);
        }
    }

    /// Decides what to do when the queue is empty. `on_other_processor` says whether the peer runs
    /// on another processor. An end that polls calls `has_work` for one or two microseconds, or
    /// until it returns true.
    pub(crate) fn on_empty(
        &mut self,
        on_other_processor: bool,
        has_work: impl Fn() -> bool,
    ) -> PollStep {
        let (kind, since, until) = match self.state {
            PollState::Idle | PollState::Sleeping { .. } => return PollStep::Sleep,
            // A wait for a peer on the same processor does not show whether polling pays.
            PollState::Ready(_) if !on_other_processor => {
                self.state = PollState::Idle;
                return PollStep::Sleep;
            }
            PollState::Ready(kind) => {
                let now = self.machine.now();
                match self.allowed_poll(kind, || now) {
                    Some(poll_length) => (kind, now, now + poll_length),
                    None => {
                        self.state = PollState::Sleeping { kind, since: now };
                        return PollStep::Sleep;
                    }
                }
            }
            PollState::Polling { kind, since, until } => (kind, since, until),
        };
        self.state = PollState::Polling { kind, since, until };
        for _ in 0..SPINS {
            if has_work() {
                return PollStep::PollAgain;
            }
            std::hint::spin_loop();
        }
        if self.machine.now() < until && on_other_processor {
            return PollStep::PollAgain;
        }
        self.poll_failed(kind, since, until);
        // The wait began with the poll.
        self.state = PollState::Sleeping { kind, since };
        PollStep::Sleep
    }

    /// Records a poll that has ended without success.
    fn poll_failed(&mut self, kind: WaitKind, since: Instant, until: Instant) {
        let now = self.machine.now();
        // Other tasks spent the time after the end of the poll.
        self.machine.charge(now, now.min(until).saturating_duration_since(since));
        self.estimate_mut(kind).hit = false;
    }
}

/// Unsuccessful polls may take `1 / DIVISOR` of the time of one processor.
const DIVISOR: u32 = 8;
/// Time for unsuccessful polls that is available at first, and after a pause.
const BURST: Duration = Duration::from_millis(2);

static START: PerProcess<Instant> = PerProcess::new(Instant::now);
static SPENT: PerProcess<Budget> = PerProcess::new(|| Budget(AtomicU64::new(0)));

/// Whether there is budget left.
fn may_poll(now: Instant) -> bool {
    SPENT.is_left(since_start(now))
}

/// Charges an unsuccessful poll that took this time.
fn charge(now: Instant, time: Duration) {
    SPENT.take(since_start(now), time);
}

fn since_start(now: Instant) -> u64 {
    nanos(now.saturating_duration_since(*START))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The time until which the budget is used up, in nanoseconds since the start.
#[derive(Debug, Default)]
struct Budget(AtomicU64);

impl Budget {
    fn is_left(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now.saturating_add(nanos(BURST * DIVISOR))
    }

    fn take(&self, now: u64, time: Duration) {
        // An end whose last poll was successful may go into debt, by one poll for each kind of
        // wait. It begins no other poll before the debt is paid.
        let add = |used: u64| Some(used.max(now).saturating_add(nanos(time * DIVISOR)));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}
