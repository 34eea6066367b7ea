//! What a person at a terminal sees of a transfer.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

/// A terminal of 100 columns: our end, and the one for a program.
fn terminal() -> (File, Stdio) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    tcsetwinsize(&ours, Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    (File::from(ours), Stdio::from(theirs))
}

/// The bars in what was drawn: what is done, of how much, how fast, and how long it takes yet, as in
/// `1.50 MiB/16.00 GiB 2.00 MiB/s 3m left`. A row that is full begins the next one, without a line break.
fn moving_bars(drawn: &str) -> impl Iterator<Item = &str> {
    let (bars, _) = drawn.rsplit_once(" left").unwrap_or_default();
    bars.split(" left").filter(|bar| {
        !bar.contains(" 0 B/16.00 GiB ") && bar.contains("B/16.00 GiB ") && bar.contains("B/s ")
    })
}

#[test]
fn a_terminal_shows_a_bar_for_all_and_one_for_each_large_file() {
    let dir = scratch();
    std::fs::create_dir(dir.path().join("root")).unwrap();
    // Takes no room, and longer to send than the test needs.
    File::create(dir.path().join("root/large")).unwrap().set_len(16 << 30).unwrap();
    let server = Server::start(&dir.path().join("root"));
    let (mut screen, stderr) = terminal();
    let target = dir.path().join("copy");
    let mut command = server.client_command(["get".as_ref(), "large".as_ref(), target.as_os_str()]);
    let client = command.env("TERM", "xterm").stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
    drop(command);
    let (mut text, mut piece) = (String::new(), [0; 4096]);
    let of_one = |bar: &str| bar.contains("  large ");
    let drawn = |text: &str| moving_bars(text).any(of_one) && moving_bars(text).any(|bar| !of_one(bar));
    while !drawn(&text) {
        let length = screen.read(&mut piece).unwrap();
        assert!(length > 0 && text.len() < 1 << 20, "no bars: {text:?}");
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    signal(&client, Signal::INT);
    // The bars go away; the one line that says why it ended stays.
    while let Ok(length @ 1..) = screen.read(&mut piece) {
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let last = text.trim_end().rsplit(['\r', '\n']).next().unwrap();
    says(last, &["rpc-demo: interrupted: SIGINT came; repeat the command"]);
}
