//! Memory files under RLIMIT_FSIZE, and under a profiler's signals. Each test runs in a child of
//! fork(2), because limits and signals apply to a whole process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::ErrorKind;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use tonic_rdma_memory::test_util::process::{fork, limit_file_size, signal_all_threads};
use tonic_rdma_memory::{LandableBuf, LendableBuf, memfd};

const MIB: usize = 1 << 20;

fn in_child(run: impl FnOnce()) {
    assert!(fork(run).unwrap().wait().unwrap(), "a signal or a panic has ended the child");
}

/// Checks that a call under a limit that is too low fails with the limit's name and its cure.
fn is_told<T: std::fmt::Debug>(made: std::io::Result<T>) {
    let error = made.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FileTooLarge, "{error}");
    let text = error.to_string();
    assert!(text.contains("RLIMIT_FSIZE") && text.contains("ulimit -f unlimited"), "{text}");
}

#[test]
fn a_file_beyond_the_limit_is_an_error_and_ends_no_process() {
    in_child(|| {
        limit_file_size(MIB as u64).unwrap();
        is_told(LendableBuf::zeroed(2 * MIB));
        is_told(LandableBuf::zeroed(2 * MIB));
        is_told(memfd::sealed(c"test", MIB + 1));
        is_told(memfd::may_make(MIB + 1));
        // Files up to the limit can still be made.
        assert_eq!(LendableBuf::zeroed(MIB).unwrap().len(), MIB);
        assert_eq!(LandableBuf::zeroed(MIB).unwrap().len(), MIB);
        memfd::may_make(MIB).unwrap();
        limit_file_size(0).unwrap();
        is_told(LandableBuf::zeroed(1));
        is_told(memfd::may_make(1));
    });
}

/// Another thread changes the limit at any moment, also between the check of the limit and the call
/// that makes the file.
#[test]
fn a_limit_that_is_lowered_at_any_moment_ends_no_process() {
    in_child(|| {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    limit_file_size(4096).unwrap();
                    limit_file_size(4 * MIB as u64).unwrap();
                }
            });
            let (mut made, mut refused) = (0, 0);
            while made < 200 || refused < 200 {
                for sealed in [true, false] {
                    let result = match sealed {
                        true => memfd::sealed(c"test", MIB).map(drop),
                        false => LendableBuf::zeroed(64 << 10).map(drop),
                    };
                    match result {
                        Ok(()) => made += 1,
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::FileTooLarge, "{error}");
                            refused += 1;
                        }
                    }
                }
            }
            stop.store(true, Relaxed);
        });
    });
}

/// The program's handling of SIGXFSZ, and whether the signal is blocked, do not change.
#[test]
fn the_signal_stays_what_the_program_made_of_it() {
    in_child(|| {
        let before = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        limit_file_size(4096).unwrap();
        is_told(memfd::sealed(c"test", 8192));
        let after = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let signals = |status: &str| -> Vec<String> {
            let of = |line: &&str| {
                ["SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"]
                    .iter()
                    .any(|name| line.starts_with(name))
            };
            status.lines().filter(of).map(str::to_owned).collect()
        };
        // SigQ is not compared, because it counts signals of all processes of the user.
        assert_eq!((signals(&before).len(), signals(&before)), (5, signals(&after)));
    });
}

/// Linux 6.1 ends fallocate(2) for any signal, and gives back what it had allocated.
#[test]
fn large_files_are_made_under_a_profilers_signals() {
    in_child(|| {
        signal_all_threads().unwrap();
        let mut buf = LendableBuf::zeroed(192 * MIB).unwrap();
        buf[192 * MIB - 1] = 7;
        let frozen = buf.freeze();
        assert_eq!((frozen.len(), frozen.as_ref()[192 * MIB - 1]), (192 * MIB, 7));
        assert_eq!(LandableBuf::zeroed(64 * MIB).unwrap().len(), 64 * MIB);
    });
}
