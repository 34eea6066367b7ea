//! `rpc-demo top` with real servers, on a terminal, in a pipe, and with servers that misbehave.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::terminal::{resize, terminal};
use common::*;
use rustix::process::Signal;
use tonic::{Request, Response, Status};
use tonic_rdma_channelz::pb::channelz_server::{Channelz, ChannelzServer};
use tonic_rdma_channelz::pb::{
    ListConnectionsRequest, ListConnectionsResponse, ListOwnersRequest, ListOwnersResponse, Owner,
    Role,
};

const HEADER: [&str; 14] = [
    "ROLE", "PEER", "PATH", "DEVICE", "REASON", "AGE", "RAILS", "CALLS", "CREDITS", "CALLS/S",
    "SENT/S", "RECVD/S", "MEMORY", "GRANTED",
];

/// A server that lists its connections, with these paths.
fn listing(root: &std::path::Path, paths: &str) -> Server {
    listing_at("127.0.0.1", root, paths)
}

fn listing_at(ip: &str, root: &std::path::Path, paths: &str) -> Server {
    std::fs::create_dir_all(root).unwrap();
    let mut command = program();
    command.env("TONIC_RDMA", paths).arg("serve").arg("--channelz");
    command.args(["--addr", &format!("{ip}:0"), "--root"]).arg(root);
    Server::spawn(command, root)
}

fn top(url: &str, more: &[&str]) -> Command {
    let mut command = program();
    command.args(["top", url]).args(more).env_remove("NO_COLOR").env("TERM", "xterm");
    command
}

fn once(url: &str) -> Output {
    top(url, &["--once"]).output().unwrap()
}

/// The cells of each row. At least two spaces separate columns.
fn rows(table: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| {
        let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect::<Vec<_>>()
    };
    table.lines().map(cells).collect()
}

/// A client that stores an object whose last part does not come.
struct Upload(Child);

impl Upload {
    fn begin(server: &Server, paths: &str) -> Upload {
        let mut command = program();
        command.env("TONIC_RDMA", paths).env("RPC_DEMO_SERVER", &server.url);
        command.args(["put", "-", "object"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        child.stdin.as_mut().unwrap().write_all(&content(3 << 20, 1)).unwrap();
        server.writes();
        Upload(child)
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(wait(&mut self.0).success());
    }
}

/// Over shared memory, and in the guest over its device.
#[test]
fn one_table_shows_clients_over_a_fast_path_and_tcp() {
    let (at, device) = place();
    let path = if device.is_some() { "verbs" } else { "shm" };
    let device = device.unwrap_or_else(|| "-".to_owned());
    let dir = scratch();
    let server = listing_at(&at, &dir.path().join("root"), path);
    let upload = Upload::begin(&server, &format!("{path},require"));
    let pid = upload.0.id();
    let output = ok(once(&server.url));
    let table = stdout(&output);
    assert!(!table.contains('\u{1b}') && output.stderr.is_empty(), "{table}");
    let rows = rows(table);
    assert_eq!(rows[0], HEADER);
    let lines: Vec<_> = rows[1..].iter().map(|row| row.iter().map(|c| &**c).collect()).collect();
    let [own, fast, others @ ..] = &lines[..] else { panic!("{table}") };
    let own: &Vec<&str> = own;
    assert_eq!(own[..7], ["server", "rpc-demo", "-", "-", "-", "-", "-"], "{table}");
    let peer = if path == "shm" { format!("process {pid}") } else { fast[1].to_owned() };
    assert!(path == "shm" || peer.starts_with(&format!("{at}:")), "{table}");
    assert_eq!(fast[..5], ["link", &peer, path, &device, "-"], "{table}");
    assert_eq!((fast.len(), fast[6]), (HEADER.len(), "-"));
    let credits: Vec<u32> = fast[8].split('/').map(|n| n.parse().unwrap()).collect();
    assert!(credits.len() == 2 && credits.iter().all(|n| *n > 0), "{table}");
    assert!(fast[7].parse::<u32>().unwrap() >= 1, "a call is in flight: {table}");
    assert!(fast[12] != "0" && fast[12] == own[12], "{table}");
    // The TCP connection of that client, and the one over which this list has come.
    let mut reasons: Vec<_> = others.iter().map(|row| (row[2], row[4])).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, [("tcp", "not asked"), ("tcp", "offered")], "{table}");
    assert!(
        others.iter().all(|row| row[1].starts_with(&format!("{at}:")) && row[5].ends_with('s'))
    );
    upload.end();
    let left = ok(once(&server.url));
    assert_eq!(stdout(&left).lines().count(), 3, "only its own connection: {}", stdout(&left));
}

#[test]
fn a_server_without_the_flag_has_no_list() {
    let dir = scratch();
    std::fs::create_dir(dir.path().join("root")).unwrap();
    let server = Server::start(&dir.path().join("root"));
    let line = failed(once(&server.url), 1);
    says(&line, &["does not list its connections; start it with `rpc-demo serve --channelz`"]);
    // A terminal is left as it was.
    let (mut screen, theirs) = terminal(100);
    let mut command = top(&server.url, &[]);
    let mut child = command.stdout(theirs).stderr(Stdio::null()).spawn().unwrap();
    drop(command);
    let mut text = Vec::new();
    let _ = screen.read_to_end(&mut text);
    assert_eq!(wait(&mut child).code(), Some(1));
    assert!(text.is_empty(), "{text:?}");
}

#[test]
fn no_server_and_wrong_addresses_are_errors() {
    says(&failed(once("http://127.0.0.1:1"), 1), &["no server answers at http://127.0.0.1:1"]);
    says(&failed(once("ftp://127.0.0.1:1"), 2), &["'ftp://127.0.0.1:1' is not a server address"]);
    assert_eq!(
        top("http://127.0.0.1:1", &["--interval", "0"]).output().unwrap().status.code(),
        Some(2)
    );
}

#[test]
fn a_dumb_terminal_gets_one_plain_table() {
    let dir = scratch();
    let server = listing(&dir.path().join("root"), "off");
    let (mut screen, theirs) = terminal(200);
    let mut command = top(&server.url, &[]);
    let mut child = command.env("TERM", "dumb").stdout(theirs).spawn().unwrap();
    drop(command);
    let mut text = Vec::new();
    // The read fails with EIO once the program's end is closed.
    let _ = screen.read_to_end(&mut text);
    assert!(wait(&mut child).success());
    let text = String::from_utf8(text).unwrap();
    assert!(!text.contains('\u{1b}'), "{text:?}");
    assert_eq!(rows(&text)[0], HEADER);
}

fn cells(number: u16) -> NonZero<u16> {
    NonZero::new(number).unwrap()
}

/// A program on a terminal, and what it shows.
struct Shown {
    screen: File,
    child: Child,
    drawn: Vec<u8>,
    shown: vt100::Parser,
}

impl Shown {
    fn start(mut command: Command) -> Shown {
        let (screen, theirs) = terminal(160);
        let child = command.stdout(theirs).stderr(Stdio::null()).spawn().unwrap();
        let shown = vt100::Parser::new(cells(30), cells(160), 0);
        Shown { screen, child, drawn: Vec::new(), shown }
    }

