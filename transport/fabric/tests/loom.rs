//! Sleep and wake-up over shared memory under loom, which tries every interleaving and every
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

/// The part of a ring that wake-ups need: slots, the tail, the flag, the eventfd, and the number of
/// writes to it.
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

/// A receiver that sleeps and wakes as links do gets two messages, with no more wake-ups than
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
                wait_flag::raise(&ring.waiting);
                raised += 1;
                if ring.has(message) {
                    wait_flag::lower(&ring.waiting);
                    break;
                }
                // The wake-up may be a late one, from a sleep that was abandoned at the last
                // moment. After a lost one this thread would wait forever, which loom reports.
                ring.event_fd.wait();
            }
            ring.read(message);
        }
        sender.join().unwrap();
        assert!(ring.wakes.load(Ordering::Relaxed) <= raised);
    });
}
