//! Waits for events of other processes without polling.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::HANG;

/// Waits until `event` is readable, or fails after the time limit.
fn wait_for(event: impl AsFd, began: Instant, what: &str) {
    let left = HANG.saturating_sub(began.elapsed());
    let left = Timespec::try_from(left).unwrap();
    match poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&left)) {
        Ok(0) => panic!("waited {HANG:?}, and still not: {what}"),
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => panic!("poll: {error}"),
    }
}

/// Waits until `done` returns true. `done` is called at the start, and after each change that
/// others make to files below a directory.
pub(crate) fn until(what: &str, below: &Path, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    let mut events = [0; 64 << 10];
    loop {
        // Watch before the check, so that a change after the check causes an event.
        watch(&changes, below);
        if done() {
            return;
        }
        wait_for(&changes, began, what);
        while rustix::io::read(&changes, &mut events).is_ok_and(|length| length > 0) {}
    }
}

/// Watches a directory and everything below it. Existing watches stay.
fn watch(changes: impl AsFd + Copy, dir: &Path) {
    let kinds = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE | WatchFlags::MODIFY;
    match inotify::add_watch(changes, dir, kinds | WatchFlags::ONLYDIR) {
        // The directory may have been removed in the meantime.
        Err(Errno::NOENT) => return,
        watched => watched.unwrap(),
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            watch(changes, &entry.path());
        }
    }
}

/// Waits for a child process that must end.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    ends(child.id());
    child.wait().unwrap()
}

/// Waits for any process that must end.
pub(crate) fn ends(process: u32) {
    let pid = Pid::from_raw(process.try_into().unwrap()).unwrap();
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => wait_for(process, Instant::now(), "a process ends"),
        Err(Errno::SRCH) => {}
        Err(error) => panic!("pidfd_open: {error}"),
    }
}

/// The start of an HTTP/2 connection: the preface, and SETTINGS.
const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const GOAWAY: u8 = 7;

/// Waits until the address no longer accepts connections. A connection accepted before that
/// receives GOAWAY.
pub(crate) fn until_deaf(addr: &str) {
    let began = Instant::now();
    while let Ok(mut stream) = TcpStream::connect(addr) {
        assert!(began.elapsed() < HANG, "it listens still");
        stream.set_read_timeout(Some(HANG)).unwrap();
        let _ = stream.write_all(GREETING);
        let mut head = [0; 9];
        // This loop ends when the connection ends or GOAWAY arrives.
        while stream.read_exact(&mut head).is_ok() && head[3] != GOAWAY {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut frame = vec![0; length as usize];
            if stream.read_exact(&mut frame).is_err() {
                break;
            }
        }
    }
}
