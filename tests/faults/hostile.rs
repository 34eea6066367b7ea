//! Peers that have a ticket and violate the protocol with raw work requests on a queue pair. Each
//! harms only its own connection.

use std::time::Duration;

use bytes::BufMut;
use prost::Message as _;
use rand::Rng;
use tonic_rdma_fabric::{ConnectError, LinkError};
use tonic_rdma_proto::frame::Frame;
use tonic_rdma_proto::{Config, Hello};
use tonic_rdma_tests::load::{Load, Tally, poll_until, with_timeout};
use tonic_rdma_tests::pb::step::Step as Kind;
use tonic_rdma_tests::pb::{Message, Script, Step};
use tonic_rdma_tests::server_process::POOL_SIZE;
use tonic_rdma_tests::service::pattern;

use crate::fault_test::{FaultTest, Topology, kind};
use crate::log::Log;
use crate::raw_peer::{ASKED, Host, Peer};

/// Connections that are abandoned during the handshake.
const ABANDONED_CONNECTS: usize = 20;

/// The number of guessed addresses, and the step between them. No chunk of landing memory for such
/// a request is shorter than the step.
const GUESSES: u64 = 24;
const STEP: u64 = ASKED as u64 / 2;

pub async fn peers_that_break_the_rules(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let channel = test.connect().await;
    let tally = Tally::default();
    let load = Load::start(&channel, 0, &tally);
    let host = Host::new(&test.topology.client_device, test.at);

    // Invalid handshakes.
    let (ticket, place) = host.request_ticket().await;
    let hello = Hello::new(ticket, Config::default().settings()).encode();
    for bad in [
        &b""[..],
        &[0xff; 56],
        &hello[..40],
        &Hello::new([7; 16], Config::default().settings()).encode(),
    ] {
        let refused = host.connect(place, bad).await.map(drop).unwrap_err();
        assert!(matches!(refused, ConnectError::Rejected { .. }), "{refused}");
        test.count_fault();
    }
    drop(host.connect(place, &hello).await.unwrap());
    let spent = host.connect(place, &hello).await.map(drop).unwrap_err();
    assert!(matches!(spent, ConnectError::Rejected { .. }), "a ticket is good once: {spent}");
    for _ in 0..ABANDONED_CONNECTS {
        let (ticket, place) = host.request_ticket().await;
        let hello = Hello::new(ticket, Config::default().settings()).encode();
        let _ = tokio::time::timeout(Duration::from_millis(1), host.connect(place, &hello)).await;
        test.count_fault();
    }

    // Violations on an open connection.
    for breach in Breach::ALL {
        run_peer(&host, &mut test, breach).await;
    }
    let ok = tally.of("OK");
    let read = || async { tally.of("OK") };
    poll_until("no calls beside the hostile peers", read, |now| *now > ok + 10).await;
    load.stop().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
    println!("  beside them {} calls went well", tally.of("OK"));
    drop((channel, host));
    test.end("hostile peers").await;
}

