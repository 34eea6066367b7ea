//! Sleeping and waking over shared memory under loom, which tries every interleaving and every
//! outcome that the memory model allows.
#![allow(clippy::unwrap_used, reason = "a test")]

mod atomics {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}
#[path = "../src/shm/wakeup/wait_flag.rs"]
mod wait_flag;

use atomics::{AtomicU64, Ordering};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use loom::thread;

/// A ring as far as waking goes: slots, the tail, the flag, the eventfd, and how often it was
/// written to.
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
            // SAFETY: loom checks that nobody reads it meanwhile.
            unsafe { *slot = message + 40 }
        });
        self.tail.store(message + 1, Ordering::Release);
        if wait_flag::must_wake(&self.waiting) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            self.event_fd.notify();
        }
    }

    fn has(&self, message: u64) -> bool {
        self.tail.load(Ordering::Acquire) > message
    }

    fn read(&self, message: u64) {
        self.slots[message as usize].with(|slot| {
            // SAFETY: loom checks that nobody writes it meanwhile.
            assert_eq!(unsafe { *slot }, message + 40);
        });
    }
}

/// A receiver that goes to sleep while a message is sent has seen it, or is woken: one of the two.
#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let ring = Arc::new(Ring::new());
        let sender = {
            let ring = ring.clone();
            thread::spawn(move || ring.send(0))
        };
        wait_flag::raise(&ring.waiting);
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

/// A receiver that sleeps and wakes as links do gets two messages, and is not woken more often than
/// it slept.
#[test]
fn each_sleep_ends() {
    // All of it takes a minute; four switches at the worst moments are all that has ever been
    // needed.
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
                wait_flag::raise(&ring.waiting);
                raised += 1;
                if ring.has(message) {
                    wait_flag::lower(&ring.waiting);
                    break;
                }
                // The wake-up may be a late one, for a sleep that was given up at the last moment.
                // A lost one would leave this thread here for ever, which loom reports.
                ring.event_fd.wait();
            }
            ring.read(message);
        }
        sender.join().unwrap();
        assert!(ring.wakes.load(Ordering::Relaxed) <= raised);
    });
}
