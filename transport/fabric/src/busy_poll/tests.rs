use std::cell::Cell;
use std::rc::Rc;

use crate::busy_poll::*;

/// A machine whose clock advances only when the test says so.
#[derive(Debug, Clone)]
struct Fake {
    now: Rc<Cell<Instant>>,
    /// The time that unsuccessful polls have taken.
    vain: Rc<Cell<Duration>>,
    allowed_poll: bool,
    /// The budget of the process, and when it began.
    budget: Option<(Rc<Budget>, Instant)>,
}

impl Machine for Fake {
    fn now(&self) -> Instant {
        self.now.get()
    }
    fn may_poll(&self, now: Instant) -> bool {
        match &self.budget {
            Some((budget, begun)) => budget.is_left(nanos(now - *begun)),
            None => self.allowed_poll,
        }
    }
    fn charge(&self, now: Instant, time: Duration) {
        self.vain.set(self.vain.get() + time);
        if let Some((budget, begun)) = &self.budget {
            budget.take(nanos(now - *begun), time);
        }
    }
}

/// The default of [`LinkConfig::busy_poll_limit`](crate::LinkConfig::busy_poll_limit).
fn limit() -> Duration {
    crate::LinkConfig::default().busy_poll_limit
}

fn end(cost: Duration) -> BusyPoll<Fake> {
    let now = Rc::new(Cell::new(Instant::now()));
    let fake = Fake { now, vain: Rc::default(), allowed_poll: true, budget: None };
    BusyPoll::on(fake, limit(), cost)
}

impl BusyPoll<Fake> {
    fn sleeps(mut self) -> Self {
        self.received.expected = self.cost * PRICE * MAX_PRICES;
        self.sent.expected = self.cost * PRICE * MAX_PRICES;
        self
    }

    fn pass(&self, time: Duration) -> Instant {
        self.machine.now.set(self.machine.now() + time);
        self.machine.now()
    }

    /// Lets this end wait until `until` or until it sleeps. Returns whether it sleeps.
    fn waits(&mut self, until: Instant) -> bool {
        loop {
            let left = until.saturating_duration_since(self.machine.now());
            if left.is_zero() {
                return false;
            }
            match self.on_empty(true, || false) {
                PollStep::PollAgain => self.pass(left.min(self.cost / 16)),
                PollStep::Sleep => return true,
            };
        }
    }

    fn comes(&mut self, at: Instant, wake_up: Duration) {
        self.machine.now.set(at.max(self.machine.now()) + wake_up);
        self.received();
    }
}

/// A client and a server that wait for each other.
struct Pair {
    ends: [BusyPoll<Fake>; 2],
    /// Whether an end is told that its peer slept.
    told: bool,
    /// A linear congruential generator (Numerical Recipes).
    state: u32,
    /// The maximum deviation of a wake-up from the known cost, in eighths of that cost.
    noise: u32,
    cost: Duration,
    /// The processor time that waiting has cost, in sleeps and in polls.
    spent: Duration,
    /// The least possible cost: for each wait, the shorter of the peer's work and the price of a
    /// sleep.
    best: Duration,
    sleeps: usize,
}

impl Pair {
    fn new(cost: Duration, told: bool) -> Pair {
        Pair::of([end(cost), end(cost)], told)
    }

    fn of(ends: [BusyPoll<Fake>; 2], told: bool) -> Pair {
        let cost = ends[0].cost;
        let zero = Duration::ZERO;
        Pair { ends, told, state: 1, noise: 0, cost, spent: zero, best: zero, sleeps: 0 }
    }

    fn random(&mut self) -> u32 {
        self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.state >> 16
    }

    fn wake_up(&mut self) -> Duration {
        let span = 2 * self.noise + 1;
        let eighths = 8 + self.random() % span - self.noise;
        self.cost * eighths / 8
    }

    /// Lets one end work for `work` and then send, while the other end waits for the message.
    fn turn(&mut self, from: usize, work: Duration) {
        let wake_up = self.wake_up();
        let [client, server] = &mut self.ends;
        let (sender, waiter) = if from == 0 { (client, server) } else { (server, client) };
        let begun = waiter.machine.now();
        let at = sender.pass(work);
        let slept = waiter.waits(at);
        sender.sent(self.told.then_some(slept));
        let polled = waiter.machine.now().saturating_duration_since(begun);
        waiter.comes(at, if slept { wake_up } else { Duration::ZERO });
        self.spent += polled + if slept { self.cost * PRICE } else { Duration::ZERO };
        self.best += work.min(self.cost * PRICE);
        self.sleeps += usize::from(slept);
    }

