//! Memory that is mapped from a file which is truncated while it is read.

#![allow(clippy::unwrap_used, reason = "a test")]
#![cfg(target_os = "linux")]

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread;

use tonic_rdma_memory::mapped_file::{MappedFile, is_any_truncated, is_truncated};
use tonic_rdma_memory::test_util;

const PAGE: usize = 4096;
const LEN: usize = 16 * PAGE;

fn mapped() -> (File, test_util::MappedFile) {
    let path = std::env::temp_dir().join(format!(
        "tonic-rdma-mapped-{}-{:?}",
        std::process::id(),
        thread::current().id()
    ));
    std::fs::write(&path, [7; LEN]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let map = test_util::MappedFile::new(&file, LEN).unwrap();
    (file, map)
}

/// The tests of this file share the handler, and so take turns.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn what_was_cut_off_reads_as_zeros_and_says_so() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let (file, map) = mapped();
    let guard = MappedFile::guard(map.as_ref()).unwrap().expect("it is mapped from a file");
    let (other_file, other) = mapped();
    let other_guard = MappedFile::guard(other.as_ref()).unwrap().unwrap();
    file.set_len(4 * PAGE as u64).unwrap();
    assert!(!guard.is_truncated(), "nobody has read it");
    let (left, cut) = map.as_ref().split_at(4 * PAGE);
    assert!(left.iter().all(|byte| *byte == 7) && !is_truncated(left));
    assert!(cut.to_vec().iter().all(|byte| *byte == 0));
    assert!(guard.is_truncated() && is_truncated(cut) && is_any_truncated());
    assert!(is_truncated(left), "all of the range counts: nobody knows when it was read");
    assert!(!other_guard.is_truncated() && !is_truncated(other.as_ref()));
    drop(guard);
    assert!(!is_any_truncated() && !is_truncated(cut));
    // The entry is used again.
    drop((map, other_guard, other, other_file));
    for _ in 0..100 {
        let (file, map) = mapped();
        let guard = MappedFile::guard(map.as_ref()).unwrap().unwrap();
        file.set_len(0).unwrap();
        assert!(map.as_ref().to_vec() == [0; LEN] && guard.is_truncated());
    }
    assert!(!is_any_truncated());
}

#[test]
fn threads_that_read_while_the_file_is_cut_survive() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    for round in 0..50 {
        let (file, map) = mapped();
        let guard = MappedFile::guard(map.as_ref()).unwrap().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !guard.is_truncated() {
                        let read = map.as_ref().to_vec();
                        // The check comes after the read, so a reader that has read zeros sees the
                        // mark.
                        assert!(read == [7; LEN] || is_truncated(map.as_ref()));
                    }
                });
            }
            (0..round * 100).for_each(|_| std::hint::spin_loop());
            file.set_len(0).unwrap();
        });
    }
}

#[test]
fn memory_without_a_file_is_not_guarded() {
    assert!(MappedFile::guard(&vec![1; 1 << 20]).unwrap().is_none());
    assert!(MappedFile::guard(&[]).unwrap().is_none());
}

/// The variable that is set in the copy of this program that a test starts.
const CHILD: &str = "TONIC_RDMA_MAPPED_FILE_CHILD";

/// Only guarded memory is turned into zeros. A fault in another mapping ends the process.
#[test]
fn a_fault_elsewhere_ends_the_process_as_before() {
    if std::env::var_os(CHILD).is_some() {
        let (_file, map) = mapped();
        let _guard = MappedFile::guard(map.as_ref()).unwrap().unwrap();
        let (file, unguarded) = mapped();
        file.set_len(0).unwrap();
        panic!("read {}", unguarded.as_ref()[0]);
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_fault_elsewhere_ends_the_process_as_before"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert_eq!(child.status.signal(), Some(7), "SIGBUS: {child:?}");
}
