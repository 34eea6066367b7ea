//! The state of a completion queue that queue pairs share: which queue pair a completion belongs
//! to, who polls the queue, and who is woken (R6). The code of this module runs under the lock of
//! the queue, so only one thread polls at a time. The parent module documents the protocol.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::task::Waker;

/// Maximum number of completions that one call takes from the queue.
pub(crate) const BATCH: usize = 32;

/// Marks the work-request id of a RECV.
pub(crate) const RECV: u64 = 1 << 63;
/// The work-request id of a probe, whose completion is always reported.
pub(crate) const PROBE: u64 = 1 << 62;
/// Marks the work-request ids of the messages that prove the path. Their completions are always
/// reported.
pub(crate) const PROOF: u64 = 1 << 61;

/// Once one poll has taken more than this many completions for other members, it releases the lock.
const MAX_OTHERS: usize = 1024;

/// Maximum capacity that an empty inbox keeps.
const MAX_KEPT: usize = 64;

/// The completions that make an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Armed {
    /// No completion.
    Not,
    /// Received messages and errors (IBV_SEND_SOLICITED, ibv_req_notify_cq(3)). On Soft-RoCE an
    /// error makes no event in this state, because `rxe_cq_post` in Linux checks only whether the
    /// packet is solicited. The probe of a silent peer finds such errors.
    Solicited,
    /// Any completion, solicited or not.
    All,
}

/// The fields of a work completion that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completed {
    pub(crate) qp_num: u32,
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) vendor_err: u32,
    /// The length of a received message in bytes, or 0 for any other completion.
    pub(crate) byte_len: u32,
    /// True for a received message or a failure, which wake a member that sleeps for
    /// [`Armed::Solicited`].
    pub(crate) is_message: bool,
}

/// The queue of a device.
pub(crate) trait Queue {
    /// Takes up to [`BATCH`] completions and returns their number. If the number is less than
    /// [`BATCH`], the queue is empty.
    ///
    /// # Errors
    /// The queue is broken.
    fn take(&mut self, each: impl FnMut(&Completed)) -> io::Result<usize>;

    /// Arms the queue: the next completion of this kind makes an event.
    ///
    /// # Errors
    /// The queue is broken.
    fn arm(&mut self, what: Armed) -> io::Result<()>;
}

/// A queue pair on the queue. Once the queue pair is destroyed, another queue pair may get its
/// number, but never its serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberId {
    qp_num: u32,
    serial: u64,
}

#[derive(Debug)]
struct Member {
    serial: u64,
    /// Completions that other pollers have taken for this member, in order.
    inbox: Vec<Completed>,
    /// The waker with which this member last went to sleep.
    waker: Option<Waker>,
    /// The completions that wake this member. [`Armed::Not`] if the member is awake.
    sleeps_for: Armed,
}

/// Hashes queue pair numbers. The numbers are unique and often consecutive, so a multiplication
/// suffices to spread them.
#[derive(Default)]
pub(crate) struct QpNumHasher(u64);

impl Hasher for QpNumHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Polled {
    /// Completions of the queue pair that polled.
    pub(crate) own: usize,
    /// True if the queue was empty at the end.
    pub(crate) drained: bool,
}

/// The answer to a queue pair that asks to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// The queue pair sleeps. Its next completion of the given kind wakes its task.
    Asleep,
    /// Completions have arrived for the queue pair, or the queue is not empty, so the queue pair
    /// polls again.
    PollAgain,
    /// Nobody would wake the queue pair, so it polls again after other tasks have run.
    Orphaned,
}

/// The reactor's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReactorStep {
    /// The reactor looks at the queue again, after other tasks have run.
    LookAgain,
    /// The reactor waits for an event.
    Wait,
}