    /// Makes calls one after the other, with the given work at each end. Returns the number of
    /// sleeps in the last 100 calls.
    fn calls(&mut self, calls: usize, client: Duration, server: Duration) -> usize {
        let mut before = self.sleeps;
        for call in 0..calls {
            if call + 100 == calls {
                before = self.sleeps;
            }
            self.turn(0, client);
            self.turn(1, server);
        }
        self.sleeps - before
    }

    fn vain(&self) -> Duration {
        self.ends.iter().map(|end| end.machine.vain.get()).sum()
    }
}

fn costs() -> [Duration; 4] {
    [1, 10, 100, 1000].map(Duration::from_micros)
}

/// Where polling pays, both ends learn to poll, regardless of the states in which they begin and of
/// the cost of a wake-up.
#[test]
fn both_come_to_poll() {
    for (cost, told) in costs().into_iter().skip(1).flat_map(|cost| [(cost, true), (cost, false)]) {
        for (client, server) in [(1, 1), (1, 10), (10, 1), (10, 10), (16, 16), (18, 2)] {
            for modes in 0..4 {
                let mode = |which| if modes & which == 0 { end(cost) } else { end(cost).sleeps() };
                let mut pair = Pair::of([mode(1), mode(2)], told);
                let slept = pair.calls(120, cost * client / 20, cost * server / 20);
                assert_eq!(
                    slept, 0,
                    "{cost:?}, told {told}, work {client} {server}, modes {modes}"
                );
            }
        }
    }
}

/// Both ends also learn to poll if the times of wake-ups vary.
#[test]
fn both_come_to_poll_where_wake_ups_differ() {
    for (cost, told) in costs().into_iter().skip(1).flat_map(|cost| [(cost, true), (cost, false)]) {
        for seed in 0..50 {
            let mut pair = Pair::of([end(cost).sleeps(), end(cost).sleeps()], told);
            (pair.state, pair.noise) = (seed, 4);
            let slept = pair.calls(200, cost / 10, cost / 10);
            assert_eq!(slept, 0, "{cost:?}, told {told}, seed {seed}");
        }
    }
}

/// After a phase of long waits, both ends poll again, regardless of the state in which that phase
/// leaves each end.
#[test]
fn what_was_given_up_comes_back() {
    for (cost, told) in costs().into_iter().skip(1).flat_map(|cost| [(cost, true), (cost, false)]) {
        for calls in [1, 2, 3, 5, 8, 100] {
            for (client, server) in [(50, 0), (0, 50), (50, 50), (3, 1), (1, 3)] {
                let mut pair = Pair::new(cost, told);
                assert_eq!(pair.calls(120, cost / 10, cost / 10), 0);
                pair.calls(calls, cost * client, cost * server);
                let slept = pair.calls(120, cost / 10, cost / 10);
                assert_eq!(
                    slept, 0,
                    "{cost:?}, told {told}, {calls} calls with {client} and {server}"
                );
            }
        }
    }
}

/// After each answer the client sends a grant, which does not change the server's wait for the next
/// request.
#[test]
fn a_grant_leaves_a_wait_as_it_was() {
    for (cost, told) in costs().into_iter().skip(1).flat_map(|cost| [(cost, true), (cost, false)]) {
        let (mut pair, work) = (Pair::new(cost, told), cost / 10);
        let mut before = 0;
        for call in 0..120 {
            if call == 20 {
                before = pair.sleeps;
            }
            pair.turn(0, work);
            // Each link is also polled while its end works.
            let _ = pair.ends[1].on_empty(true, || false);
            pair.turn(1, work);
            let _ = pair.ends[0].on_empty(true, || false);
            pair.turn(0, work);
            pair.ends[1].wait_goes_on();
        }
        assert_eq!(pair.sleeps, before, "{cost:?}, told {told}");
    }
}

#[test]
fn where_a_wake_up_costs_nothing_none_polls() {
    let mut pair = Pair::new(costs()[0], true);
    let work = Duration::from_micros(3);
    assert_eq!(pair.calls(200, work, work), 200);
    assert_eq!(pair.vain(), Duration::ZERO);
}

