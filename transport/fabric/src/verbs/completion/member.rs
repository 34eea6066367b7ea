//! The share of one queue pair in a completion queue.

use std::io;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::verbs::completion::dispatch::{Armed, Completed, MemberId, Polled, Sleep};
use crate::verbs::completion::shard::{SharedCq, wake_all};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;

/// A number of entries of a queue, reserved for a queue pair that is about to be made.
#[derive(Debug)]
pub(crate) struct Reservation {
    cq: Arc<SharedCq>,
    entries: u32,
}

impl Reservation {
    /// Finds a queue of the current runtime with room for `entries` completions, or makes a queue
    /// with at most `max_entries`.
    ///
    /// # Errors
    /// The device or the runtime refuses.
    pub(crate) fn new(
        device: &Arc<DeviceContext>,
        entries: u32,
        max_entries: u32,
    ) -> io::Result<Reservation> {
        let cq = SharedCq::reserve(device, entries, max_entries)?;
        Ok(Reservation { cq, entries })
    }

    pub(crate) fn cq(&self) -> *mut rdma_sys::ibv_cq {
        self.cq.as_ptr()
    }

    /// Joins the queue with a queue pair that was made on it and on which nothing was posted.
    ///
    /// # Errors
    /// The queue is broken. The reservation is returned, because the queue must not be destroyed
    /// before the queue pair.
    pub(crate) fn join(self, qp_num: u32) -> Result<CqMember, (Reservation, io::Error)> {
        let mut wake = Vec::new();
        let joined = self.cq.dispatch().join(qp_num, &mut wake);
        wake_all(&mut wake);
        match joined {
            Ok(id) => Ok(CqMember { id, reservation: self, asleep: None, taken: Vec::new(), wake }),
            Err(error) => Err((self, error)),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        self.cq.release(self.entries);
    }
}

/// A queue pair on a completion queue. After [`leave`](CqMember::leave), its completions are
/// dropped.
#[derive(Debug)]
pub(crate) struct CqMember {
    id: MemberId,
    reservation: Reservation,
    /// The completions that wake the queue pair, or `None` while it is awake, as far as this end
    /// knows.
    asleep: Option<Armed>,
    /// The completions of this end and the wakers of other members, to be handled after the lock is
    /// released. Both vectors are reused, so that a poll costs no allocation.
    taken: Vec<Completed>,
    wake: Vec<Waker>,
}

impl CqMember {
    /// Hands completions to `own`, at most `max` plus one batch. `busy` says that this end has
    /// polled before and has not slept since.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn poll(
        &mut self,
        busy: bool,
        max: usize,
        own: impl FnMut(&Completed),
    ) -> io::Result<Polled> {
        self.asleep = None;
        let CqMember { id, reservation, taken, wake, .. } = self;
        let dispatch = match busy {
            true => reservation.cq.try_dispatch(),
            false => Some(reservation.cq.dispatch()),
        };
        let polled = match dispatch {
            Some(mut dispatch) => {
                dispatch.poll(*id, busy, max, &mut |completed| taken.push(*completed), wake)
            }
            // Another task is polling the queue, and puts this end's completions into the inbox of
            // this end.
            None => return Ok(Polled { own: 0, drained: true }),
        };
        hand_over(wake, taken, own);
        polled
    }

    /// See [`Dispatch::sleep`](crate::verbs::completion::dispatch::Dispatch::sleep).
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn sleep(
        &mut self,
        cx: &Context<'_>,
        what: Armed,
        own: impl FnMut(&Completed),
    ) -> io::Result<Sleep> {
        let CqMember { id, reservation, taken, wake, .. } = self;
        let mut dispatch = reservation.cq.dispatch();
        let own_too = &mut |completed: &Completed| taken.push(*completed);
        let sleep = dispatch.sleep(*id, what, cx.waker(), own_too, wake);
        drop(dispatch);
        self.asleep = matches!(sleep, Ok(Sleep::Asleep)).then_some(what);
        hand_over(wake, taken, own);
        sleep
    }

    /// Makes every completion wake this end. Call this function before posting work whose
    /// completion is awaited.
    ///
    /// # Errors
    /// The queue is broken.
    pub(crate) fn announce_all(&mut self) -> io::Result<()> {
        if self.asleep != Some(Armed::Solicited) {
            return Ok(());
        }
        self.asleep = Some(Armed::All);
        self.reservation.cq.dispatch().announce_all(self.id)
    }

    /// Leaves the queue after the queue pair was destroyed.
    pub(crate) fn leave(&mut self) {
        self.reservation.cq.dispatch().leave(self.id, &mut self.wake);
        wake_all(&mut self.wake);
    }
}

/// Wakes other members and hands completions to `own`. The caller must not hold the lock, because
/// wakers and `own` may run any code and take a long time.
fn hand_over(wake: &mut Vec<Waker>, taken: &mut Vec<Completed>, mut own: impl FnMut(&Completed)) {
    wake_all(wake);
    taken.drain(..).for_each(|completed| own(&completed));
}
