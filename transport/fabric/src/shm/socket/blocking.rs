//! Threads for calls that may block. The threads take a peer's descriptors, and close sockets whose
//! queues may hold descriptors.
//!
//! A descriptor may refer to any file that the peer chooses, and calls on an unknown file may
//! block. A TCP socket with SO_LINGER waits in close(2) until its data is sent, with or without
//! O_NONBLOCK. A call on a FUSE file waits for the FUSE server. A process that holds another copy
//! of the descriptor can change such a file at any time. The thread that closes a socket also
//! closes the descriptors in its queue. A call that takes a message without room for its
//! descriptors also closes these descriptors. So only these threads call recvmsg(2) with room for
//! descriptors, make calls on descriptors of unknown kinds, and close such descriptors and every
//! socket whose other end belongs to a peer. These threads also call munmap(2) on a peer's file if
//! there is a lot to unmap, which is slow.
//!
//! A job may never end. Therefore these rules apply:
//!
//! - Clients that have shown a ticket have a separate pool, which other clients cannot block.
//! - A user has at most half of the threads of a pool.
//! - A user with too many sockets that wait to be closed gets no new connections (`listener`).
//! - A connection has at most one job that takes descriptors, and waits for it without a thread.
//! - Neither a runtime that is shut down nor the process waits for these threads to end.
//!
//! | a thread | on | then |
//! |---|---|---|
//! | works | a job whose user has not reached its limit is queued | works |
//! | works | no such job is queued | waits |
//! | waits | a job is queued | works |
//! | waits | [`IDLE_TIMEOUT`] has passed | ends |

use tonic_rdma_memory::{PerProcess, throttled};

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Maximum number of threads of a pool.
const MAX_THREADS: usize = 64;
/// The maximum number of pool threads that run jobs of one user.
const MAX_THREADS_PER_USER: usize = MAX_THREADS / 2;
/// A thread without a job ends after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// The size of a thread's stack in bytes.
const STACK_SIZE: usize = 128 << 10;

/// The pool for clients that have not shown a ticket.
pub(crate) static STRANGERS: PerProcess<ThreadPool> = PerProcess::new(ThreadPool::new);
/// The pool for all other connections.
pub(crate) static PEERS: PerProcess<ThreadPool> = PerProcess::new(ThreadPool::new);

type Job = Box<dyn FnOnce() + Send>;

/// A bounded number of threads.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    state: Mutex<ThreadPoolState>,
    queued: Condvar,
}

struct ThreadPoolState {
    queue: VecDeque<(u32, Job)>,
    /// Number of busy threads for each user whose jobs they run.
    busy: BTreeMap<u32, usize>,
    /// Number of sockets to close, by the user of their peers.
    closing: BTreeMap<u32, usize>,
    threads: usize,
    waiting: usize,
}

impl std::fmt::Debug for ThreadPoolState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ThreadPoolState { queue, busy, closing, threads, waiting } = self;
        let mut out = f.debug_struct("ThreadPoolState");
        out.field("queued", &queue.len()).field("busy", busy).field("closing", closing);
        out.field("threads", threads).field("waiting", waiting).finish()
    }
}