/// An end sleeps at once if the peer's work takes longer than the price of a sleep.
#[test]
fn what_takes_longer_than_a_sleep_costs_is_slept_for() {
    for (cost, told) in costs().into_iter().skip(1).flat_map(|cost| [(cost, true), (cost, false)]) {
        for times in [4, 5, 50] {
            let (mut pair, work) = (Pair::new(cost, told), cost * PRICE * times);
            pair.calls(20, work, work);
            let before = pair.vain();
            assert_eq!(pair.calls(1000, work, work), 200, "{cost:?} x{times}");
            assert_eq!(pair.vain(), before, "{cost:?} x{times}, told {told}");
        }
    }
}

/// A client that pauses before each request makes the server sleep, but still polls for the
/// answers, which come soon.
#[test]
fn each_end_learns_its_own_waits() {
    for told in [true, false] {
        let cost = Duration::from_micros(100);
        let mut pair = Pair::new(cost, told);
        pair.calls(20, cost * 50, cost / 10);
        // The server sleeps before each request. The client never sleeps before an answer.
        assert_eq!(pair.calls(100, cost * 50, cost / 10), 100, "told {told}");
    }
}

/// For any pattern of messages, waiting costs at most a little more than twice the best possible
/// cost. The excess comes from longer polls for peers that have to be woken, and from estimates
/// that take time to adapt.
#[test]
fn no_pattern_costs_much_more_than_twice_the_best() {
    // If a wake-up takes a microsecond, no end polls, because reading the clock would cost too
    // much.
    for cost in costs().into_iter().skip(1) {
        for seed in 0..60 {
            let mut pair = Pair::new(cost, true);
            pair.state = seed;
            // Some patterns have short waits, some long ones, some both, in runs of any length.
            let (most, run) = (1 + pair.random() % 64, 1 + pair.random() % 20);
            let mut work = Duration::ZERO;
            for call in 0..1000 {
                if call % run == 0 {
                    work = cost * PRICE * (pair.random() % (most + 1)) / 8;
                }
                pair.turn(0, work);
                pair.turn(1, work);
            }
            let bound = pair.best * 9 / 4 + cost * PRICE * 20;
            assert!(pair.spent <= bound, "{cost:?}, seed {seed}: {:?} of {bound:?}", pair.spent);
        }
    }
}

/// A sender that gets no answers soon stops polling.
#[test]
fn one_that_only_sends_does_not_poll() {
    for woken in [Some(false), Some(true), None] {
        let cost = Duration::from_micros(100);
        let mut end = end(cost);
        for _ in 0..10_000 {
            end.sent(woken);
            let until = end.machine.now() + Duration::from_micros(7);
            end.waits(until);
            end.machine.now.set(until);
        }
        assert!(
            end.machine.vain.get() <= cost * PRICE * 2 * MAX_PRICES,
            "{woken:?}: {:?}",
            end.machine.vain.get()
        );
    }
}

/// A server that works for a long time before it answers does not poll while it works, and polls
/// for the next request.
#[test]
fn time_to_think_is_not_polled_away() {
    let cost = Duration::from_micros(100);
    let mut server = end(cost);
    for call in 0..200 {
        // The handler works on another thread.
        let done = server.machine.now() + cost * PRICE * 10;
        server.waits(done);
        server.machine.now.set(done);
        server.sent(Some(false));
        assert!(!server.waits(done + cost / 10), "call {call}");
        server.comes(done + cost / 10, Duration::ZERO);
    }
    let bound = cost * PRICE * MAX_PRICES;
    assert!(server.machine.vain.get() <= bound, "{:?}", server.machine.vain.get());
}

/// An end learns to poll for messages that arrive one after another without requests.
#[test]
fn a_stream_is_polled_for() {
    let cost = Duration::from_micros(100);
    let mut reader = end(cost).sleeps();
    for message in 0..100 {
        let at = reader.machine.now() + cost / 10;
        let slept = reader.waits(at);
        assert!(!slept || message < 10, "message {message}");
        reader.comes(at, if slept { cost } else { Duration::ZERO });
    }
}

#[test]
fn an_idle_end_and_one_beside_its_peer_sleep_at_once() {
    let mut end = end(Duration::from_micros(100));
    assert_eq!(end.on_empty(true, || false), PollStep::Sleep);
    end.received();
    assert_eq!(end.on_empty(false, || false), PollStep::Sleep, "on one processor");
    assert_eq!(end.on_empty(true, || false), PollStep::Sleep, "it sleeps already");
}

