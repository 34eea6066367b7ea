//! The terminal output of a transfer.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::Read;
use std::process::Stdio;

use common::terminal::{ROWS, terminal};
use common::*;
use rustix::process::Signal;

/// The bars in the output: done, total, rate and remaining time, as in `1.50 MiB/16.00 GiB 2.00
/// MiB/s 3m left`. A full row continues in the next one without a line break.
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
    // A sparse file that takes longer to send than the test runs.
    File::create(dir.path().join("root/large")).unwrap().set_len(16 << 30).unwrap();
    let server = Server::start(&dir.path().join("root"));
    let (mut screen, stderr) = terminal(100);
    let target = dir.path().join("copy");
    let mut command = server.client_command(["get".as_ref(), "large".as_ref(), target.as_os_str()]);
    let client =
        command.env("TERM", "xterm").stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
    drop(command);
    let (mut text, mut piece) = (String::new(), [0; 4096]);
    let of_one = |bar: &str| bar.contains("  large ");
    let drawn =
        |text: &str| moving_bars(text).any(of_one) && moving_bars(text).any(|bar| !of_one(bar));
    while !drawn(&text) {
        let length = screen.read(&mut piece).unwrap();
        assert!(length > 0 && text.len() < 1 << 20, "no bars: {text:?}");
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    signal(&client, Signal::INT);
    // The bars are removed; the line with the error stays.
    while let Ok(length @ 1..) = screen.read(&mut piece) {
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let last = text.trim_end().rsplit(['\r', '\n']).next().unwrap();
    says(last, &["rpc-demo: interrupted: SIGINT came; repeat the command"]);
}

/// The lines on a terminal of `columns` after `command` has ended, without blank lines.
fn left_on_screen(columns: u16, mut command: std::process::Command) -> Vec<String> {
    let (mut screen, theirs) = terminal(columns);
    let stdout = theirs.try_clone().unwrap();
    let mut child = command.env("TERM", "xterm").stdout(stdout).stderr(theirs).spawn().unwrap();
    drop(command);
    let mut shown = vt100::Parser::new(ROWS.try_into().unwrap(), columns.try_into().unwrap(), 0);
    let mut piece = [0; 4096];
    // `read` fails with EIO once the program's end is closed.
    while let Ok(length @ 1..) = screen.read(&mut piece) {
        shown.process(&piece[..length]);
    }
    assert!(child.wait().unwrap().success());
    let rows = shown.screen().rows(0, columns).map(|row| row.trim_end().to_owned());
    rows.filter(|row| !row.is_empty()).collect()
}

/// Returns all that `command` writes to a terminal with these variables until it has ended.
fn written(mut command: std::process::Command, variables: &[(&str, &str)]) -> String {
    let (mut screen, theirs) = terminal(100);
    let stdout = theirs.try_clone().unwrap();
    command.env_remove("NO_COLOR").envs(variables.iter().copied());
    let mut child = command.stdout(stdout).stderr(theirs).spawn().unwrap();
    drop(command);
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(length @ 1..) = screen.read(&mut piece) {
        text.extend_from_slice(&piece[..length]);
    }
    child.wait().unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn no_color_and_a_dumb_terminal_are_obeyed() {
    let dir = scratch();
    std::fs::create_dir_all(dir.path().join("root")).unwrap();
    std::fs::write(dir.path().join("large"), content(9 << 20, 1)).unwrap();
    let server = Server::start(&dir.path().join("root"));
    let put = |variables: &[(&str, &str)]| {
        let (file, path) = (dir.path().join("large"), "large".as_ref());
        let command =
            server.client_command(["-v".as_ref(), "put".as_ref(), file.as_os_str(), path]);
        let text = written(command, variables);
        says(&text, &["put ", "CRC32C ok", "INFO"]);
        text
    };
    // Colours are SGR sequences, which end in `m`. The sequences of bars move the cursor and clear
    // lines.
    let sequences = |text: &str, last: char| {
        let of = |rest: &str| rest.chars().find(char::is_ascii_alphabetic) == Some(last);
        text.split("\u{1b}[").skip(1).filter(|rest| of(rest)).count()
    };
    let plain = put(&[("TERM", "xterm")]);
    assert!(sequences(&plain, 'm') > 0 && sequences(&plain, 'K') > 0, "{plain:?}");
    let no_color = put(&[("TERM", "xterm"), ("NO_COLOR", "1")]);
    assert_eq!(sequences(&no_color, 'm'), 0, "{no_color:?}");
    let dumb = put(&[("TERM", "dumb")]);
    assert!(!dumb.contains('\u{1b}'), "{dumb:?}");
}

/// The bars are removed at any width. Only the summary stays, which may be longer than a row.
#[test]
fn what_stays_on_the_screen_is_the_closing_line() {
    for columns in [80, 120, 200] {
        let dir = scratch();
        std::fs::create_dir_all(dir.path().join("root")).unwrap();
        std::fs::create_dir_all(dir.path().join("tree")).unwrap();
        // One of these two files has its own bar.
        std::fs::write(dir.path().join("tree/large"), content(9 << 20, 1)).unwrap();
        std::fs::write(dir.path().join("tree/small"), content(1 << 10, 2)).unwrap();
        let server = Server::start(&dir.path().join("root"));
        let (tree, copy) = (dir.path().join("tree"), dir.path().join("copy"));
        let put = ["put".as_ref(), tree.as_os_str(), "tree".as_ref()];
        let get = ["get".as_ref(), "tree".as_ref(), copy.as_os_str()];
        for (args, begins) in [(put, "put 'tree': "), (get, "get 'tree': ")] {
            let rows = left_on_screen(columns, server.client_command(args));
            let line = rows.concat();
            assert!(line.starts_with(begins), "{columns} columns: {rows:#?}");
            says(&line, &["in 2 files", "CRC32C ok", "path "]);
            let full =
                rows.iter().rev().skip(1).all(|row| row.chars().count() + 1 >= columns.into());
            assert!(full, "more than one line, {columns} columns: {rows:#?}");
        }
    }
}
