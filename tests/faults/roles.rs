//! The roles of the other processes of these tests.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tonic_rdma_tests::load::{Load, Tally, WORKERS, poll_until};
use tonic_rdma_tests::process::{codec_from_name, runtime};
use tonic_rdma_tests::server_process::{fabric_of, serve};

use crate::fault_test::endpoint;
use crate::log::Log;

/// Runs a role until its standard input ends or it is killed.
pub fn play(role: &[String]) -> ExitCode {
    let words: Vec<_> = role.iter().map(String::as_str).collect();
    if words[0] == "cable" {
        cable(&words[1..]);
        return ExitCode::SUCCESS;
    }
    Log::install();
    let runtime = runtime(codec_from_name(words[1]));
    match words[..] {
        ["server", _, at, device] => {
            runtime.block_on(serve(at.parse().unwrap(), device, false, || 0))
        }
        ["server", _, at, device, "alone"] => {
            runtime.block_on(serve(at.parse().unwrap(), device, true, || 0))
        }
        ["client", _, at, device, seed] => {
            runtime.block_on(call(at.parse().unwrap(), device, seed.parse().unwrap()));
        }
        _ => panic!("no role: {role:?}"),
    }
    runtime.shutdown_background();
    ExitCode::SUCCESS
}

/// Keeps making calls. Answers `path` with the path that calls take, and any other line, once calls
/// use RDMA, with how calls have ended so far.
async fn call(at: SocketAddr, device: &str, seed: u64) {
    let (fabric, context) = fabric_of(device);
    let channel = endpoint(at, false, (fabric, &context)).connect().await.unwrap();
    let tally = Tally::default();
    let mut load = Load::start(&channel, seed, &tally);
    let started = || async { channel.stats().calls_fast + channel.stats().calls_tcp };
    poll_until("no calls", started, |calls| *calls >= 2 * WORKERS).await;
    println!("up");
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(question)) = lines.next_line().await {
        if question == "path" {
            println!("{}", channel.path());
            continue;
        }
        poll_until("not on the fast path", || async { channel.path() }, |info| info.path.is_fast())
            .await;
        let (started, before) =
            (|| async { channel.stats().calls_fast }, channel.stats().calls_fast);
        poll_until("no calls over RDMA", started, |calls| *calls >= before + 2 * WORKERS).await;
        load.check();
        println!("{tally:?}");
    }
    load.stop().await;
}

/// A network cable between two guests: forwards datagrams both ways, but none while there is a file
/// `cut`, and while there is a file `rtu` none that tells the passive end of an InfiniBand
/// connection that it is established (READY TO USE). It writes a byte there for each of these.
///
/// `cable HERE_A GUEST_A HERE_B GUEST_B FOLDER`: forwards from port HERE_A to port GUEST_B, and
/// from HERE_B to GUEST_A.
fn cable(words: &[&str]) {
    let port = |n: usize| SocketAddr::from(([127, 0, 0, 1], words[n].parse::<u16>().unwrap()));
    let folder = PathBuf::from(words[4]);
    let [there, back] = [port(0), port(2)].map(|port| UdpSocket::bind(port).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| carry(&there, port(3), &folder));
        carry(&back, port(1), &folder);
    });
}

fn carry(from: &UdpSocket, to: SocketAddr, folder: &Path) {
    let (cut, rtu) = (folder.join("cut"), folder.join("rtu"));
    let mut frame = [0; 65_536];
    loop {
        // The other guest may not be up: like a network, drop the datagram.
        let Ok((len, _)) = from.recv_from(&mut frame) else { continue };
        let frame = &frame[..len];
        if is_ready_to_use(frame)
            && let Ok(mut lost) = OpenOptions::new().append(true).open(&rtu)
        {
            lost.write_all(b"x").unwrap();
            continue;
        }
        if !cut.exists() {
            let _ = from.send_to(frame, to);
        }
    }
}

/// Whether a frame, behind whatever header it is carried with, has a management datagram of the
/// connection manager that says READY TO USE (InfiniBand Architecture Specification 1.3, sections
/// 12.6.9 and 16.7; RoCE v2 has it in UDP to port 4791).
fn is_ready_to_use(frame: &[u8]) -> bool {
    /// Opcode of a SEND of an unreliable datagram, and the queue pair of management.
    const UD_SEND: u8 = 0x64;
    const MANAGEMENT: [u8; 3] = [0, 0, 1];
    const CONNECTION_MANAGER: u8 = 7;
    const READY_TO_USE: [u8; 2] = 0x14_u16.to_be_bytes();
    let port = 4791_u16.to_be_bytes();
    let ports = frame.windows(2).enumerate().filter(|(_, bytes)| *bytes == port);
    ports.take(8).any(|(at, _)| {
        // UDP has its length and its checksum behind the port; then come a header of 12 bytes and
        // one of 8.
        let Some(packet) = frame.get(at + 6..at + 6 + 20 + 24) else { return false };
        let (head, datagram) = packet.split_at(20);
        head[0] == UD_SEND
            && head[5..8] == MANAGEMENT
            && datagram[1] == CONNECTION_MANAGER
            && datagram[16..18] == READY_TO_USE
    })
}