impl ThreadPool {
    const fn new() -> ThreadPool {
        let state = ThreadPoolState {
            queue: VecDeque::new(),
            busy: BTreeMap::new(),
            closing: BTreeMap::new(),
            threads: 0,
            waiting: 0,
        };
        ThreadPool { state: Mutex::new(state), queued: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, ThreadPoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job on behalf of a peer of this user. Does not wait for the job.
    pub(crate) fn run(&'static self, user: u32, job: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.queue.push_back((user, Box::new(job)));
        // Up to the maximum, each job gets a new thread unless a thread is waiting, because earlier
        // jobs may never end.
        let spawn = state.queue.len() > state.waiting && state.threads < MAX_THREADS;
        if spawn {
            state.threads += 1;
        }
        drop(state);
        self.queued.notify_one();
        if spawn {
            let thread =
                thread::Builder::new().name("tonic-rdma-fd".to_owned()).stack_size(STACK_SIZE);
            if let Err(error) = thread.spawn(|| self.work()) {
                self.lock().threads -= 1;
                // The job stays queued. An existing thread takes the job, or a thread that a later
                // job starts.
                tracing::debug!(%error, "no thread for descriptors of peers");
            }
        }
    }

    /// Closes a socket of a peer of this user.
    pub(crate) fn close(&'static self, user: u32, socket: impl Send + 'static) {
        *self.lock().closing.entry(user).or_default() += 1;
        self.run(user, move || {
            drop(socket);
            count_down(&mut self.lock().closing, user);
        });
    }

    /// Number of sockets of this user's peers that still have to be closed.
    pub(crate) fn closing(&self, user: u32) -> usize {
        self.lock().closing.get(&user).copied().unwrap_or(0)
    }

    /// Number of jobs that no thread has taken.
    pub(crate) fn backlog(&self) -> usize {
        self.lock().queue.len()
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let ThreadPoolState { queue, busy, .. } = &mut *state;
            let free =
                |user: &u32| busy.get(user).is_none_or(|threads| *threads < MAX_THREADS_PER_USER);
            let next =
                queue.iter().position(|(user, _)| free(user)).and_then(|at| queue.remove(at));
            let Some((user, job)) = next else {
                state.waiting += 1;
                let timed_out;
                (state, timed_out) = match self.queued.wait_timeout(state, IDLE_TIMEOUT) {
                    Ok((state, result)) => (state, result.timed_out()),
                    Err(poisoned) => (poisoned.into_inner().0, false),
                };
                state.waiting -= 1;
                if timed_out && state.queue.is_empty() {
                    state.threads -= 1;
                    return;
                }
                continue;
            };
            *busy.entry(user).or_default() += 1;
            drop(state);
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                throttled!(error, "a job for descriptors of a peer panicked");
            }
            state = self.lock();
            count_down(&mut state.busy, user);
        }
    }
}

fn count_down(counts: &mut BTreeMap<u32, usize>, user: u32) {
    if let Some(count) = counts.get_mut(&user) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn jobs_that_never_end_hold_up_neither_others_nor_other_users() {
        static POOL: ThreadPool = ThreadPool::new();
        let (stuck, stuck_end) = mpsc::channel::<()>();
        let stuck_end = std::sync::Arc::new(Mutex::new(stuck_end));
        let (done, told) = mpsc::channel();
        let stick = |user| {
            let (end, done) = (stuck_end.clone(), done.clone());
            POOL.run(user, move || {
                let _ = end.lock().unwrap().recv();
                done.send(user).unwrap();
            });
        };
        let quick = |user| {
            let done = done.clone();
            POOL.run(user, move || done.send(user).unwrap());
        };
        stick(1);
        quick(1);
        assert_eq!(told.recv_timeout(TIMEOUT), Ok(1), "there is a thread for each");
        for _ in 0..2 * MAX_THREADS {
            stick(1);
        }
        struct Slow(mpsc::Sender<u32>);
        impl Drop for Slow {
            fn drop(&mut self) {
                self.0.send(3).unwrap();
            }
        }
        POOL.close(1, Slow(done.clone()));
        quick(1);
        quick(2);
        assert_eq!(told.recv_timeout(TIMEOUT), Ok(2), "another user is not kept waiting");
        assert!(told.try_recv().is_err() && POOL.backlog() > MAX_THREADS);
        assert_eq!((POOL.closing(1), POOL.closing(2)), (1, 0));
        assert_eq!(POOL.lock().busy.get(&1), Some(&MAX_THREADS_PER_USER));
        assert!(POOL.lock().threads <= MAX_THREADS);
        drop(stuck);
        let rest: Vec<_> =
            (0..2 * MAX_THREADS + 3).map(|_| told.recv_timeout(TIMEOUT).unwrap()).collect();
        assert_eq!(rest.iter().filter(|told| **told == 3).count(), 1);
        while POOL.closing(1) > 0 {
            thread::yield_now();
        }
    }
}
