//! Tests the protocol of a shared queue over a made-up device.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use proptest::prelude::*;
use rdma_sys::ibv_wc_status;

use crate::verbs::completion::dispatch::{
    Armed, BATCH, Completed, Dispatch, Failure, MemberId, Polled, Queue, RECV, ReactorStep, Sleep,
};

#[derive(Debug)]
struct Device {
    completions: VecDeque<Completed>,
    armed: Armed,
    /// The number of events in the channel.
    events: usize,
    arms: usize,
    takes: usize,
    broken: bool,
    /// A queue pair whose completions keep the queue full.
    busy: Option<u32>,
}

/// The number of entries in the queue.
const ENTRIES: usize = 4096;

fn completed(qp_num: u32, wr_id: u64, is_message: bool) -> Completed {
    Completed { qp_num, wr_id, status: 0, vendor_err: 0, byte_len: 0, is_message }
}

#[derive(Clone, Debug)]
struct Made(Rc<RefCell<Device>>);

impl Made {
    fn new() -> Made {
        Made(Rc::new(RefCell::new(Device {
            completions: VecDeque::new(),
            armed: Armed::Not,
            events: 0,
            arms: 0,
            takes: 0,
            broken: false,
            busy: None,
        })))
    }

    fn complete(&self, qp_num: u32, wr_id: u64, solicited: bool) {
        let mut device = self.0.borrow_mut();
        device.completions.push_back(completed(qp_num, wr_id, solicited));
        if device.armed == Armed::All || (device.armed == Armed::Solicited && solicited) {
            device.armed = Armed::Not;
            device.events += 1;
        }
    }

    fn arms(&self) -> usize {
        self.0.borrow().arms
    }

    fn read_event(&self) -> bool {
        let mut device = self.0.borrow_mut();
        let there = device.events > 0;
        device.events -= usize::from(there);
        there
    }
}

