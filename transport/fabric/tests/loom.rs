//! Sleeping and waking over shared memory, tested under loom. Loom tries every interleaving, up to
//! a limit on preemptions in some tests, and every outcome that the memory model allows.
#![allow(clippy::unwrap_used, reason = "a test")]

mod atomics {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}
#[path = "../src/shm/wakeup/wait_flag.rs"]
mod wait_flag;
#[allow(dead_code, reason = "not all of it is tried here")]
#[path = "../src/shm/wakeup/wake_page.rs"]
mod wake_page;

mod shm {
    pub(crate) mod wakeup {
        pub(crate) use crate::wait_flag;
    }
}

use atomics::{AtomicU64, Ordering};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use loom::thread;
use wake_page::Direction;

/// The part of a ring that wake-ups need: slots, the tail, the flag, the eventfd, and the number of
/// writes to the eventfd.
struct Ring {
    slots: [UnsafeCell<u64>; 2],
    tail: AtomicU64,
    waiting: AtomicU64,
    event_fd: Notify,
    wakes: AtomicU64,
}

impl Ring {
    fn new() -> Ring {
        Ring {
            slots: Default::default(),
            tail: AtomicU64::default(),
            waiting: AtomicU64::default(),
            event_fd: Notify::new(),
            wakes: AtomicU64::default(),
        }
    }

    fn send(&self, message: u64) {
        self.slots[message as usize].with_mut(|slot| {
            // SAFETY: loom checks that nobody reads it concurrently.
            unsafe { *slot = message + 40 }
        });
        self.tail.store(message + 1, Ordering::Release);
        if wait_flag::must_wake(&self.waiting) != 0 {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            self.event_fd.notify();
        }
    }

    fn has(&self, message: u64) -> bool {
        self.tail.load(Ordering::Acquire) > message
    }

    fn read(&self, message: u64) {
        self.slots[message as usize].with(|slot| {
            // SAFETY: loom checks that nobody writes it concurrently.
            assert_eq!(unsafe { *slot }, message + 40);
        });
    }
}

/// A receiver that goes to sleep while a message is sent either sees the message or is woken.
#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let ring = Arc::new(Ring::new());
        let sender = {
            let ring = ring.clone();
            thread::spawn(move || ring.send(0))
        };
        wait_flag::raise(&ring.waiting, 1);
        let sleeps = !ring.has(0);
        if !sleeps {
            wait_flag::lower(&ring.waiting);
            ring.read(0);
        }
        sender.join().unwrap();
        if sleeps {
            assert_eq!(ring.wakes.load(Ordering::Relaxed), 1, "it sleeps for ever");
            assert!(ring.has(0));
            ring.read(0);
        }
    });
}

/// A receiver sleeps and wakes as links do. It gets two messages, with no more wake-ups than
/// sleeps.
#[test]
fn each_sleep_ends() {
    // The full search takes a minute. No failure has ever needed more than four preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(|| {
        let ring = Arc::new(Ring::new());
        let sender = {
            let ring = ring.clone();
            thread::spawn(move || {
                ring.send(0);
                ring.send(1);
            })
        };
        let mut raised = 0;
        for message in 0..2 {
            while !ring.has(message) {
                wait_flag::raise(&ring.waiting, 1);
                raised += 1;
                if ring.has(message) {
                    wait_flag::lower(&ring.waiting);
                    break;
                }
                // The wake-up may be late, from a sleep that was abandoned at the last moment.
                // After a lost wake-up this thread would wait forever, which loom reports.
                ring.event_fd.wait();
            }
            ring.read(message);
        }
        sender.join().unwrap();
        assert!(ring.wakes.load(Ordering::Relaxed) <= raised);
    });
}

/// One direction of a channel: its words, the eventfd, the number of signals to the eventfd, and
/// what was sent to two connections.
struct Channel {
    words: Vec<AtomicU64>,
    event_fd: Notify,
    writes: AtomicU64,
    sent: [AtomicU64; 2],
}

impl Channel {
    fn new() -> Arc<Channel> {
        Arc::new(Channel {
            // The words before the bits, and one word of bits.
            words: (0..17).map(|_| AtomicU64::new(0)).collect(),
            event_fd: Notify::new(),
            writes: AtomicU64::new(0),
            sent: Default::default(),
        })
    }

    fn direction(&self) -> Direction<'_> {
        Direction(&self.words)
    }

    fn send(&self, connection: u16) {
        self.sent[usize::from(connection)].store(1, Ordering::Relaxed);
        if self.direction().set(connection) {
            self.writes.fetch_add(1, Ordering::Relaxed);
            self.event_fd.notify();
        }
    }

    /// Takes bits, and marks the connections that are woken. Asserts that what was sent to them is
    /// visible.
    fn take(&self, woken: &mut [bool; 2]) -> bool {
        let mut any = false;
        for connection in self.direction().take().map(usize::from) {
            assert_eq!(self.sent[connection].load(Ordering::Relaxed), 1);
            woken[connection] = true;
            any = true;
        }
        any
    }
}

/// The poller sleeps and wakes while two threads send on two connections. Each connection is woken,
/// and the eventfd is signalled no more often than the poller sleeps.
#[test]
fn a_channel_wakes_each_connection() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let channel = Channel::new();
        let senders = [0, 1].map(|connection| {
            let channel = channel.clone();
            thread::spawn(move || channel.send(connection))
        });
        let (mut woken, mut sleeps) = ([false; 2], 0);
        while woken != [true; 2] {
            channel.take(&mut woken);
            channel.direction().raise();
            sleeps += 1;
            if channel.take(&mut woken) {
                channel.direction().lower();
            } else if woken != [true; 2] {
                // After a lost wake-up this thread would wait forever, which loom reports.
                channel.event_fd.wait();
            }
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        assert!(channel.writes.load(Ordering::Relaxed) <= sleeps);
    });
}

/// With one connection there is no poller. The task that the eventfd wakes says that it sleeps, and
/// takes the bits.
#[test]
fn a_channel_without_a_poller_wakes_its_connection() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let channel = Channel::new();
        channel.direction().raise();
        let sender = {
            let channel = channel.clone();
            thread::spawn(move || channel.send(0))
        };
        // The runtime may also report an earlier signal of the eventfd.
        let signalled = |woken: &mut [bool; 2]| {
            channel.direction().raise();
            channel.take(woken);
        };
        let mut woken = [false; 2];
        signalled(&mut woken);
        while !woken[0] {
            channel.event_fd.wait();
            signalled(&mut woken);
        }
        sender.join().unwrap();
    });
}
