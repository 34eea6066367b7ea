//! A process's limits are lowered while a connection is established, at either end. Long calls end
//! as over TCP. Later calls take TCP with a reason that names the error and the cure, and return to
//! the path once the limit is raised. A path that does not need the limited resource stays.

use std::process::Command;

use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::process::Process;

use crate::client::{Client, own_path};
use crate::server::Server;

const KIB: u64 = 1 << 10;
/// Bytes of a message that lands in memory which a connection at rest does not have.
const LONG: usize = 3 << 20;
const SHORT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    AddressSpace,
    Descriptors,
    Files,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Server,
    Client,
}

impl Limit {
    /// Sets the soft limit of a process so low that the process gets no more of the resource.
    /// Returns the option of prlimit that restores the limit.
    fn lower(self, process: &Process) -> String {
        let (id, name) = (process.id(), self.name());
        let before = soft_limit(&id, self.row());
        let low = match self {
            // This leaves less than a chunk of landing memory.
            Limit::AddressSpace => address_space(&id) + 512 * KIB,
            // Open descriptors stay open.
            Limit::Descriptors => 3,
            Limit::Files => 4096,
        };
        set(&id, &format!("--{name}={low}:"));
        format!("--{name}={before}:")
    }

    fn name(self) -> &'static str {
        match self {
            Limit::AddressSpace => "as",
            Limit::Descriptors => "nofile",
            Limit::Files => "fsize",
        }
    }

    /// The row of `/proc/PID/limits`.
    fn row(self) -> &'static str {
        match self {
            Limit::AddressSpace => "Max address space",
            Limit::Descriptors => "Max open files",
            Limit::Files => "Max file size",
        }
    }

    /// The code, error and cure that the reason names when calls leave this fabric's path. `None`
    /// if the limit does not affect the path.
    fn told(self, fabric: Fabric) -> Option<[&'static str; 3]> {
        match (fabric, self) {
            (Fabric::Shm, Limit::AddressSpace) => {
                Some(["process-limit", "os error 12", "ulimit -v"])
            }
            // The error is first 12, for memory, and later 11, for a thread that opens the device.
            (Fabric::Verbs, Limit::AddressSpace) => {
                Some(["process-limit", "os error 1", "ulimit -v"])
            }
            (Fabric::Shm, Limit::Descriptors) => {
                Some(["process-limit", "os error 24", "ulimit -n"])
            }
            (Fabric::Shm, Limit::Files) => Some(["memory-files", "RLIMIT_FSIZE", "ulimit -f"]),
            _ => None,
        }
    }
}