    fn rows(&self) -> Vec<String> {
        let (_, columns) = self.shown.screen().size();
        self.shown.screen().rows(0, columns.get()).map(|row| row.trim_end().to_owned()).collect()
    }

    /// Reads until `wanted` accepts the rows of the screen.
    #[track_caller]
    fn until(&mut self, wanted: impl Fn(&[String]) -> bool) {
        let begun = Instant::now();
        while !wanted(&self.rows()) {
            assert!(begun.elapsed() < HANG, "{:#?}", self.rows());
            assert!(self.read(), "it has ended: {:#?}", self.rows());
        }
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        resize(&self.screen, columns, rows);
        self.shown.screen_mut().set_size(cells(rows), cells(columns));
        signal(&self.child, Signal::WINCH);
    }

    fn read(&mut self) -> bool {
        let mut piece = [0; 4096];
        let Ok(length @ 1..) = self.screen.read(&mut piece) else { return false };
        self.drawn.extend_from_slice(&piece[..length]);
        self.shown.process(&piece[..length]);
        true
    }
}

#[test]
fn a_terminal_shows_a_screen_that_follows_its_size_and_is_restored() {
    let dir = scratch();
    let server = listing(&dir.path().join("root"), "shm");
    let mut top = Shown::start(top(&server.url, &[]));
    top.until(|rows| rows[1].starts_with("ROLE") && rows[3].starts_with("  link"));
    assert!(top.shown.screen().alternate_screen() && top.shown.screen().hide_cursor());
    assert!(top.rows()[0].starts_with("rpc-demo top http://127.0.0.1:"));
    // A client comes and goes.
    let upload = Upload::begin(&server, "shm,require");
    let process = format!("process {}", upload.0.id());
    top.until(|rows| rows.iter().any(|row| row.contains(&process) && row.contains("shm")));
    upload.end();
    top.until(|rows| !rows.iter().any(|row| row.contains(&process)));
    // Fewer columns and rows: nothing wraps, and the rest is counted.
    let silent: Vec<_> = (0..10)
        .map(|_| std::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap())
        .collect();
    top.until(|rows| rows.iter().filter(|row| row.contains("not asked")).count() == 11);
    top.resize(40, 8);
    top.until(|rows| rows[6].starts_with("... 8 more") && rows[7].is_empty());
    assert!(top.rows()[1].starts_with("ROLE") && top.rows()[5].starts_with("  link"));
    drop(silent);
    top.resize(160, 30);
    top.until(|rows| rows[3].starts_with("  link") && rows[4].is_empty());
    signal(&top.child, Signal::INT);
    while top.read() {}
    assert!(wait(&mut top.child).success());
    let screen = top.shown.screen();
    assert!(!screen.alternate_screen() && !screen.hide_cursor());
    assert!(top.rows().concat().is_empty(), "{:#?}", top.rows());
}

#[test]
fn without_colours_the_screen_has_none() {
    let dir = scratch();
    let server = listing(&dir.path().join("root"), "off");
    for (variable, colours) in [("", true), ("1", false)] {
        let mut command = top(&server.url, &[]);
        command.env("NO_COLOR", variable);
        let mut top = Shown::start(command);
        top.until(|rows| rows[3].starts_with("  link"));
        signal(&top.child, Signal::TERM);
        while top.read() {}
        assert!(wait(&mut top.child).success());
        let drawn = String::from_utf8_lossy(&top.drawn);
        // Colours and styles are SGR sequences, which end in `m`.
        let sgr = |rest: &str| rest.chars().find(char::is_ascii_alphabetic) == Some('m');
        assert_eq!(drawn.split("\u{1b}[").skip(1).any(sgr), colours, "{drawn:?}");
    }
}

#[test]
fn a_server_that_goes_away_is_asked_again() {
    let dir = scratch();
    let mut server = listing(&dir.path().join("root"), "off");
    let mut top = Shown::start(top(&server.url, &[]));
    top.until(|rows| rows[3].starts_with("  link"));
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    top.until(|rows| rows[0].starts_with("NO ANSWER, asking again: "));
    // The last table stays.
    assert!(top.rows()[3].starts_with("  link"));
    // Another server at the same address, without the list.
    let addr = server.url.strip_prefix("http://").unwrap().to_owned();
    let mut command = program();
    command.args(["serve", "--addr", &addr, "--root"]).arg(&server.root);
    let _other = Server::spawn(command, &server.root);
    while top.read() {}
    assert_eq!(wait(&mut top.child).code(), Some(1));
    assert!(!top.shown.screen().alternate_screen());
}

/// A server with one of these lists.
#[derive(Clone, Copy)]
enum Hostile {
    /// Names that change the terminal.
    Names,
    /// The same page again and again.
    Endless,
    /// Pages that have nothing and are not the last.
    Empty,
    /// Pages of one owner each. The owner of the first page ends before its connections are listed.
    Ended,
}

#[tonic::async_trait]
impl Channelz for Hostile {
    async fn list_owners(
        &self,
        request: Request<ListOwnersRequest>,
    ) -> Result<Response<ListOwnersResponse>, Status> {
        let owner = Owner {
            id: 1,
            role: Role::Server.into(),
            name: "\u{1b}[2J\u{9b}31m\nserver  forged\u{202e}\u{7}".into(),
            path: "\u{1b}]0;title\u{7}".into(),
            ..Owner::default()
        };
        let (owners, end) = match self {
            Hostile::Names => (vec![owner], true),
            Hostile::Endless => (vec![owner], false),
            Hostile::Empty => (Vec::new(), false),
            Hostile::Ended => {
                let id = request.get_ref().after + 1;
                (vec![Owner { id, ..owner }], id == 2)
            }
        };
        Ok(Response::new(ListOwnersResponse { owners, end }))
    }