/// All connections of a device share a protection domain, so the key of another connection's
/// landing memory is valid for every peer. A peer does not know the address, and has one guess per
/// ticket. Here it knows the key, and guesses near its own memory.
pub async fn a_key_without_its_address(log: Log) {
    // Chunks of 2 MiB and more keep their offset within a huge page (SECURITY.md). The chunks of
    // this pool are shorter, so that every bit of a page number can vary.
    let mut env = format!("env {POOL_SIZE}={}", 32 << 20);
    // The server logs a burst of 20 losses, and then one per second. Each guess must be visible in
    // the log.
    env += " RUST_LOG=info,tonic_rdma::connection::driver=debug";
    let mut test = FaultTest::with_wrapper(&env, Topology::one_device(), log).await;
    let channel = test.connect().await;
    let tally = Tally::default();
    let load = Load::start(&channel, 0, &tally);
    let host = Host::new(&test.topology.client_device, test.at);

    // The victim has written its message but not yet sent DONE.
    let mut victim = host.connect_with_ticket().await;
    let granted = victim.grant().await;
    let (message, payload) = upload(ASKED);
    victim.write(&message, granted.addr, granted.rkey);
    let mut granted_addrs = vec![granted.addr];
    tokio::select! {
        () = guess(&host, &mut test, granted.rkey, &mut granted_addrs) => {}
        error = victim.answer_pings() => panic!("the connection whose memory they look for has ended: {error}"),
    }
    // The victim's memory is unchanged, as the handler's check of each byte shows.
    victim
        .frame(&Frame::Done { stream: 1, end: true, id: granted.id, len: ASKED as u32, begin: 0 })
        .await;
    let summary = victim.reply().await;
    assert_eq!((summary.count, summary.total), (1, payload as u64));
    assert_random(&granted_addrs);

    let ok = tally.of("OK");
    let read = || async { tally.of("OK") };
    poll_until("no calls beside the peers that guess", read, |now| *now > ok + 10).await;
    load.stop().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
    println!("  {GUESSES} guesses; beside them {} calls went well", tally.of("OK"));
    drop((victim, channel, host));
    test.end("guessed addresses").await;
}

/// Peers connect one after the other. Each requests memory, and WRITEs near it with the key of
/// another connection.
async fn guess(host: &Host, test: &mut FaultTest, rkey: u32, granted_addrs: &mut Vec<u64>) {
    for guess in 0..GUESSES {
        let mut peer = host.connect_with_ticket().await;
        let (before, by) = (test.server_log_count("connection ended"), guess / 2 * STEP);
        let own = peer.grant().await;
        granted_addrs.push(own.addr);
        let beside =
            if guess % 2 == 0 { own.addr.wrapping_add(by) } else { own.addr.wrapping_sub(by) };
        peer.write(&[0; 4096], beside, rkey);
        match with_timeout("the end of a peer that guessed", peer.wait_for_end()).await {
            LinkError::Completion { code: 10, .. } if kind() == "rxe" => {}
            LinkError::Disconnected { .. } if kind() == "siw" => {}
            other => panic!("guess {guess}: {other}"),
        }
        drop(peer);
        test.count_fault();
        let read = || async { test.server_log_count("connection ended") };
        poll_until("the loss is not in the server's log", read, |now| *now > before).await;
    }
}

/// Checks the addresses of grants: each bit of the page number varies, up to the length that
/// SECURITY.md gives for the device.
fn assert_random(granted_addrs: &[u64]) {
    let top = u64::BITS - granted_addrs.iter().max().unwrap().leading_zeros();
    match kind().as_str() {
        "rxe" => assert_eq!(top, 64),
        // A process has 39 bits of address space under User Mode Linux, and 47 on other x86-64
        // kernels.
        _ => assert!(top >= 39, "{top}"),
    }
    const PAGE: u32 = 12;
    for bit in PAGE..top {
        let set = granted_addrs.iter().filter(|addr| (*addr >> bit) & 1 == 1).count();
        assert!(
            set > 0 && set < granted_addrs.len(),
            "bit {bit} of {top} is always the same: {granted_addrs:x?}"
        );
    }
    println!("  {} bits of the page number vary in {} grants", top - PAGE, granted_addrs.len());
}

/// An Upload message of `len` bytes on the wire, and the bytes of payload in it.
fn upload(len: usize) -> (Vec<u8>, usize) {
    let steps = [Kind::Receive(1), Kind::Summary(true)].map(|step| Step { step: Some(step) });
    let script = Some(Script { steps: steps.to_vec(), ..Script::default() });
    let of = |payload| Message {
        payload: pattern::make(7, payload),
        seed: 7,
        script: script.clone(),
        ..Message::default()
    };
    const PREFIX: usize = 5;
    // The rest of the message has the same length with a payload of `len` bytes and of `payload`
    // bytes.
    let payload = 2 * len - PREFIX - of(len).encoded_len();
    let mut bytes = vec![0];
    bytes.put_u32((len - PREFIX) as u32);
    of(payload).encode(&mut bytes).unwrap();
    assert_eq!(bytes.len(), len);
    (bytes, payload)
}