impl Queue for Made {
    fn take(&mut self, mut each: impl FnMut(&Completed)) -> io::Result<usize> {
        let taken: Vec<Completed> = {
            let mut device = self.0.borrow_mut();
            if device.broken {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            device.takes += 1;
            assert!(device.takes < 1000, "this never ends");
            if let Some(qp_num) = device.busy {
                while device.completions.len() < ENTRIES {
                    device.completions.push_back(completed(qp_num, 0, true));
                }
            }
            let n = device.completions.len().min(BATCH);
            device.completions.drain(..n).collect()
        };
        taken.iter().for_each(&mut each);
        Ok(taken.len())
    }

    fn arm(&mut self, what: Armed) -> io::Result<()> {
        let mut device = self.0.borrow_mut();
        device.arms += 1;
        // A queue that is armed for all completions stays armed for all, as with Soft-RoCE.
        device.armed = device.armed.max(what);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A queue pair and its task.
#[derive(Debug)]
struct Pair {
    id: MemberId,
    task: Arc<Task>,
    got: Vec<u64>,
}

impl Pair {
    fn join(dispatch: &mut Dispatch<Made>, qp_num: u32) -> Pair {
        let mut wake = Vec::new();
        let id = dispatch.join(qp_num, &mut wake).unwrap();
        wake.into_iter().for_each(Waker::wake);
        Pair { id, task: Arc::default(), got: Vec::new() }
    }

    fn leave(&self, dispatch: &mut Dispatch<Made>) {
        let mut wake = Vec::new();
        dispatch.leave(self.id, &mut wake);
        wake.into_iter().for_each(Waker::wake);
    }

    fn wakes(&self) -> usize {
        self.task.0.load(Ordering::SeqCst)
    }

    fn poll(&mut self, dispatch: &mut Dispatch<Made>, busy: bool) -> Polled {
        let mut wake = Vec::new();
        let got = &mut self.got;
        let own = &mut |completed: &Completed| got.push(completed.wr_id);
        let polled = dispatch.poll(self.id, busy, 256, own, &mut wake).unwrap();
        wake.into_iter().for_each(Waker::wake);
        polled
    }

    fn sleep(&mut self, dispatch: &mut Dispatch<Made>, what: Armed) -> Sleep {
        let (mut wake, waker) = (Vec::new(), Waker::from(self.task.clone()));
        let got = &mut self.got;
        let own = &mut |completed: &Completed| got.push(completed.wr_id);
        let sleep = dispatch.sleep(self.id, what, &waker, own, &mut wake).unwrap();
        wake.into_iter().for_each(Waker::wake);
        sleep
    }

    /// Polls and sleeps like a driver that has nothing else to do.
    fn run(&mut self, dispatch: &mut Dispatch<Made>, what: Armed) {
        loop {
            let polled = self.poll(dispatch, false);
            if polled.own == 0 && self.sleep(dispatch, what) == Sleep::Asleep {
                return;
            }
        }
    }
}

fn look(dispatch: &mut Dispatch<Made>) -> ReactorStep {
    let mut wake = Vec::new();
    let next = dispatch.look(&mut wake).unwrap();
    wake.into_iter().for_each(Waker::wake);
    next
}

/// The reactor takes the event that must be there.
fn react(device: &Made, dispatch: &mut Dispatch<Made>) -> ReactorStep {
    assert!(device.read_event(), "no event");
    dispatch.take_event();
    look(dispatch)
}

/// If a peer sends as fast as this end takes, other queue pairs can still be made and destroyed
/// (R20).
#[test]
fn joining_and_leaving_end_beside_a_queue_pair_that_is_always_busy() {
    let (device, mut dispatch) = made();
    let busy = Pair::join(&mut dispatch, 1);
    for n in 0..ENTRIES as u64 {
        device.complete(2, n, true);
    }
    device.0.borrow_mut().busy = Some(1);
    // The completions with this number in the queue belong to an earlier queue pair, and are not
    // delivered.
    let mut other = Pair::join(&mut dispatch, 2);
    other.poll(&mut dispatch, false);
    assert!(other.got.is_empty(), "{:?}", other.got);
    other.leave(&mut dispatch);
    let takes = device.0.borrow().takes;
    assert!(takes <= 3 * ENTRIES / BATCH + 100, "{takes}");
    drop(busy);
}

fn made() -> (Made, Dispatch<Made>) {
    let device = Made::new();
    (device.clone(), Dispatch::new(device, ENTRIES))
}

#[test]
fn one_member_has_the_queue_as_its_own() {
    let (device, mut dispatch) = made();
    let mut pair = Pair::join(&mut dispatch, 7);
    pair.run(&mut dispatch, Armed::Solicited);
    for n in 1..=10 {
        device.complete(7, n as u64, true);
        assert_eq!(react(&device, &mut dispatch), ReactorStep::Wait);
        assert_eq!(pair.wakes(), n);
        assert_eq!(device.arms(), n, "it is armed by the member alone");
        let before = device.0.borrow().takes;
        pair.run(&mut dispatch, Armed::Solicited);
        assert_eq!(device.0.borrow().takes - before, 2, "found empty, armed, and found empty");
        assert_eq!(pair.got.len(), n);
    }
    assert!(!device.read_event());
}

#[test]
fn a_poller_takes_for_others_too() {
    let (device, mut dispatch) = made();
    let [mut a, mut b] = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    b.run(&mut dispatch, Armed::Solicited);
    for n in 0..100 {
        device.complete(1 + n % 2, n.into(), true);
    }
    a.poll(&mut dispatch, false);
    assert_eq!(a.got, (0..100).step_by(2).collect::<Vec<u64>>());
    assert_eq!((b.got.len(), b.wakes()), (0, 1));
    b.poll(&mut dispatch, false);
    assert_eq!(b.got, (1..100).step_by(2).collect::<Vec<u64>>());
    // A member that is awake is not woken.
    device.complete(2, 100, true);
    a.poll(&mut dispatch, false);
    assert_eq!(b.wakes(), 1);
    assert_eq!(b.sleep(&mut dispatch, Armed::Solicited), Sleep::PollAgain);
    b.poll(&mut dispatch, false);
    assert_eq!(b.got.last(), Some(&100));
}

#[test]
fn others_that_sleep_stay_safe_when_an_event_is_for_one() {
    let (device, mut dispatch) = made();
    let [mut a, mut b] = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    a.run(&mut dispatch, Armed::Solicited);
    b.run(&mut dispatch, Armed::Solicited);
    assert_eq!(device.arms(), 1, "for both");
    device.complete(1, 0, true);
    react(&device, &mut dispatch);
    // The first member never runs again.
    for n in 0..3 {
        device.complete(1, n, true);
        react(&device, &mut dispatch);
    }
    device.complete(2, 9, true);
    react(&device, &mut dispatch);
    assert_eq!((a.wakes(), b.wakes()), (1, 1));
    b.poll(&mut dispatch, false);
    assert_eq!(b.got, [9]);
}

#[test]
fn what_a_sleeper_waits_for_is_announced() {
    let (device, mut dispatch) = made();
    let [mut a, mut b] = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    a.run(&mut dispatch, Armed::Solicited);
    device.complete(1, 0, false);
    assert!(!device.read_event(), "nobody waits for it");
    b.run(&mut dispatch, Armed::All);
    assert_eq!((a.wakes(), device.arms()), (0, 2), "taken by the other");
    device.complete(2, 1, false);
    react(&device, &mut dispatch);
    assert_eq!(b.wakes(), 1);
    // Work is announced while its owner sleeps.
    a.run(&mut dispatch, Armed::Solicited);
    dispatch.announce_all(a.id).unwrap();
    let arms = device.arms();
    dispatch.announce_all(a.id).unwrap();
    dispatch.announce_all(b.id).unwrap();
    assert_eq!(device.arms(), arms, "armed already, and awake");
    device.complete(1, 2, false);
    react(&device, &mut dispatch);
    assert_eq!((a.wakes(), b.wakes()), (1, 1));
    a.run(&mut dispatch, Armed::Solicited);
    assert_eq!(a.got, [0, 2]);
}

#[test]
fn a_member_that_polls_makes_no_events() {
    let (device, mut dispatch) = made();
    let [mut a, mut b] = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    b.run(&mut dispatch, Armed::Solicited);
    a.poll(&mut dispatch, true);
    device.complete(1, 0, true);
    a.poll(&mut dispatch, true);
    assert_eq!(react(&device, &mut dispatch), ReactorStep::LookAgain);
    let arms = device.arms();
    for n in 1..50 {
        device.complete(1, n, true);
        a.poll(&mut dispatch, true);
        assert_eq!(look(&mut dispatch), ReactorStep::LookAgain);
    }
    assert!(!device.read_event());
    // The member goes to sleep, and the reactor does the rest.
    assert_eq!(a.sleep(&mut dispatch, Armed::Solicited), Sleep::Asleep);
    assert_eq!(device.arms(), arms);
    assert_eq!(look(&mut dispatch), ReactorStep::Wait);
    assert_eq!(device.arms(), arms + 1);
    device.complete(2, 50, true);
    react(&device, &mut dispatch);
    assert_eq!((a.got.len(), b.wakes()), (50, 1));
}

#[test]
fn a_number_that_is_used_again_gets_nothing_of_the_earlier_one() {
    let (device, mut dispatch) = made();
    let old = Pair::join(&mut dispatch, 5);
    let mut other = Pair::join(&mut dispatch, 6);
    other.run(&mut dispatch, Armed::Solicited);
    device.complete(5, 1, true);
    device.complete(6, 2, true);
    // A number is free once its queue pair is destroyed, which may happen before the owner leaves.
    let mut new = Pair::join(&mut dispatch, 5);
    old.leave(&mut dispatch);
    device.complete(5, 3, true);
    new.poll(&mut dispatch, false);
    assert_eq!(new.got, [3]);
    device.complete(5, 4, true);
    new.leave(&mut dispatch);
    // This completion arrives after its owner has left.
    device.complete(5, 5, true);
    let mut third = Pair::join(&mut dispatch, 5);
    third.run(&mut dispatch, Armed::All);
    assert_eq!(third.got, [0; 0]);
    // A member that has left no longer waits for anything.
    third.leave(&mut dispatch);
    device.complete(5, 6, true);
    other.run(&mut dispatch, Armed::Solicited);
    assert_eq!(other.got, [2]);
}

#[test]
fn a_broken_queue_ends_all_members_and_keeps_what_came_before() {
    let (device, mut dispatch) = made();
    let [mut a, mut b] = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    b.run(&mut dispatch, Armed::Solicited);
    device.complete(2, 1, true);
    a.poll(&mut dispatch, false);
    device.0.borrow_mut().broken = true;
    let mut wake = Vec::new();
    assert!(dispatch.look(&mut wake).is_err());
    b.sleep(&mut dispatch, Armed::Solicited);
    dispatch.fail(Failure::Call(libc::EIO), &mut wake);
    b.poll(&mut dispatch, false);
    assert_eq!(b.got, [1]);
    for pair in [&a, &b] {
        let error = dispatch.poll(pair.id, false, 256, &mut |_| {}, &mut wake).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
}

#[test]
fn a_device_that_has_failed_ends_its_queues() {
    let (_, mut dispatch) = made();
    let mut pairs = [1, 2].map(|n| Pair::join(&mut dispatch, n));
    for pair in &mut pairs {
        pair.run(&mut dispatch, Armed::Solicited);
    }
    let mut wake = Vec::new();
    dispatch.fail(Failure::DeviceFatal, &mut wake);
    assert_eq!(wake.len(), 2);
    for pair in &pairs {
        let error = dispatch.poll(pair.id, false, 256, &mut |_| {}, &mut wake).unwrap_err();
        assert!(error.to_string().contains("IBV_EVENT_DEVICE_FATAL"), "{error}");
    }
}

#[test]
fn an_overrun_is_told_by_name() {
    let (_, mut dispatch) = made();
    let mut pair = Pair::join(&mut dispatch, 1);
    pair.run(&mut dispatch, Armed::Solicited);
    let mut wake = Vec::new();
    dispatch.fail(Failure::Overrun, &mut wake);
    assert_eq!(wake.len(), 1);
    let error = dispatch.poll(pair.id, false, 256, &mut |_| {}, &mut wake).unwrap_err();
    assert!(error.to_string().contains("overrun"), "{error}");
    // No other queue pair can join a queue that has failed.
    assert!(dispatch.has_failed());
    let error = dispatch.join(2, &mut wake).unwrap_err();
    assert!(error.to_string().contains("overrun"), "{error}");
}

#[test]
fn without_a_reactor_nobody_sleeps() {
    let (device, mut dispatch) = made();
    let mut pair = Pair::join(&mut dispatch, 1);
    pair.run(&mut dispatch, Armed::All);
    let mut wake = Vec::new();
    dispatch.orphan(&mut wake);
    assert_eq!(wake.len(), 1);
    assert_eq!(pair.sleep(&mut dispatch, Armed::All), Sleep::Orphaned);
    device.complete(1, 1, true);
    pair.poll(&mut dispatch, false);
    assert_eq!(pair.got, [1]);
}

/// A step of the device, of one of four queue pairs, or of the reactor.
#[derive(Clone, Debug)]
enum Step {
    Complete(usize, bool),
    Poll(usize, bool),
    Sleep(usize, bool),
    AnnounceAll(usize),
    Replace(usize),
    ReadEvent,
    React,
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    let pair = 0..4_usize;
    prop_oneof![
        4 => (pair.clone(), any::<bool>()).prop_map(|(n, s)| Step::Complete(n, s)),
        4 => (pair.clone(), any::<bool>()).prop_map(|(n, b)| Step::Poll(n, b)),
        5 => (pair.clone(), any::<bool>()).prop_map(|(n, all)| Step::Sleep(n, all)),
        1 => pair.clone().prop_map(Step::AnnounceAll),
        1 => pair.prop_map(Step::Replace),
        2 => Just(Step::ReadEvent),
        3 => Just(Step::React),
        2 => Just(Step::Look),
    ]
}

proptest! {
    /// After any steps in any order, completions arrive once, in order and at their owner. A member
    /// that sleeps is woken by the completions for which it sleeps, although no other member polls.
    #[test]
    fn nothing_is_lost(steps in proptest::collection::vec(step(), 1..120)) {
        let (device, mut dispatch) = made();
        let mut pairs: Vec<Pair> = (0..4).map(|n| Pair::join(&mut dispatch, n)).collect();
        // `expected` has the completions of each member, and whether each is a message. `asleep`
        // has, for each sleeping member, the completion after which all completions wake it, and
        // the number of its wakes when it went to sleep.
        let mut expected = vec![Vec::new(); 4];
        let mut asleep = [None; 4];
        let (mut next, mut in_hand, mut looking) = (0, false, false);
        for step in steps {
            match step {
                Step::Complete(n, solicited) => {
                    next += 1;
                    expected[n].push((next, solicited));
                    device.complete(n as u32, next, solicited);
                }
                Step::Poll(n, busy) => {
                    pairs[n].poll(&mut dispatch, busy);
                    asleep[n] = None;
                }
                Step::Sleep(n, all) => {
                    let what = if all { Armed::All } else { Armed::Solicited };
                    let polled = pairs[n].poll(&mut dispatch, false);
                    asleep[n] = None;
                    if polled.own == 0 && pairs[n].sleep(&mut dispatch, what) == Sleep::Asleep {
                        let after = if all { 0 } else { u64::MAX };
                        asleep[n] = Some((after, pairs[n].wakes()));
                    }
                }
                Step::AnnounceAll(n) => {
                    dispatch.announce_all(pairs[n].id).unwrap();
                    // Like a device, it announces only completions that come from now on.
                    if let Some((after, _)) = &mut asleep[n] {
                        *after = next.min(*after);
                    }
                }
                Step::Replace(n) => {
                    pairs[n].leave(&mut dispatch);
                    pairs[n] = Pair::join(&mut dispatch, n as u32);
                    expected[n].clear();
                    asleep[n] = None;
                }
                // The channel is read without the lock.
                Step::ReadEvent => in_hand |= device.read_event(),
                Step::React if in_hand => {
                    in_hand = false;
                    dispatch.take_event();
                    looking = look(&mut dispatch) == ReactorStep::LookAgain;
                }
                Step::Look if looking => looking = look(&mut dispatch) == ReactorStep::LookAgain,
                Step::React | Step::Look => {}
            }
        }
        // Now only the reactor continues.
        let mut rounds = 0;
        while in_hand || looking || device.read_event() {
            dispatch.take_event();
            in_hand = false;
            looking = look(&mut dispatch) == ReactorStep::LookAgain;
            rounds += 1;
            prop_assert!(rounds < 1000, "it never rests");
        }
        for (n, pair) in pairs.iter_mut().enumerate() {
            let missing = &expected[n][pair.got.len()..];
            if let Some((after, wakes)) = asleep[n] {
                let due = missing.iter().any(|(id, message)| *message || *id > after);
                prop_assert!(!due || pair.wakes() > wakes, "{n} sleeps: {missing:?}");
            }
            while pair.poll(&mut dispatch, false).own > 0 {}
            let all: Vec<u64> = expected[n].iter().map(|(id, _)| *id).collect();
            prop_assert_eq!(&pair.got, &all);
        }
    }
}

#[test]
fn the_length_is_read_of_received_messages_alone() {
    const GARBAGE: u32 = 0xdead_beef;
    let read = |wr_id: u64, status: u32| {
        let mut wc = MaybeUninit::<rdma_sys::ibv_wc>::uninit();
        let at = wc.as_mut_ptr();
        // SAFETY: the fields lie in `wc`. Only the fields that verbs defines for an error, and the
        // length, are written.
        unsafe {
            (&raw mut (*at).wr_id).write(wr_id);
            (&raw mut (*at).status).write(status);
            (&raw mut (*at).vendor_err).write(7);
            (&raw mut (*at).qp_num).write(9);
            (&raw mut (*at).byte_len).write(GARBAGE);
            super::read(&wc)
        }
    };
    let ok = ibv_wc_status::IBV_WC_SUCCESS;
    // This is IBV_WC_REM_ACCESS_ERR of verbs.h.
    let refused = 10;
    for error in [ibv_wc_status::IBV_WC_WR_FLUSH_ERR, refused] {
        for wr_id in [RECV | 3, 3] {
            let completed = read(wr_id, error);
            assert_eq!((completed.byte_len, completed.is_message), (0, true));
            assert_eq!((completed.qp_num, completed.wr_id, completed.vendor_err), (9, wr_id, 7));
        }
    }
    assert_eq!(read(3, ok).byte_len, 0);
    assert_eq!(read(RECV | 3, ok).byte_len, GARBAGE);
}