/// The reason why a queue can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A call failed, with this errno.
    Call(i32),
    /// The device had no place for a completion, or can no longer use the queue.
    Overrun,
    /// The device reported a fatal error.
    DeviceFatal,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Call(error.raw_os_error().unwrap_or_default())
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        match failure {
            Failure::Call(errno) => io::Error::from_raw_os_error(errno),
            Failure::Overrun => {
                io::Error::other("the completion queue has overrun (IBV_EVENT_CQ_ERR)")
            }
            Failure::DeviceFatal => {
                io::Error::other("the device has failed (IBV_EVENT_DEVICE_FATAL)")
            }
        }
    }
}

/// Counts the members that sleep.
#[derive(Debug, Default)]
struct Sleepers {
    solicited: usize,
    all: usize,
}

impl Sleepers {
    fn count(&mut self, what: Armed) -> Option<&mut usize> {
        match what {
            Armed::Not => None,
            Armed::Solicited => Some(&mut self.solicited),
            Armed::All => Some(&mut self.all),
        }
    }

    /// Notes that a member that slept for `from` now sleeps for `to`.
    fn change(&mut self, from: Armed, to: Armed) {
        if let Some(n) = self.count(from) {
            *n -= 1;
        }
        if let Some(n) = self.count(to) {
            *n += 1;
        }
    }

    /// The completions that the queue must be armed for.
    fn need(&self) -> Armed {
        match (self.all, self.solicited) {
            (1.., _) => Armed::All,
            (0, 1..) => Armed::Solicited,
            (0, 0) => Armed::Not,
        }
    }
}

/// A completion queue, its members and their inboxes.
#[derive(Debug)]
pub(crate) struct Dispatch<Q> {
    queue: Q,
    /// The number of completions that the queue has room for.
    entries: usize,
    members: HashMap<u32, Member, BuildHasherDefault<QpNumHasher>>,
    next_serial: u64,
    sleepers: Sleepers,
    /// The completions for which the queue will make its next event.
    armed: Armed,
    /// True if the queue was armed a second time, for more completions, since the last event was
    /// taken. Two events may then come.
    armed_twice: bool,
    /// True if the reactor will look at the queue again without an event.
    looking: bool,
    /// The number of polls by members that have polled before and have not slept since.
    busy_polls: u64,
    /// The value of `busy_polls` when the reactor last looked at the queue.
    busy_polls_seen: u64,
    failure: Option<Failure>,
    /// True once nobody waits for events any more.
    orphaned: bool,
}

impl<Q: Queue> Dispatch<Q> {
    pub(crate) fn new(queue: Q, entries: usize) -> Dispatch<Q> {
        Dispatch {
            queue,
            entries,
            members: HashMap::default(),
            next_serial: 0,
            sleepers: Sleepers::default(),
            armed: Armed::Not,
            armed_twice: false,
            looking: false,
            busy_polls: 0,
            busy_polls_seen: 0,
            failure: None,
            orphaned: false,
        }
    }

    pub(crate) fn queue_mut(&mut self) -> &mut Q {
        &mut self.queue
    }

