//! How long an end polls for a message before it sleeps.
//!
//! A sleep costs system calls at both ends, a context switch and the time until this end runs
//! again; polling costs the processor. An end that polls for as long as a sleep and its wake-up
//! take, and then sleeps, never spends more than twice what the best choice would have (ski rental:
//! Karlin et al., "Competitive snoopy caching", 1988). What a wake-up takes differs by two orders
//! of magnitude between machines, so it is measured (`shm::wake_cost`, `verbs::wake_cost`).
//!
//! Whether polling pays is learnt from what each wait would have taken had neither end slept: its
//! length, less one wake-up if this end slept and another if the peer did and had to be rung. So
//! two ends that sleep find out that both could poll, and neither has to try. Waits behind
//! something that was sent and waits behind something that came have a [`Habit`] each: a server
//! that works for long before it answers does not poll meanwhile, and yet may poll for the next
//! request.
//!
//! | habit | a wait is expected to take | the end |
//! |---|---|---|
//! | polls | no longer than a wake-up | polls for one wake-up, for two if the peer had to be rung |
//! | sleeps | longer | sleeps at once |
//!
//! | state | on | next |
//! |---|---|---|
//! | Idle | message, or something sent | Fresh; Sleeping when something was sent and the habit is to |
//! | Fresh | nothing there | Polling; Sleeping when the habit is to; Idle when the peer runs on this processor |
//! | Polling | message | Fresh |
//! | Polling | its time is over, or the peer runs on this processor now | Sleeping |
//! | Polling, Sleeping | something sent, the first since a message came | Fresh, or Sleeping when the habit is to |
//! | Polling, Sleeping | something sent, not the first | the same: the wait goes on, and the poll is not prolonged |
//! | Sleeping | something sent, not the first, and the wait is long already | as the first |
//! | Sleeping | message | Fresh |
//!
//! Polls in vain of all links of a process together take at most a [`SHARE`](share::SHARE)th of one
//! processor, in the long run. When it is used up, an end whose last poll found something may poll
//! once more. If that is in vain, it is charged, and the end polls no more until the debt is paid.
//! An end without traffic since it last slept does not poll.

mod share;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

/// Where a wake-up takes less, or no poll may take as much, none begins.
const MIN_COST: Duration = Duration::from_micros(2);
/// Looks between two yields to other tasks: a microsecond or two, at 40 to 140 cycles a pause.
const PAUSES: u32 = 32;
/// Wake-ups that a wait counts for at most: one that lasted for ever is forgotten after five that
/// were short.
const MAX_WAKE_UPS: u32 = 4;

/// What time it is, and what polls in vain may still take.
pub(crate) trait Machine {
    fn now(&self) -> Instant;
    /// Whether the share of polls in vain is not used up.
    fn may_poll(&self, now: Instant) -> bool;
    /// A poll has ended in vain.
    fn charge(&self, now: Instant, time: Duration);
}

/// This one.
#[derive(Debug, Default)]
pub(crate) struct Host;

impl Machine for Host {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn may_poll(&self, now: Instant) -> bool {
        share::may_poll(now)
    }

    fn charge(&self, now: Instant, time: Duration) {
        share::charge(now, time);
    }
}

/// What was last before a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    Received,
    Sent,
}

/// What is known of waits of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Habit {
    /// What a wait takes beside wake-ups: a moving average.
    expected: Duration,
    /// The last poll found something.
    proven: bool,
}

impl Habit {
    /// A wait took so long beside wake-ups, which take `cost` each.
    fn learn(&mut self, took: Duration, cost: Duration) {
        let most = cost * MAX_WAKE_UPS;
        self.expected = self.expected.min(most) * 3 / 4 + took.min(most) / 4;
    }
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Nothing has been sent, and nothing has come, since this end last slept.
    Idle,
    /// A wait begins as soon as there is nothing.
    Fresh(Behind),
    Polling {
        behind: Behind,
        since: Instant,
        until: Instant,
    },
    Sleeping {
        behind: Behind,
        since: Instant,
    },
}

/// What to do when there is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Look again, after other tasks have had a turn.
    Again,
    /// Sleep until the peer wakes this end.
    Sleep,
}

/// One end.
#[derive(Debug)]
pub(crate) struct BusyPoll<M = Host> {
    /// The longest poll.
    limit: Duration,
    /// What a sleep and its wake-up take.
    cost: Duration,
    received: Habit,
    sent: Habit,
    /// The peer has to be woken before it answers what was sent last.
    peer_sleeps: bool,
    /// That is a guess.
    guesses: bool,
    state: State,
    machine: M,
}

impl BusyPoll {
    /// Polls for `limit` at most; never, if that is zero. `cost`: what a wake-up takes, as far as
    /// is known.
    pub(crate) fn new(limit: Duration, cost: Duration) -> BusyPoll {
        BusyPoll::on(Host, limit, cost)
    }
}

impl<M: Machine> BusyPoll<M> {
    fn on(machine: M, limit: Duration, cost: Duration) -> BusyPoll<M> {
        BusyPoll {
            limit,
            cost,
            received: Habit::default(),
            sent: Habit::default(),
            peer_sleeps: false,
            guesses: false,
            state: State::Idle,
            machine,
        }
    }

    /// What a sleep and its wake-up take, as far as is known.
    #[cfg(feature = "shm")]
    pub(crate) fn cost(&self) -> Duration {
        self.cost
    }

    /// What a sleep and its wake-up take is known better now.
    pub(crate) fn set_cost(&mut self, cost: Duration) {
        self.cost = cost;
    }

    fn habit(&self, behind: Behind) -> &Habit {
        match behind {
            Behind::Received => &self.received,
            Behind::Sent => &self.sent,
        }
    }