    async fn list_connections(
        &self,
        request: Request<ListConnectionsRequest>,
    ) -> Result<Response<ListConnectionsResponse>, Status> {
        if matches!(self, Hostile::Ended) && request.get_ref().owner == 1 {
            return Err(Status::not_found("it has ended"));
        }
        Ok(Response::new(ListConnectionsResponse { connections: Vec::new(), end: true }))
    }
}

#[test]
fn hostile_lists_neither_change_the_terminal_nor_keep_it_waiting() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let serve = |hostile: Hostile| {
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let router = tonic::transport::Server::builder().add_service(ChannelzServer::new(hostile));
        runtime.spawn(router.serve_with_incoming(incoming));
        url
    };
    let output = ok(once(&serve(Hostile::Ended)));
    assert_eq!(stdout(&output).lines().count(), 2, "the second owner is shown: {output:?}");
    let output = ok(once(&serve(Hostile::Names)));
    let table = stdout(&output);
    assert!(table.is_ascii() && table.chars().all(|c| c == '\n' || !c.is_control()), "{table:?}");
    assert_eq!(table.lines().count(), 2, "{table}");
    says(table, &["\\u{1b}[2J\\u{9b}31m\\nserver  forged"]);
    for hostile in [Hostile::Endless, Hostile::Empty] {
        let begun = Instant::now();
        says(&failed(once(&serve(hostile)), 1), &["the server's pages repeat entries"]);
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