    /// Adds a queue pair on which nothing has been posted. Completions that are already in the
    /// queue and carry this number belong to an earlier queue pair.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn join(&mut self, qp_num: u32, wake: &mut Vec<Waker>) -> io::Result<MemberId> {
        self.check()?;
        self.take_present(None, wake)?;
        self.next_serial += 1;
        let serial = self.next_serial;
        let member = Member { serial, inbox: Vec::new(), waker: None, sleeps_for: Armed::Not };
        if let Some(earlier) = self.members.insert(qp_num, member) {
            self.sleepers.change(earlier.sleeps_for, Armed::Not);
        }
        Ok(MemberId { qp_num, serial })
    }

    /// Removes a queue pair that was destroyed, and drops its completions to free their entries.
    pub(crate) fn leave(&mut self, me: MemberId, wake: &mut Vec<Waker>) {
        if let Err(error) = self.take_present(Some(me), wake) {
            self.fail(error.into(), wake);
        }
        if self.members.get(&me.qp_num).is_some_and(|member| member.serial == me.serial)
            && let Some(member) = self.members.remove(&me.qp_num)
        {
            self.sleepers.change(member.sleeps_for, Armed::Not);
        }
    }

    /// Hands the completions of a member to `own`, at most `max` plus one batch, and puts the
    /// completions of other members into their inboxes. `busy` says that the member has polled
    /// before and has not slept since.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn poll(
        &mut self,
        me: MemberId,
        busy: bool,
        max: usize,
        own: &mut impl FnMut(&Completed),
        wake: &mut Vec<Waker>,
    ) -> io::Result<Polled> {
        self.busy_polls += u64::from(busy);
        let member = self.members.get_mut(&me.qp_num).filter(|member| member.serial == me.serial);
        if let Some(member) = member {
            self.sleepers.change(member.sleeps_for, Armed::Not);
            member.sleeps_for = Armed::Not;
            if !member.inbox.is_empty() {
                let n = member.inbox.len().min(max);
                member.inbox.drain(..n).for_each(|completed| own(&completed));
                if member.inbox.is_empty() {
                    member.inbox.shrink_to(MAX_KEPT);
                }
                return Ok(Polled { own: n, drained: false });
            }
        }
        self.check()?;
        self.drain(Some(me), max, own, wake)
    }

    /// Puts a member to sleep until it has a completion that `what` selects. Call this function
    /// after [`poll`](Self::poll) has drained the queue. If the queue is not armed for those
    /// completions, and the reactor will not look at the queue by itself, arms the queue and polls
    /// it once more.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn sleep(
        &mut self,
        me: MemberId,
        what: Armed,
        waker: &Waker,
        own: &mut impl FnMut(&Completed),
        wake: &mut Vec<Waker>,
    ) -> io::Result<Sleep> {
        self.check()?;
        let member = self.members.get_mut(&me.qp_num).filter(|member| member.serial == me.serial);
        let Some(member) = member else { return Ok(Sleep::Asleep) };
        if !member.inbox.is_empty() {
            return Ok(Sleep::PollAgain);
        }
        if self.orphaned {
            return Ok(Sleep::Orphaned);
        }
        if member.waker.as_ref().is_none_or(|known| !known.will_wake(waker)) {
            member.waker = Some(waker.clone());
        }
        self.sleepers.change(member.sleeps_for, what);
        member.sleeps_for = what;
        if self.looking || self.armed >= self.sleepers.need() {
            return Ok(Sleep::Asleep);
        }
        self.arm()?;
        let polled = self.drain(Some(me), usize::MAX, own, wake)?;
        if polled.own == 0 && polled.drained {
            return Ok(Sleep::Asleep);
        }
        if let Some(member) = self.members.get_mut(&me.qp_num) {
            self.sleepers.change(member.sleeps_for, Armed::Not);
            member.sleeps_for = Armed::Not;
        }
        Ok(Sleep::PollAgain)
    }

    /// Lets every completion of a sleeping member wake that member. Call this function before the
    /// member posts work whose completion it awaits.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn announce_all(&mut self, me: MemberId) -> io::Result<()> {
        let member = self.members.get_mut(&me.qp_num).filter(|member| member.serial == me.serial);
        let Some(member) = member.filter(|member| member.sleeps_for == Armed::Solicited) else {
            return Ok(());
        };
        self.sleepers.change(member.sleeps_for, Armed::All);
        member.sleeps_for = Armed::All;
        if self.looking || self.armed == Armed::All {
            return Ok(());
        }
        self.arm()
    }

    /// Notes that an event was taken. Returns true if there may be another event.
    ///
    /// Making an event disarms the queue. So after one event was taken, no other event comes until
    /// the queue is armed again, unless the queue had been armed twice.
    pub(crate) fn take_event(&mut self) -> bool {
        self.armed = Armed::Not;
        std::mem::take(&mut self.armed_twice)
    }

    /// Drains the queue for the reactor, and arms the queue if any member sleeps. The table in the
    /// parent module has the details.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn look(&mut self, wake: &mut Vec<Waker>) -> io::Result<ReactorStep> {
        self.check()?;
        loop {
            let drained = self.drain(None, usize::MAX, &mut |_| {}, wake)?.drained;
            let polled = self.busy_polls != self.busy_polls_seen;
            self.busy_polls_seen = self.busy_polls;
            self.looking = !drained || (polled && self.armed < self.sleepers.need());
            if self.looking {
                return Ok(ReactorStep::LookAgain);
            }
            if self.armed >= self.sleepers.need() {
                return Ok(ReactorStep::Wait);
            }
            self.arm()?;
        }
    }

    /// Marks the queue as failed, and wakes all sleeping members, which then learn of the failure.
    pub(crate) fn fail(&mut self, failure: Failure, wake: &mut Vec<Waker>) {
        self.failure.get_or_insert(failure);
        self.wake_all(wake);
    }

    /// Notes that the reactor has ended. From now on members poll without sleeping.
    pub(crate) fn orphan(&mut self, wake: &mut Vec<Waker>) {
        self.orphaned = true;
        self.looking = false;
        self.wake_all(wake);
    }

    fn wake_all(&mut self, wake: &mut Vec<Waker>) {
        for member in self.members.values_mut() {
            self.sleepers.change(member.sleeps_for, Armed::Not);
            member.sleeps_for = Armed::Not;
            wake.extend(member.waker.take());
        }
    }

    /// True if the queue has failed. The members of a failed queue end, and no new members join.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    fn check(&self) -> io::Result<()> {
        self.failure.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Arms the queue for the completions that sleeping members need.
    fn arm(&mut self) -> io::Result<()> {
        let need = self.sleepers.need();
        self.queue.arm(need)?;
        self.armed_twice |= self.armed != Armed::Not;
        self.armed = need;
        self.busy_polls_seen = self.busy_polls;
        Ok(())
    }

    /// Takes the completions that the queue has now, and drops the completions of `me`. Busy queue
    /// pairs may add further completions all the time, so the function stops once it has taken as
    /// many as the queue has room for (R20).
    fn take_present(&mut self, me: Option<MemberId>, wake: &mut Vec<Waker>) -> io::Result<()> {
        let (mut taken, mut dropped) = (0, 0);
        while taken < self.entries {
            let before = dropped;
            let polled = self.drain(me, usize::MAX, &mut |_| dropped += 1, wake)?;
            if polled.drained {
                break;
            }
            // If the queue was not drained, at least this many completions of other members were
            // taken.
            taken += MAX_OTHERS + (dropped - before);
        }
        Ok(())
    }

    /// Takes completions until the queue is empty or the limit is reached.
    fn drain(
        &mut self,
        me: Option<MemberId>,
        max: usize,
        own: &mut impl FnMut(&Completed),
        wake: &mut Vec<Waker>,
    ) -> io::Result<Polled> {
        let Dispatch { queue, members, sleepers, .. } = self;
        // If another queue pair now has the number of `me`, completions with that number belong to
        // the other queue pair.
        let me = me.filter(|me| members.get(&me.qp_num).is_some_and(|m| m.serial == me.serial));
        let (mut polled, mut others) = (Polled::default(), 0);
        loop {
            let n = queue.take(|completed| {
                if me.is_some_and(|me| me.qp_num == completed.qp_num) {
                    own(completed);
                    polled.own += 1;
                    return;
                }
                others += 1;
                // Completions of a destroyed queue pair may come late. Nobody waits for such
                // completions.
                let Some(member) = members.get_mut(&completed.qp_num) else { return };
                member.inbox.push(*completed);
                let wakes = match member.sleeps_for {
                    Armed::Not => false,
                    Armed::Solicited => completed.is_message,
                    Armed::All => true,
                };
                if wakes {
                    sleepers.change(member.sleeps_for, Armed::Not);
                    member.sleeps_for = Armed::Not;
                    wake.extend(member.waker.clone());
                }
            })?;
            if n < BATCH {
                return Ok(Polled { drained: true, ..polled });
            }
            if polled.own.saturating_add(BATCH) > max || others > MAX_OTHERS {
                return Ok(polled);
            }
        }
    }
}