fn soft_limit(id: &str, row: &str) -> String {
    let limits = std::fs::read_to_string(format!("/proc/{id}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix(row)).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

/// Bytes of address space that a process uses.
fn address_space(id: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * KIB
}

fn set(id: &str, limit: &str) {
    let set = Command::new("prlimit").args(["--pid", id, limit]).status();
    assert!(set.unwrap().success(), "{limit}");
}

async fn ends(fabric: Fabric, options: &str) -> (Server, Client) {
    let server = Server::start(fabric, "", "small-pool").await;
    let mut client = Client::start(&server, fabric, "", &format!("small-pool {options}")).await;
    client.is_on_its_path().await;
    (server, client)
}

async fn lowered(fabric: Fabric, limit: Limit, end: End) {
    let (server, mut client) = ends(fabric, "").await;
    client.echo(&[SHORT]).await;
    let limited = if end == End::Server { &server.process } else { &client.process };
    let (id, before) = (limited.id(), limit.lower(limited));
    client.echo(&[LONG, SHORT, LONG, LONG]).await;
    let path = client.path().await;
    let [_, over_tcp, lost] = client.counts().await;
    assert_eq!(lost, 0, "{path}");
    match limit.told(fabric) {
        Some(told) => {
            assert!(path.starts_with("tcp ("), "{path}");
            assert_eq!(path.contains("peer: "), end == End::Server, "{path}");
            for text in told {
                assert!(path.contains(text), "{text:?} is not in {path:?}");
            }
            assert!(over_tcp > 0);
        }
        None => assert!(path.starts_with(own_path(fabric)), "{path}"),
    }
    set(&id, &before);
    client.returns().await;
    let before = client.counts().await;
    client.echo(&[LONG, SHORT]).await;
    let after = client.counts().await;
    if fabric.fast().is_some() {
        assert_eq!(after, [before[0] + 2, before[1], 0], "calls that are back");
    }
    println!("{fabric}, {limit:?}, {end:?}: {path}");
}

pub async fn address_space_of_the_server(fabric: Fabric) {
    lowered(fabric, Limit::AddressSpace, End::Server).await;
}

pub async fn address_space_of_the_client(fabric: Fabric) {
    lowered(fabric, Limit::AddressSpace, End::Client).await;
}

pub async fn descriptors_of_the_server(fabric: Fabric) {
    lowered(fabric, Limit::Descriptors, End::Server).await;
}

pub async fn descriptors_of_the_client(fabric: Fabric) {
    lowered(fabric, Limit::Descriptors, End::Client).await;
}

pub async fn files_of_the_server(fabric: Fabric) {
    lowered(fabric, Limit::Files, End::Server).await;
}

pub async fn files_of_the_client(fabric: Fabric) {
    lowered(fabric, Limit::Files, End::Client).await;
}

/// A client connects while its server has no descriptor left. The client waits, and is let in once
/// the server has a descriptor. Established connections notice nothing.
pub async fn no_descriptor_for_another_client(fabric: Fabric) {
    let (server, mut client) = ends(fabric, "").await;
    client.echo(&[SHORT]).await;
    let before = Limit::Descriptors.lower(&server.process);
    let mut waiting = Client::begin(&server, fabric, "", "small-pool");
    client.echo(&[SHORT, LONG, SHORT, SHORT]).await;
    set(&server.process.id(), &before);
    assert_eq!(waiting.answer().await, "up");
    for client in [&mut waiting, &mut client] {
        client.echo(&[LONG, SHORT]).await;
        client.returns().await;
        assert_eq!(client.counts().await[2], 0);
    }
}

/// RLIMIT_FSIZE is 0 from the start of the process, at either end.
pub async fn no_file_from_the_start(fabric: Fabric) {
    for limited in [End::Server, End::Client] {
        let wrapper = |end| if end == limited { "prlimit --fsize=0:" } else { "" };
        let server = Server::start(fabric, wrapper(End::Server), "").await;
        let mut client = Client::start(&server, fabric, wrapper(End::Client), "").await;
        let path = client.path().await;
        let own = match fabric {
            Fabric::Shm => "tcp (",
            _ => own_path(fabric),
        };
        assert!(path.starts_with(own), "{path}");
        assert_eq!(path.contains("memory-files"), fabric == Fabric::Shm, "{path}");
        client.echo(&[SHORT, LONG, SHORT]).await;
        assert_eq!(client.counts().await[2], 0);
    }
}

/// Calls that require the path fail while the limit is low, and say what is missing. The call
/// during which this is noticed has already been sent, and succeeds.
pub async fn a_required_path_that_is_left(fabric: Fabric) {
    for end in [End::Server, End::Client] {
        let (server, mut client) = ends(fabric, "require").await;
        client.echo(&[SHORT]).await;
        let limited = if end == End::Server { &server.process } else { &client.process };
        let limit = Limit::AddressSpace;
        let (id, before) = (limited.id(), limit.lower(limited));
        client.echo(&[LONG]).await;
        for _ in 0..3 {
            let end = client.ask(&format!("echo {SHORT}")).await;
            assert!(end.starts_with("Unavailable: "), "{end}");
            // The text does not contain the cure, which `Cause::of` returns.
            for text in &limit.told(fabric).unwrap()[..2] {
                assert!(end.contains(text), "{text:?} is not in {end:?}");
            }
        }
        set(&id, &before);
        client.returns().await;
        client.echo(&[LONG, SHORT]).await;
        let [_, over_tcp, lost] = client.counts().await;
        assert_eq!((over_tcp, lost), (0, 0));
    }
}
