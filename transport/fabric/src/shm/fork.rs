//! Checks that a child of fork(2) does not wait for a value that another thread of its parent was
//! making (R23).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma_memory::test_util::process::fork;

use crate::shm::boot_id;
use crate::shm::same_user::is_overflow_user;

const PROCESSES: u32 = 100;
/// The delays of the forks cover this time, in which a thread reads a file of /proc.
const READING: Duration = Duration::from_micros(200);
/// A child that takes longer than this counts as waiting for ever.
const LIMIT_SECONDS: u32 = 20;

/// Reads the value in a child. A thread of the child's parent begins to read the value `delay`
/// before the fork.
fn read_in_child(read: fn(), delay: Duration) -> bool {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    let reader = thread::spawn(move || {
        BEGUN.store(true, SeqCst);
        read();
    });
    while !BEGUN.load(SeqCst) {
        thread::yield_now();
    }
    let begun = Instant::now();
    while begun.elapsed() < delay {
        std::hint::spin_loop();
    }
    let child = fork(|| {
        // SAFETY: the call takes only a number. The alarm ends the child if the value is never
        // made.
        unsafe { libc::alarm(LIMIT_SECONDS) };
        read();
    });
    reader.join().unwrap();
    child.unwrap().wait().unwrap()
}

#[test]
fn a_child_does_not_wait_for_its_parents_threads() {
    let read_boot_id = || assert!(!boot_id().unwrap().is_empty());
    let read_overflow_uid = || assert!(!is_overflow_user(0));
    for read in [read_boot_id, read_overflow_uid] as [fn(); 2] {
        for n in 0..PROCESSES {
            // The value is made once in each process.
            let process = fork(|| assert!(read_in_child(read, READING * n / PROCESSES))).unwrap();
            assert!(process.wait().unwrap(), "delay {n}: the child waits, or has failed");
        }
    }
}
