//! A terminal for a program under test.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Rows of the terminal.
pub(crate) const ROWS: u16 = 30;

/// A terminal of `columns`: the test's end, and the program's.
pub(crate) fn terminal(columns: u16) -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    resize(&ours, columns, ROWS);
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    (File::from(ours), theirs)
}

/// Changes the size of a terminal.
pub(crate) fn resize(terminal: impl AsFd, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}