    fn habit_mut(&mut self, behind: Behind) -> &mut Habit {
        match behind {
            Behind::Received => &mut self.received,
            Behind::Sent => &mut self.sent,
        }
    }

    fn learn(&mut self, behind: Behind, took: Duration) {
        let cost = self.cost;
        self.habit_mut(behind).learn(took, cost);
    }

    /// Wake-ups of the peer's that are part of a wait.
    fn peers(&self, behind: Behind) -> u32 {
        u32::from(behind == Behind::Sent && self.peer_sleeps)
    }

    /// How long a poll lasts. None: this end sleeps at once.
    fn length(&self, behind: Behind) -> Option<Duration> {
        let length = (self.cost * (1 + self.peers(behind))).min(self.limit);
        (self.habit(behind).expected <= self.cost && self.cost.min(self.limit) >= MIN_COST)
            .then_some(length)
    }

    /// Something was sent: an answer may come. `rung`: the peer slept and was rung. None: the
    /// device does not tell; the peer is taken to sleep then if the last answer took longer than a
    /// wake-up.
    pub(crate) fn sent(&mut self, rung: Option<bool>) {
        match self.state {
            State::Idle | State::Fresh(Behind::Received) => self.begin(rung),
            State::Fresh(Behind::Sent) | State::Polling { behind: Behind::Sent, .. } => {
                self.peer_sleeps |= rung == Some(true);
            }
            State::Polling { behind: Behind::Received, since, until } => {
                // Nothing came by itself.
                self.in_vain(Behind::Received, since, until);
                self.learn(Behind::Received, Duration::MAX);
                self.begin(rung);
            }
            State::Sleeping { behind: Behind::Received, .. } => {
                self.learn(Behind::Received, Duration::MAX);
                self.begin(rung);
            }
            State::Sleeping { behind: Behind::Sent, since } => {
                if self.machine.now().saturating_duration_since(since) > self.cost * MAX_WAKE_UPS {
                    // What was sent before asked for no answer, or for one that takes its time.
                    self.learn(Behind::Sent, Duration::MAX);
                    self.begin(rung);
                } else {
                    self.peer_sleeps |= rung == Some(true);
                }
            }
        }
    }

    /// A wait for an answer.
    fn begin(&mut self, rung: Option<bool>) {
        self.guesses = rung.is_none();
        self.peer_sleeps = rung.unwrap_or(self.peer_sleeps);
        self.state = match self.length(Behind::Sent) {
            Some(_) => State::Fresh(Behind::Sent),
            None => State::Sleeping { behind: Behind::Sent, since: self.machine.now() },
        };
    }

    /// How long a poll that begins now may last. None: this end sleeps at once.
    fn allowed(&self, behind: Behind, now: Instant) -> Option<Duration> {
        self.length(behind).filter(|_| self.habit(behind).proven || self.machine.may_poll(now))
    }

    /// Whether it is worth polling now.
    pub(crate) fn is_ready(&self) -> bool {
        match self.state {
            State::Fresh(behind) => self.allowed(behind, self.machine.now()).is_some(),
            State::Idle | State::Polling { .. } | State::Sleeping { .. } => false,
        }
    }

    /// Something came. Whether this end polled for it.
    pub(crate) fn received(&mut self) -> bool {
        let polled = matches!(self.state, State::Polling { .. });
        match self.state {
            State::Polling { behind, since, .. } => {
                let took = if self.peers(behind) == 0 {
                    // About a wake-up at most; how long is not worth a look at the clock.
                    Duration::ZERO
                } else {
                    let waited = self.machine.now().saturating_duration_since(since);
                    self.peer_sleeps = waited > self.cost;
                    waited.saturating_sub(self.cost)
                };
                self.habit_mut(behind).proven = true;
                self.learn(behind, took);
            }
            State::Sleeping { behind, since } => {
                let waited = self.machine.now().saturating_duration_since(since);
                self.peer_sleeps |=
                    self.guesses && behind == Behind::Sent && waited > self.cost * 2;
                let wake_ups = self.cost * (1 + self.peers(behind));
                self.learn(behind, waited.saturating_sub(wake_ups));
            }
            State::Idle | State::Fresh(_) => {}
        }
        self.state = State::Fresh(Behind::Received);
        polled
    }

    /// Nothing is there. `apart`: the peer runs on another processor. `look` is called until it
    /// says true, for about a microsecond.
    pub(crate) fn nothing(&mut self, apart: bool, look: impl Fn() -> bool) -> Next {
        let (behind, since, until) = match self.state {
            State::Idle | State::Sleeping { .. } => return Next::Sleep,
            // Waiting for a peer on the same processor teaches nothing.
            State::Fresh(_) if !apart => {
                self.state = State::Idle;
                return Next::Sleep;
            }
            State::Fresh(behind) => {
                let now = self.machine.now();
                match self.allowed(behind, now) {
                    Some(length) => (behind, now, now + length),
                    None => {
                        self.state = State::Sleeping { behind, since: now };
                        return Next::Sleep;
                    }
                }
            }
            State::Polling { behind, since, until } => (behind, since, until),
        };
        self.state = State::Polling { behind, since, until };
        for _ in 0..PAUSES {
            if look() {
                return Next::Again;
            }
            std::hint::spin_loop();
        }
        if self.machine.now() < until && apart {
            return Next::Again;
        }
        self.in_vain(behind, since, until);
        // The wait began with the poll.
        self.state = State::Sleeping { behind, since };
        Next::Sleep
    }

    /// A poll is over, and found nothing.
    fn in_vain(&mut self, behind: Behind, since: Instant, until: Instant) {
        let now = self.machine.now();
        // What other tasks took beyond its end was not polled.
        self.machine.charge(now, now.min(until).saturating_duration_since(since));
        self.habit_mut(behind).proven = false;
    }
}