/// Commits a random breach next to a channel that must not be affected.
pub async fn run_hostile_peer(test: &mut FaultTest) {
    let load = test.under_load().await;
    let breach = Breach::ALL[load.test.rng.random_range(0..Breach::ALL.len())];
    let host = Host::new(&load.test.topology.client_device, load.test.at);
    run_peer(&host, load.test, breach).await;
    let channel = load.channel.clone();
    let tally = load.end().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
}

/// A violation of the protocol.
#[derive(Clone, Copy, Debug)]
enum Breach {
    /// A message of another protocol.
    Words,
    /// PINGs as fast as the device accepts them.
    Flood,
    /// SENDs from all its slots at once, many more than the peer has credits for, repeated until
    /// the peer is stopped.
    PastItsCredits,
    /// A message that is longer than the RECV that it takes, on a connection at rest.
    LongerThanItsRecv,
    /// A WRITE with a key that the peer was not given.
    UnknownKey,
    /// A WRITE to an address far from its grant, with the grant's key.
    FarFromItsGrant,
    /// A WRITE with the grant's key, 64 MiB behind the grant. The region is a chunk of landing
    /// memory, which is shorter.
    BehindItsGrant,
}

impl Breach {
    const ALL: [Self; 7] = [
        Self::Words,
        Self::Flood,
        Self::PastItsCredits,
        Self::LongerThanItsRecv,
        Self::UnknownKey,
        Self::FarFromItsGrant,
        Self::BehindItsGrant,
    ];

    async fn commit(self, peer: &mut Peer) {
        let ping = Frame::Ping { ack: false, token: 1 };
        match self {
            Self::Words => peer.post(b"GET / HTTP/1.1\r\n\r\n"),
            Self::Flood => {
                let mut left = 10_000;
                while left > 0 && peer.try_frame(&ping).await.is_ok() {
                    left -= 1;
                }
                assert!(left > 0, "nothing stops a flood of PINGs");
            }
            Self::PastItsCredits => {
                // The device does not report to the server that the connection has ended. A stream
                // is open, so the server probes the connection.
                peer.grant().await;
                // A quick server returns credits while a burst arrives, and the burst is then
                // within the rules. But the server's own credits limit how many messages it can
                // send, so a later burst breaks the rules.
                let mut left = 100;
                while left > 0 && peer.burst(&ping).await.is_ok() {
                    left -= 1;
                }
                assert!(left > 0, "nothing stops a peer without credits");
            }
            Self::LongerThanItsRecv => {
                let len: u16 = 2048;
                let mut message = vec![0; len.into()];
                message[4..6].copy_from_slice(&len.to_le_bytes());
                peer.post(&message);
            }
            Self::UnknownKey => peer.write_at(|grant| (grant.addr, grant.rkey ^ 0x00ff_ff00)).await,
            Self::FarFromItsGrant => {
                peer.write_at(|grant| (grant.addr + (1 << 40), grant.rkey)).await
            }
            Self::BehindItsGrant => {
                peer.write_at(|grant| (grant.addr + (64 << 20), grant.rkey)).await
            }
        }
    }
}

/// Connects a peer that violates the protocol in this way. The server must close its connection and
/// log it.
async fn run_peer(host: &Host, test: &mut FaultTest, breach: Breach) {
    let before = test.server_log_count("fast path lost");
    let mut peer = host.connect_with_ticket().await;
    breach.commit(&mut peer).await;
    let end = with_timeout("the end of a peer that broke the rules", peer.wait_for_end()).await;
    println!("  {breach:?}: {end}");
    drop(peer);
    test.count_fault();
    let read = || async { test.server_log_count("fast path lost") };
    poll_until("the loss is not in the server's log", read, |now| *now > before).await;
}
