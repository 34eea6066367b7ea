//! The metrics of `rpc-demo serve --metrics` after transfers over TCP and over shared memory.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use common::*;

/// A scrape as Prometheus parses it: each series with its value.
struct Scrape {
    text: String,
    series: HashMap<String, f64>,
}

impl Scrape {
    fn of(url: &str) -> Scrape {
        let (addr, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        write!(stream, "GET /{path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        says(&head.to_lowercase(), &["content-type: text/plain; version=0.0.4"]);
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let series = lines
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
                (series.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
            })
            .collect();
        Scrape { text: text.to_owned(), series }
    }

    /// The sum of all series with this name and these labels.
    fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted = |series: &str| {
            let (known, told) = series.split_once('{').unwrap_or((series, "}"));
            known == name
                && labels.iter().all(|(label, value)| {
                    told.trim_end_matches('}')
                        .split(',')
                        .any(|own| own == format!("{label}=\"{value}\""))
                })
        };
        self.series.iter().filter(|(series, _)| wanted(series)).map(|(_, value)| value).sum()
    }
}

/// Puts and gets a file, and expects its payload to travel `by` this way.
fn transfers(fabrics: &str, by: &'static str) {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    const LENGTH: usize = 3_000_000;
    fs::write(at("file"), content(LENGTH, 1)).unwrap();
    let mut command = serve(program(), &at("root"));
    let settings =
        [("TONIC_RDMA", fabrics), ("RPC_DEMO_LEND", if by == "lent" { "1" } else { "0" })];
    command.args(["--metrics", "127.0.0.1:0"]).envs(settings);
    let mut server = Server::spawn(command, &at("root"));
    let line = server.line();
    let url = line
        .trim_end()
        .strip_prefix("rpc-demo: metrics at ")
        .unwrap_or_else(|| panic!("{line}"))
        .to_owned();

    let fresh = Scrape::of(&url);
    assert_eq!(fresh.get("tonic_rdma_calls_total", &[]), 0.0);
    for arguments in
        [["put", at("file").to_str().unwrap(), "x"], ["get", "x", at("copy").to_str().unwrap()]]
    {
        ok(server.client_command(arguments).envs(settings).output().unwrap());
    }
    let path = if fabrics == "off" { "tcp" } else { "shm" };
    let there: &[_] = &[("role", "server"), ("path", path)];
    let with = |more: &[(&'static str, &'static str)]| [there, more].concat();
    let payload = "tonic_rdma_payload_bytes_total";

    // A connection publishes its counters when its driver yields, and at its end. The client has
    // already ended.
    let told = Scrape::until(&url, |now| {
        now.get(payload, &with(&[("direction", "sent")])) >= LENGTH as f64
            && now.get("tonic_rdma_connections", &[]) == 0.0
    });
    assert!(told.get("tonic_rdma_calls_total", there) >= 2.0, "{}", told.text);
    let received = told.get(payload, &with(&[("direction", "received")]));
    assert!(
        (LENGTH as f64..LENGTH as f64 * 1.1).contains(&received),
        "{received} in {}",
        told.text
    );
    assert!(told.get(payload, &with(&[("by", by)])) >= 2.0 * LENGTH as f64, "{}", told.text);
    // Only the Offer messages are carried in another way.
    let others = told.get(payload, &[]) - told.get(payload, there);
    assert!(others < 2000.0, "{}", told.text);
    if path == "tcp" {
        let policy = [("role", "server"), ("reason", "policy"), ("side", "local")];
        assert_eq!(told.get("tonic_rdma_fallbacks_total", &policy), 1.0);
        assert_eq!(told.get("tonic_rdma_connections_total", &[]), 0.0);
        assert!(
            told.get("tonic_rdma_copied_bytes_total", &with(&[("reason", "joined")]))
                >= LENGTH as f64
        );
    } else {
        assert_eq!(told.get("tonic_rdma_fallbacks_total", &[]), 0.0, "{}", told.text);
        assert_eq!(told.get("tonic_rdma_connections_total", there), 2.0);
        let pool =
            |state| told.get("tonic_rdma_pool_bytes", &[("device", "shm"), ("state", state)]);
        assert!(told.get("tonic_rdma_pool_registrations_total", &[("device", "shm")]) >= 1.0);
        assert_eq!((pool("granted"), pool("filled")), (0.0, 0.0));
        // Lent memory belonged to these connections, and was freed with them.
        assert!(
            by == "lent" || pool("free") + pool("control") + pool("send") > 0.0,
            "{}",
            told.text
        );
        let by_write: &[_] = if by == "write" { &["writes_total", "grants_total"] } else { &[] };
        for counted in ["messages_total", "completions_per_poll_count"].iter().chain(by_write) {
            assert!(
                told.get(&format!("tonic_rdma_{counted}"), there) > 0.0,
                "{counted} in {}",
                told.text
            );
        }
        let bucket = "tonic_rdma_completions_per_poll_bucket";
        let all = told.get("tonic_rdma_completions_per_poll_count", there);
        assert_eq!(told.get(bucket, &with(&[("le", "+Inf")])), all);
    }
    for metric in tonic_rdma::metrics::ALL {
        let seen = told.series.keys().any(|series| series.split('{').next() == Some(metric.name));
        assert!(
            !seen || told.text.contains(&format!("# HELP {} {}", metric.name, metric.help)),
            "{}",
            metric.name
        );
    }
    // The quantiles of docs/dashboard.json need buckets.
    assert!(!told.text.contains("quantile="), "{}", told.text);
    let took = "rpc_server_call_duration_seconds_bucket";
    let ok = [("rpc_system_name", "grpc"), ("rpc_status_code", "OK"), ("path", path)];
    assert!(told.get(took, &[&ok[..], &[("le", "10")]].concat()) >= 2.0, "{}", told.text);
    let known = |name: &str| {
        let bare = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        tonic_rdma::metrics::ALL.iter().any(|metric| metric.name == name || metric.name == bare)
    };
    for series in told.series.keys() {
        assert!(known(series.split('{').next().unwrap()), "{series} is not in the list");
    }
}

impl Scrape {
    /// Scrapes until `done`. Each scrape is an exchange with the server, whose connections end in
    /// the meantime.
    fn until(url: &str, done: impl Fn(&Scrape) -> bool) -> Scrape {
        let began = std::time::Instant::now();
        loop {
            let now = Scrape::of(url);
            if done(&now) {
                return now;
            }
            assert!(began.elapsed() < HANG, "it never told all: {}", now.text);
        }
    }
}

#[test]
fn transfers_over_tcp_are_told() {
    transfers("off", "http2");
}

#[test]
fn transfers_over_shared_memory_are_told() {
    transfers("shm,require", "write");
}

#[test]
fn what_is_lent_is_told() {
    transfers("shm,require", "lent");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let dir = scratch();
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = holder.local_addr().unwrap().to_string();
    let mut command = serve(program(), dir.path());
    let line = failed(command.args(["--metrics", &addr]).output().unwrap(), 1);
    says(&line, &["cannot offer metrics on", &addr, "--metrics"]);
}