#[test]
fn one_that_is_told_not_to_never_polls() {
    let mut end = end(Duration::from_micros(100));
    end.limit = Duration::ZERO;
    for _ in 0..5 {
        end.received();
        assert_eq!(end.on_empty(true, || true), PollStep::Sleep);
        end.sent(Some(false));
        assert!(!end.is_ready());
    }
}

/// Once the budget is used up, only an end whose last poll was successful begins a poll.
#[test]
fn where_the_share_is_used_up_no_other_begins() {
    let mut end = end(Duration::from_micros(100));
    end.sent(Some(false));
    assert_eq!(end.on_empty(true, || false), PollStep::PollAgain);
    end.received();
    end.machine.allowed_poll = false;
    end.sent(Some(false));
    assert!(end.is_ready());
    assert_eq!(end.on_empty(true, || false), PollStep::PollAgain);
    // The poll finds nothing.
    end.pass(Duration::from_millis(1));
    assert_eq!(end.on_empty(true, || false), PollStep::Sleep);
    end.received();
    end.sent(Some(false));
    assert!(!end.is_ready());
    assert_eq!(end.on_empty(true, || true), PollStep::Sleep);
}

/// The peers answer at once and late by turns, so that polling seems to pay. The unsuccessful polls
/// of all ends of the process together still keep to the budget.
#[test]
fn peers_that_play_with_this_process_take_no_more_than_the_share() {
    for count in [1, 64] {
        let cost = Duration::from_micros(100);
        let (budget, begun) = (Rc::new(Budget::default()), Instant::now());
        let mut ends: Vec<_> = (0..count).map(|_| end(cost)).collect();
        for end in &mut ends {
            end.machine.now.set(begun);
            end.machine.budget = Some((budget.clone(), begun));
        }
        for call in 0..20_000 {
            for end in &mut ends {
                end.sent(Some(false));
                let late = cost * PRICE * 19 / 10;
                let at = end.machine.now() + if call % 2 == 0 { Duration::ZERO } else { late };
                let slept = end.waits(at);
                end.comes(at, if slept { cost } else { Duration::ZERO });
            }
        }
        let vain: Duration = ends.iter().map(|end| end.machine.vain.get()).sum();
        let all = ends.iter().map(|end| end.machine.now() - begun).max().unwrap();
        assert!(vain > all / 10, "they try: {vain:?} of {all:?}");
        // Each end may have begun one more poll.
        let bound = all / DIVISOR + BURST + cost * PRICE * 2 * count;
        assert!(vain <= bound, "{count} ends: {vain:?} of {all:?}, {bound:?} at most");
    }
}

/// An end is charged only for the length of its poll, even if other tasks had the processor for
/// much longer.
#[test]
fn no_more_than_the_poll_is_charged() {
    let cost = Duration::from_micros(100);
    let mut end = end(cost);
    end.sent(Some(false));
    assert_eq!(end.on_empty(true, || false), PollStep::PollAgain);
    end.pass(Duration::from_secs(1));
    assert_eq!(end.on_empty(true, || false), PollStep::Sleep);
    assert_eq!(end.machine.vain.get(), cost * PRICE);
    // The same holds if a handler had the processor for a long time before it answered.
    end.received();
    assert_eq!(end.on_empty(true, || false), PollStep::PollAgain);
    end.pass(Duration::from_secs(1));
    end.sent(Some(false));
    assert_eq!(end.machine.vain.get(), cost * PRICE * 2);
}

#[test]
fn a_message_ends_the_poll() {
    let mut end = end(Duration::from_micros(100));
    end.received();
    assert_eq!(end.on_empty(true, || true), PollStep::PollAgain);
}

#[test]
fn unsuccessful_polls_keep_to_their_budget() {
    let budget = Budget(AtomicU64::new(0));
    let time = Duration::from_micros(100);
    let mut spent = Duration::ZERO;
    for step in 1..=100_000_u64 {
        let now = step * nanos(time);
        if budget.is_left(now) {
            budget.take(now, time);
            spent += time;
        }
    }
    let all = time * 100_000 / DIVISOR;
    assert!(spent >= all && spent <= all + 2 * BURST, "{spent:?} of {all:?}");
}

#[test]
fn a_debt_is_paid_in_full() {
    let budget = Budget(AtomicU64::new(0));
    (0..100).for_each(|_| budget.take(0, Duration::from_millis(1)));
    let paid = nanos(Duration::from_millis(100) * DIVISOR - BURST * DIVISOR);
    assert!(!budget.is_left(paid - 1) && budget.is_left(paid));
}
