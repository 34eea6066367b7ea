//! ARP flux: a host has two devices in one subnet, and each of its interfaces answers ARP for the
//! address of the other. `tests/guest/suite` joins two guests by a hub. This guest is the
//! neighbour, and the other one is the host.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tonic_rdma::{Path, Policy};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{poll_until, with_timeout};
use tonic_rdma_tests::server_process::{endpoint, fabric_of, serve};
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{kind, run, variable, wait_for_server};
use crate::log::Log;

/// The addresses of the host, each on an interface of its own, and the address of the neighbour.
const HOST: [&str; 2] = ["10.30.0.1", "10.30.0.3"];
const NEIGHBOUR: &str = "10.30.0.2";
/// Number of times that the neighbour asks for the addresses. Which interface answers first may
/// vary.
const ROUNDS: usize = 10;

/// The doctor of the host names the flux, which the neighbour sees. The doctor's cure ends it, and
/// calls go over RDMA to both addresses.
pub async fn two_devices_in_one_subnet(_: Log) {
    // The neighbour itself has one interface only.
    run(&format!("rdma link del {}c1", kind()));
    run("ip link set eth1 down");
    let at = SocketAddr::new(HOST[0].parse().unwrap(), variable("CABLE_PORT").parse().unwrap());
    wait_for_server(at).await;

    let hint = ask(at, "hint").await;
    println!("  {hint}");
    assert!(hint.starts_with("eth0 and eth1 are in one subnet"), "{hint}");
    let wrong = wrong_answers().await;
    println!("  {wrong} of {ROUNDS} times, an address has the other's MAC");
    assert!(wrong > 0, "each interface answers for its own address only");

    let cure = ask(at, "cure").await;
    println!("  {cure}");
    assert!(cure.contains("arp_ignore=2") && cure.contains("arp_announce=2"), "{cure}");
    assert_eq!(ask(at, "hint").await, "none");
    assert_eq!(wrong_answers().await, 0);
    calls_to_both(at).await;
}

/// Asks for the MACs of the host's addresses. Returns in how many rounds an address had the MAC of
/// the other address.
async fn wrong_answers() -> usize {
    let mut wrong = 0;
    for _ in 0..ROUNDS {
        run("ip neigh flush dev eth0");
        let socket = UdpSocket::bind((NEIGHBOUR, 0)).unwrap();
        for ip in HOST {
            // The port of the protocol "discard".
            socket.send_to(b"who has it", (ip, 9)).unwrap();
        }
        let learned = || async { HOST.map(learned) };
        let all = |macs: &[Option<String>; 2]| macs.iter().all(Option::is_some);
        let macs = poll_until("nobody answers ARP", learned, all).await;
        let own = HOST.map(|ip| Some(own_mac(ip)));
        assert!(macs.iter().all(|mac| own.contains(mac)), "{macs:?}");
        wrong += usize::from(macs != own);
    }
    wrong
}

/// The MAC that `tests/guest/run` gives to the interface with an address.
fn own_mac(ip: &str) -> String {
    let Ok(IpAddr::V4(ip)) = ip.parse() else { panic!("{ip}") };
    format!("02:00:00:00:00:{:02x}", ip.octets()[3])
}

/// The MAC that the kernel has learned for an address.
fn learned(ip: &str) -> Option<String> {
    /// ATF_COM of `linux/if_arp.h`: the entry has a MAC.
    const COMPLETE: &str = "0x2";
    let table = std::fs::read_to_string("/proc/net/arp").unwrap();
    let mut entries = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let entry = entries.find(|entry| entry[0] == ip && entry[2] == COMPLETE)?;
    Some(entry[3].to_owned())
}

/// Channels take turns at the host's devices. The calls of each channel go over RDMA.
async fn calls_to_both(at: SocketAddr) {
    let (fabric, context) = fabric_of("all");
    let endpoint = endpoint(at, (fabric, &context)).policy(Policy::Require).rails(1);
    let mut reached = Vec::new();
    for n in 0..4 {
        let channel = endpoint.connect().await.unwrap();
        for len in [100, 1 << 20] {
            client_of(AnyChannel::Rdma(channel.clone())).unary(payload(n, len)).await.unwrap();
        }
        let (path, stats) = (channel.path(), channel.stats());
        assert_eq!((path.path, stats.calls_tcp, stats.connections_lost), (Path::Verbs, 0, 0));
        reached.push(path.remote_addr.unwrap().ip().to_string());
    }
    println!("  calls over RDMA to {}", reached.join(", "));
    for ip in HOST {
        assert_eq!(reached.iter().filter(|reached| *reached == ip).count(), 2, "{reached:?}");
    }
}

/// The host with two devices. It serves, and its doctor answers questions.
pub async fn host(at: SocketAddr, device: &str) {
    tokio::spawn(doctor(TcpListener::bind(doctor_of(at)).await.unwrap()));
    serve(at, device, true, || 0).await;
}

/// The address at which the doctor of a server's host answers.
fn doctor_of(mut server: SocketAddr) -> SocketAddr {
    server.set_port(server.port() + 1);
    server
}

/// Sends a question to the doctor of the host, and returns the answer.
async fn ask(at: SocketAddr, question: &str) -> String {
    let answer = async {
        let mut stream = BufStream::new(TcpStream::connect(doctor_of(at)).await.unwrap());
        stream.write_all(format!("{question}\n").as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        let answer = stream.lines().next_line().await.unwrap();
        answer.expect("the doctor has failed: the server's guest says why")
    };
    with_timeout(question, answer).await
}

/// Answers `hint` with the doctor's hint, or with `none`. Answers `cure` with the command of the
/// hint after it has run.
async fn doctor(questions: TcpListener) {
    loop {
        let (stream, _) = questions.accept().await.unwrap();
        let mut stream = BufStream::new(stream);
        let mut question = String::new();
        stream.read_line(&mut question).await.unwrap();
        let hints = tonic_rdma::diagnose().await.unwrap().hints;
        let hint = hints.into_iter().find(|hint| hint.name == "arp-flux");
        let answer = match (question.trim(), hint) {
            ("hint", None) => "none".to_owned(),
            ("hint", Some(hint)) => hint.what,
            ("cure", Some(hint)) => {
                let command = hint.cures[0].command.clone().unwrap();
                // The guest may have no other sysctl.
                run(&format!("busybox {command}"));
                command
            }
            (question, hint) => panic!("{question}: {hint:?}"),
        };
        stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
    }
}
