//! Shared memory between two processes, and the clean-up after a killed peer. The other process
//! runs this same program, which therefore has its own main function.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::future::Future;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::{Command, ExitCode};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use common::process::{self, Process};
use common::stranger::{LEND, Stranger, TAIL, WAITING};
use common::*;
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{
    Addr, Fabric, HostProcess, Lending, Lent, Link, LinkError, Listener, ShmAccess, ShmAddr, Work,
    WriteSource,
};
use tonic_rdma_memory::{LendableBuf, LendableMemory, Pool, PoolConfig, PoolRegistration};

/// The environment variables for the role of the other process and for the address to which it
/// connects.
const ROLE: &str = "SHM_ROLE";
const ADDR: &str = "SHM_ADDR";

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        if role == "names" {
            names_a_channel();
            return ExitCode::SUCCESS;
        }
        if role == "namespace" {
            in_another_namespace();
            return ExitCode::SUCCESS;
        }
        if role == "pod" {
            in_another_container();
            return ExitCode::SUCCESS;
        }
        let role = role.strip_prefix("old-").map_or(role.clone(), |role| {
            refuse_preadv2();
            role.to_owned()
        });
        process::block_on(another_process(role));
        return ExitCode::SUCCESS;
    }
    process::run([
        // This test runs first, because other threads close the descriptors of earlier tests.
        process::self_test(
            "a_killed_peer_leaves_nothing_behind",
            a_killed_peer_leaves_nothing_behind,
        ),
        process::self_test(
            "a_killed_reader_keeps_nothing_that_was_lent",
            a_killed_reader_keeps_nothing_that_was_lent,
        ),
        process::self_test(
            "a_killed_lender_takes_nothing_away",
            a_killed_lender_takes_nothing_away,
        ),
        process::self_test(
            "a_killed_process_between_takes_nothing_away",
            a_killed_process_between_takes_nothing_away,
        ),
        process::self_test(
            "registered_memory_is_all_that_a_peer_maps",
            registered_memory_is_all_that_a_peer_maps,
        ),
        process::self_test("one_process_is_lent_to", one_process_is_lent_to),
        process::self_test("two_processes_talk", two_processes_talk),
        process::self_test("connections_share_eventfds", connections_share_eventfds),
        process::self_test(
            "an_old_kernel_is_woken_by_messages",
            an_old_kernel_is_woken_by_messages,
        ),
        process::self_test("channels_are_those_of_one_process", channels_are_those_of_one_process),
        process::self_test(
            "a_peer_of_another_namespace_is_not_waited_for",
            a_peer_of_another_namespace,
        ),
        process::self_test(
            "another_namespace_reads_nothing_of_others",
            another_namespace_reads_nothing_of_others,
        ),
    ])
}

fn side() -> Side {
    Side::new(Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::Off)))
}

/// A side that lends what it sends, and allows lending on.
fn lending_side() -> Side {
    side_with(Lending::SameUserOnward)
}

/// A side that lends as `lending` says.
fn side_with(lending: Lending) -> Side {
    let fabric = Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, lending));
    let pool = Pool::new(PoolConfig::default(), fabric.registrar()).unwrap().for_peer();
    Side { fabric, pool }
}

fn start(role: &str, addr: &str) -> Process {
    Process::start(&[(ROLE, role), (ADDR, addr)])
}

/// The number of this process's descriptors, and of its mappings of memfds.
fn held() -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (files, maps.lines().filter(|line| line.contains("/memfd:tonic-rdma")).count())
}

/// The numbers of eventfds and of memfds among the descriptors.
fn event_fds_and_memfds() -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let names: Vec<_> = files.filter_map(|file| file.unwrap().path().read_link().ok()).collect();
    let count = |name: &str| names.iter().filter(|file| file.starts_with(name)).count();
    let memfds = names.iter().filter(|file| file.to_string_lossy().contains("/memfd:")).count();
    (count("anon_inode:[eventfd]"), memfds)
}

/// Waits until there are two eventfds more than `before` and as many memfds, because other threads
/// close what a peer has sent. Returns the numbers then, or those after the timeout.
async fn at_rest(before: (usize, usize)) -> (usize, usize) {
    let end = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let now = event_fds_and_memfds();
        if now == (before.0 + 2, before.1) || tokio::time::Instant::now() > end {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

const MANY: usize = 20;

/// The other process: it makes many connections, and prints what it holds for them at rest.
async fn many_connections(side: &Side) {
    let before = event_fds_and_memfds();
    let addr: ShmAddr = std::env::var(ADDR).expect(ADDR).parse().unwrap();
    let addr = Addr::from(addr);
    // All attempts run at once: each of them is polled in turn.
    let mut connecting: Vec<_> = (0..MANY).map(|_| Box::pin(side.connect(&addr))).collect();
    let mut ends = Vec::new();
    std::future::poll_fn(|cx| {
        connecting.retain_mut(|connecting| match connecting.as_mut().poll(cx) {
            Poll::Ready(connected) => {
                ends.push(End::new(connected.unwrap().link));
                false
            }
            Poll::Pending => true,
        });
        if connecting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    for end in &mut ends {
        assert_eq!(end.receive().await.unwrap(), b"rest");
        end.link.shrink().unwrap();
    }
    let after = at_rest(before).await;
    println!("holds {} {}", after.0 - before.0, after.1 - before.1);
    ends[0].death().await;
}

/// Each end has two eventfds for all connections of two processes, even if all connect at once. At
/// rest it has no descriptor of the page.
async fn connections_share_eventfds() {
    let me = side();
    let before = event_fds_and_memfds();
    let mut listener = me.listen();
    let mut process = start("many", listener.local_addr().shm().unwrap().name());
    let mut ends = Vec::new();
    for _ in 0..MANY {
        let incoming = listener.accept().await.unwrap();
        ends.push(End::new(incoming.accept(&config(), &me.pool, b"", TIMEOUT).await.unwrap()));
    }
    for end in &mut ends {
        end.send(0, b"rest").await;
    }
    assert_eq!(process.says("holds"), "2 0");
    for end in &mut ends {
        end.link.shrink().unwrap();
    }
    let after = at_rest(before).await;
    assert_eq!((after.0 - before.0, after.1), (2, before.1));
    drop(ends);
    assert!(process.ends_well());
}

/// Names in /dev/shm. There must never be any.
fn named() -> Vec<std::ffi::OsString> {
    let Ok(entries) = std::fs::read_dir("/dev/shm") else { return Vec::new() };
    let names = entries.filter_map(Result::ok).map(|e| e.file_name());
    let ours = ["tonic-rdma-ring", "tonic-rdma-landing"];
    names.filter(|n| ours.iter().any(|our| n.to_string_lossy().contains(our))).collect()
}

/// The other process.
async fn another_process(role: String) {
    let lends = role == "lend" || role == "between";
    let side = if lends { lending_side() } else { side() };
    if role == "many" {
        return many_connections(&side).await;
    }
    let mut end = match role.as_str() {
        "serve" => {
            let mut listener = side.listen();
            println!("listening {}", listener.local_addr().shm().unwrap().name());
            let incoming = listener.accept().await.unwrap();
            assert_eq!(incoming.private_data(), b"hello");
            let link = incoming.accept(&config(), &side.pool, b"welcome", TIMEOUT).await.unwrap();
            End::new(link)
        }
        _ => {
            let addr: ShmAddr = std::env::var(ADDR).expect(ADDR).parse().unwrap();
            let mut end = End::new(side.connect(&addr.into()).await.unwrap().link);
            end.send(0, b"first").await;
            end
        }
    };
    println!("stands {}", std::process::id());
    // Grants memory on request, answers "landed" with the sum of the landed bytes, and echoes
    // everything else.
    let mut landing = Some(side.landing(256 << 10));
    let mut landed = bytes::Bytes::new();
    let (mut lent, mut read) = (None, Vec::new());
    while let Ok(data) = end.receive().await {
        match data.as_slice() {
            // Lends bytes. The answer is empty until the peer has mapped them, and then says where
            // they lie.
            b"lend" => {
                let bytes = lent.get_or_insert_with(|| side.payload(LENT, 7)).clone();
                let lent = end.link.lend(side.pool.lend(&bytes).unwrap()).unwrap();
                end.send(1, &lent.map_or(Vec::new(), place)).await;
            }
            [b'r', b'e', b'a', b'd', at @ ..] => {
                let bytes = end.link.borrow(lent_at(at), LENT as u32).unwrap();
                assert!(bytes == pattern(LENT, 7));
                read.push(bytes);
                end.send(1, b"reads").await;
            }
            // Lends on what it reads, in the same way.
            b"on" => {
                let bytes = side.pool.lend(read.last().unwrap()).expect("may be lent on");
                let lent = end.link.lend(bytes).unwrap();
                end.send(1, &lent.map_or(Vec::new(), place)).await;
            }
            b"grant" => {
                let buf = landing.as_ref().expect("one grant");
                end.link.share(buf.rkey()).unwrap();
                let grant =
                    [buf.addr().to_le_bytes().as_slice(), &buf.rkey().to_le_bytes()].concat();
                end.send(1, &grant).await;
            }
            b"landed" => {
                landed = landing.take().expect("one grant").filled(256 << 10).lend();
                let sum: u64 = landed.iter().map(|b| u64::from(*b)).sum();
                end.send(1, &sum.to_le_bytes()).await;
            }
            _ => drop(end.send(1, &data).await),
        }
    }
    drop(landed);
}

/// The number of bytes that are lent.
const LENT: usize = 300_000;

fn place(lent: Lent) -> Vec<u8> {
    let Lent { lease, key, addr } = lent;
    [lease.to_le_bytes().as_slice(), &key.to_le_bytes(), &addr.to_le_bytes()].concat()
}

fn lent_at(bytes: &[u8]) -> Lent {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let addr = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    Lent { lease: word(0), key: word(4), addr }
}

/// Registers application memory that may be lent.
fn registered(me: &Side) -> (bytes::Bytes, Option<PoolRegistration>) {
    let mut buf = LendableBuf::zeroed(LENT).unwrap();
    buf.copy_from_slice(&pattern(LENT, 7));
    let memory = Arc::new(buf.freeze());
    let registration = me.pool.register_lendable(memory.clone()).unwrap();
    (LendableMemory::bytes(memory), Some(registration))
}

/// Lends bytes to the other process once it has mapped the memory in which they lie, and makes it
/// read them.
async fn lend_to_process(me: &Side, end: &mut End, bytes: &bytes::Bytes) {
    let lent = loop {
        if let Some(lent) = end.link.lend(me.pool.lend(bytes).unwrap()).unwrap() {
            break lent;
        }
        end.send(0, b"hello").await;
        end.receive().await.unwrap();
        tokio::task::yield_now().await;
    };
    end.send(0, &[b"read".as_slice(), &place(lent)].concat()).await;
    assert_eq!(end.receive().await.unwrap(), b"reads");
}

/// Waits until this process holds only what it held before, because other threads close the rest.
async fn closed(before: (usize, usize)) {
    let closed = async {
        while held() != before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let now = tokio::time::timeout(TIMEOUT, closed).await;
    assert!(now.is_ok(), "something is left: {:?}, not {before:?}", held());
}

async fn released(me: &Side) {
    let released = async {
        while me.pool.stats().lent > 0 || me.pool.stats().application > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, released).await.expect("what was lent does not come back");
    assert_eq!(me.pool.stats().send, 0);
}

/// The reader of pool memory or of application memory is killed while it reads. This happens once
/// before and once after the lender's link has ended.
async fn a_killed_reader_keeps_nothing_that_was_lent() {
    let before = held();
    for (link_first, registers) in [(false, false), (false, true), (true, false), (true, true)] {
        let me = lending_side();
        let (mut process, mut end) = with_process(&me, "connect").await;
        process.says("stands");
        let (bytes, registration) = match registers {
            false => (me.payload(LENT, 7), None),
            true => registered(&me),
        };
        lend_to_process(&me, &mut end, &bytes).await;
        drop((bytes, registration));
        let mut end = Some(end);
        if link_first {
            end = None;
            // The other process ends when its link ends, so it may have ended already.
        }
        process.kill();
        if let Some(mut end) = end {
            let stats = me.pool.stats();
            assert_eq!(stats.lent + stats.lent_application, LENT, "it is read");
            assert_eq!(stats.application, if registers { LENT } else { 0 });
            end.death().await;
        }
        released(&me).await;
    }
    closed(before).await;
}

/// The pool may not be lent, but the application memory may. The other process maps only the file
/// that holds this memory, read-only, and cannot map it for writing.
async fn registered_memory_is_all_that_a_peer_maps() {
    let me = side_with(Lending::SameUserRegistered);
    let (mut process, mut end) = with_process(&me, "connect").await;
    let pid = process.says("stands");
    assert!(me.pool.lend(&me.payload(LENT, 7)).is_none(), "of the pool");
    let (bytes, registration) = registered(&me);
    lend_to_process(&me, &mut end, &bytes).await;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lent: Vec<_> = maps.lines().filter(|line| line.contains("tonic-rdma-lent")).collect();
    assert_eq!(lent.len(), 1, "{maps}");
    assert!(lent[0].contains(" r--s 00000000 "), "{lent:?}");
    drop((bytes, registration, end));
    process.kill();
    released(&me).await;
}

/// A process that has lent on borrowed memory is killed. The owner keeps the memory until the
/// reader is done, although only the killed process knew of the reader. Here the owner is also the
/// reader.
async fn a_killed_process_between_takes_nothing_away() {
    let before = held();
    for owner_leaves_first in [false, true] {
        let me = lending_side();
        let (mut process, mut end) = with_process(&me, "between").await;
        process.says("stands");
        let bytes = me.payload(LENT, 7);
        lend_to_process(&me, &mut end, &bytes).await;
        let on = loop {
            end.send(0, b"on").await;
            let answer = end.receive().await.unwrap();
            if !answer.is_empty() {
                break lent_at(&answer);
            }
            tokio::task::yield_now().await;
        };
        let read = end.link.borrow(on, LENT as u32).unwrap();
        let at = bytes.as_ptr();
        drop(bytes);
        if owner_leaves_first {
            drop(end);
            process.kill();
        } else {
            process.kill();
            end.death().await;
            drop(end);
        }
        assert_eq!(me.pool.stats().lent, LENT, "it is read");
        // New buffers lie elsewhere.
        let others: Vec<_> = std::iter::from_fn(|| me.pool.try_alloc(64 << 10).ok()).collect();
        for mut buf in others {
            buf.resize_zeroed(64 << 10);
            assert_ne!(buf.as_ptr(), at);
        }
        assert!(read == pattern(LENT, 7));
        let part = read.slice(LENT - 10..);
        drop(read);
        assert_eq!((me.pool.stats().lent, &part[..]), (LENT, &pattern(LENT, 7)[LENT - 10..]));
        drop(part);
        released(&me).await;
    }
    closed(before).await;
}

/// A pool that is for one process is lent only to that process. Another process gets nothing,
/// neither when it connects first nor after the one process has ended.
async fn one_process_is_lent_to() {
    let mut first = start("serve", "");
    let addr: ShmAddr = first.says("listening").parse().unwrap();
    let me = side_with(Lending::OneProcess(HostProcess::by_pid(first.id()).unwrap()));
    let (mut second, mut other) = with_process(&me, "connect").await;
    let pid = second.says("stands");
    let bytes = me.payload(LENT, 7);
    let refused = async |other: &mut End| {
        for _ in 0..100 {
            assert_eq!(other.link.lend(me.pool.lend(&bytes).unwrap()).unwrap(), None);
            other.send(0, b"hello").await;
            other.receive().await.unwrap();
        }
        assert!(!other.link.may_lend());
    };
    refused(&mut other).await;
    let mut end = End::new(me.connect(&addr.into()).await.unwrap().link);
    end.send(0, b"first").await;
    assert_eq!(end.receive().await.unwrap(), b"first");
    loop {
        if end.link.lend(me.pool.lend(&bytes).unwrap()).unwrap().is_some() {
            break;
        }
        end.send(0, b"hello").await;
        end.receive().await.unwrap();
        tokio::task::yield_now().await;
    }
    first.kill();
    end.death().await;
    drop(end);
    refused(&mut other).await;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(!maps.contains("tonic-rdma-lent"), "{maps}");
}

/// Memory lent by a killed process remains readable, and is unmapped when its last slice is
/// dropped.
async fn a_killed_lender_takes_nothing_away() {
    let me = side();
    let before = held();
    let (mut process, mut end) = with_process(&me, "lend").await;
    process.says("stands");
    let lent = loop {
        end.send(0, b"lend").await;
        let answer = end.receive().await.unwrap();
        if !answer.is_empty() {
            break lent_at(&answer);
        }
        tokio::task::yield_now().await;
    };
    let read = end.link.borrow(lent, LENT as u32).unwrap();
    process.kill();
    end.death().await;
    drop(end);
    assert!(read == pattern(LENT, 7));
    let part = read.slice(LENT - 10..);
    drop(read);
    assert!(part == pattern(LENT, 7)[LENT - 10..]);
    drop((part, process));
    closed(before).await;
}

/// Requests a grant from the peer, and returns its address and key.
async fn grant(end: &mut End) -> (u64, u32) {
    end.send(0, b"grant").await;
    let grant = end.receive().await.unwrap();
    let (addr, rkey) = grant.split_at(8);
    (u64::from_le_bytes(addr.try_into().unwrap()), u32::from_le_bytes(rkey.try_into().unwrap()))
}

/// All functions of a link with the peer in another process, as client and as server.
async fn two_processes_talk() {
    let me = side();
    for role in ["serve", "connect"] {
        let (mut process, mut end) = with_process(&me, role).await;
        let pid: u32 = process.says("stands").parse().unwrap();
        assert_eq!(end.link.peer().remote, Addr::Process(pid));
        assert_eq!(end.link.peer().local, Addr::Process(std::process::id()));
        for i in 0..2000u32 {
            end.send(i as usize % 8, &pattern((i % 1000) as usize, i as u8)).await;
            assert_eq!(end.receive().await.unwrap(), pattern((i % 1000) as usize, i as u8));
        }
        let (addr, rkey) = grant(&mut end).await;
        let data = pattern(256 << 10, 5).freeze();
        for (i, part) in data.chunks(10_000).enumerate() {
            let src = WriteSource::Any(data.slice_ref(part));
            let remote_addr = addr + 10_000 * i as u64;
            end.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
        }
        end.send(0, b"landed").await;
        let sum: u64 = data.iter().map(|b| u64::from(*b)).sum();
        assert_eq!(end.receive().await.unwrap(), sum.to_le_bytes());
        end.link.disconnect();
        assert!(process.ends_well(), "the other side ends in good order");
    }
}

async fn with_process(me: &Side, role: &str) -> (Process, End) {
    if role.ends_with("serve") {
        let mut process = start(role, "");
        let addr: ShmAddr = process.says("listening").parse().unwrap();
        let connected = me.connect(&addr.into()).await.unwrap();
        assert_eq!(connected.private_data, b"welcome");
        let mut end = End::new(connected.link);
        end.send(0, b"first").await;
        assert_eq!(end.receive().await.unwrap(), b"first");
        (process, end)
    } else {
        let mut listener = me.listen();
        let process = start(role, listener.local_addr().shm().unwrap().name());
        let incoming = listener.accept().await.unwrap();
        let mut end = End::new(incoming.accept(&config(), &me.pool, b"", TIMEOUT).await.unwrap());
        assert_eq!(end.receive().await.unwrap(), b"first");
        (process, end)
    }
}

/// After the peer is killed amid traffic (kill -9), this process keeps none of its descriptors,
/// mappings or memory.
async fn a_killed_peer_leaves_nothing_behind() {
    let me = side();
    let before = held();
    for (round, role) in ["serve", "connect", "serve", "connect"].into_iter().enumerate() {
        let (mut process, mut end) = with_process(&me, role).await;
        process.says("stands");
        let (addr, rkey) = grant(&mut end).await;
        // Memory of this side to which the peer may write.
        let mine = me.landing(1 << 20);
        end.link.share(mine.rkey()).unwrap();
        let src = || WriteSource::Any(vec![7; 4096].into());
        end.queue(Work::Write { src: src(), remote_addr: addr, rkey }, false).unwrap();
        for i in 0..8 {
            end.queue_send(i, b"more", true).unwrap();
        }
        end.link.ring_doorbell().unwrap();
        process.kill();
        let error = end.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
        assert!(error.to_string().contains("process "), "{error}");
        drop((process, end, mine));
        assert_eq!((me.pool.stats().in_use_bytes(), me.pool.stats().leased), (0, 0));
        assert_eq!(named(), Vec::<std::ffi::OsString>::new());
        // Other threads close and unmap the peer's resources.
        let closed = async {
            while held() != before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let closed = tokio::time::timeout(TIMEOUT, closed).await;
        assert!(closed.is_ok(), "round {round}: {:?}, before {before:?}", held());
    }
}

/// Makes the kernel refuse preadv2(2) to this process, like a kernel without RWF_NOWAIT for
/// eventfds.
fn refuse_preadv2() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EOPNOTSUPP as u32;
    let mut steps = [
        // Loads the number of the system call.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_preadv2 as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the kernel copies the filter, which is there until both calls have returned (R17).
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}

/// If one of the ends cannot read an eventfd without blocking, messages wake both ends.
async fn an_old_kernel_is_woken_by_messages() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let me = side();
    for (role, event_fds) in [("serve", 2), ("old-serve", 0), ("connect", 2), ("old-connect", 0)] {
        let before = event_fds_and_memfds();
        let (mut process, mut end) = with_process(&me, role).await;
        for i in 0..100_u32 {
            end.send(0, &i.to_ne_bytes()).await;
            assert_eq!(end.receive().await.unwrap(), i.to_ne_bytes());
        }
        assert_eq!(event_fds_and_memfds().0 - before.0, event_fds, "{role}");
        end.link.disconnect();
        assert!(process.ends_well());
        drop(end);
    }
}

/// Connects three times, and names the channel with the number 7 each time. The second time it also
/// makes this channel. It prints each time how the listener wants to be woken. A second process
/// with this role names the channel of the first.
fn names_a_channel() {
    let mut strangers = Vec::new();
    for fds in [0, 3, 0] {
        let mut stranger = Stranger::connect(&std::env::var(ADDR).expect(ADDR));
        stranger.number = 7;
        stranger.greet();
        let ring = stranger.accepted();
        let own = stranger.own();
        let own: Vec<_> = own[..fds].iter().map(|fd| fd.as_fd()).collect();
        stranger.send(&stranger.ready(7), &own);
        let mut waiting = [0; 8];
        while waiting == [0; 8] {
            ring.read_exact_at(&mut waiting, WAITING).unwrap();
            std::thread::yield_now();
        }
        println!("told {}", u64::from_ne_bytes(waiting));
        strangers.push(stranger);
    }
    // Waits until the test ends.
    while strangers[0].receive().is_some() {}
}

/// A process cannot use another process's channel by naming it, even if both have the same user.
async fn channels_are_those_of_one_process() {
    BUSY_POLL_LIMIT.set(Duration::ZERO);
    let me = side();
    let mut listener = me.listen();
    let mut processes = Vec::new();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let mut process = start("names", listener.local_addr().shm().unwrap().name());
        // Without a channel the listener is woken by messages. Then it is woken through the first
        // and the second place of the process's own channel.
        for told in [u64::MAX, 1, 2] {
            let incoming = listener.accept().await.unwrap();
            let accepted = incoming.accept(&config(), &me.pool, b"", TIMEOUT).await;
            let mut end = End::new(accepted.unwrap());
            assert!(end.is_quiet().await);
            assert_eq!(process.says("told"), told.to_string());
            ends.push(end);
        }
        processes.push(process);
    }
    drop(ends);
    assert!(processes.into_iter().all(|mut process| process.ends_well()));
}

/// Runs as the first process of a PID namespace, so it cannot stop its peer outside. It makes
/// eventfds blocking after the peer has checked them, and waits to be woken by a message.
fn in_another_namespace() {
    assert_eq!(std::process::id(), 1, "this is no namespace of its own");
    let stranger = Stranger::connect(&std::env::var(ADDR).expect(ADDR));
    stranger.greet();
    let _ring = stranger.accepted();
    let fds = stranger.own();
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    stranger.send(&stranger.ready(stranger.number), &fds);
    while stranger.get_own(TAIL) == 0 {
        std::thread::yield_now();
    }
    for event_fd in [&stranger.own_event_fd, &stranger.peers_event_fd] {
        rustix::fs::fcntl_setfl(event_fd, rustix::fs::OFlags::empty()).unwrap();
    }
    stranger.put_own(WAITING, 1);
    println!("waits {}", std::process::id());
    let (woken, _) = stranger.receive().expect("hung up on");
    println!("heard {woken:?}");
}

/// A process of the same user that could not stop this one is woken without a call that may block.
async fn a_peer_of_another_namespace() {
    let me = side();
    let mut listener = me.listen();
    let mut process = start_in_another_namespace("namespace", &listener);
    let accept = async {
        let incoming = listener.accept().await.unwrap();
        incoming.accept(&config(), &me.pool, b"", TIMEOUT).await.unwrap()
    };
    let accepted = tokio::time::timeout(TIMEOUT, accept).await;
    let mut end = End::new(
        accepted.expect("`unshare` (util-linux) must be able to make PID namespaces here"),
    );
    end.post(0, b"go on");
    assert_eq!(process.says("waits"), "1");
    let (told, done) = mpsc::channel();
    std::thread::spawn(move || {
        end.post(1, b"wake up");
        told.send(end).unwrap();
    });
    let end = done.recv_timeout(TIMEOUT).expect("waking it waits for ever");
    assert_eq!(process.says("heard"), "[7]", "it is woken by a message");
    drop(end);
    assert!(process.ends_well());
}

/// Starts the other process as the first process of a PID namespace, as in a container.
fn start_in_another_namespace(role: &str, listener: &Listener) -> Process {
    // Root needs no user namespace, and may not be allowed one; other users need one.
    let user: &[&str] = if is_root() { &[] } else { &["--user", "--map-root-user"] };
    let mut unshare = Command::new("unshare");
    unshare
        .args(user)
        .args(["--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap());
    unshare.env(ROLE, role).env(ADDR, listener.local_addr().shm().unwrap().name());
    Process::run(unshare)
}

/// The secret that was sent to another client.
const SECRET: &[u8] = b"what was sent to another client";

/// Runs as the first process of a PID namespace, and looks for the secret in the memory that is
/// lent to it.
fn in_another_container() {
    assert_eq!(std::process::id(), 1, "this is no namespace of its own");
    let stranger = Stranger::connect(&std::env::var(ADDR).expect(ADDR));
    stranger.greet();
    let _ring = stranger.accepted();
    stranger.send(&stranger.ready(stranger.number), &[]);
    let mut found = 0;
    while let Some((message, fds)) = stranger.receive() {
        if message[0] == LEND {
            let mut lent = vec![0; 2 << 20];
            let len = std::fs::File::from(fds.into_iter().next().unwrap()).read_at(&mut lent, 0);
            found += lent[..len.unwrap()].windows(SECRET.len()).filter(|at| *at == SECRET).count();
        }
    }
    println!("found {found}");
}

/// If a process of the same user could not read this process's memory, nothing is lent to it.
async fn another_namespace_reads_nothing_of_others() {
    let me = lending_side();
    let mut listener = me.listen();
    // The secret has the length of the bytes that are lent, so it lies in the same arena.
    let mut buf = me.pool.try_alloc(LENT).unwrap();
    buf.resize_zeroed(LENT);
    buf.as_mut_slice()[..SECRET.len()].copy_from_slice(SECRET);
    let secret = buf.freeze();
    let mut process = start_in_another_namespace("pod", &listener);
    let accept = async {
        let incoming = listener.accept().await.unwrap();
        incoming.accept(&config(), &me.pool, b"", TIMEOUT).await.unwrap()
    };
    let accepted = tokio::time::timeout(TIMEOUT, accept).await;
    let mut end = End::new(
        accepted.expect("`unshare` (util-linux) must be able to make PID namespaces here"),
    );
    let bytes = me.payload(LENT, 7);
    assert_eq!(end.link.lend(me.pool.lend(&bytes).unwrap()).unwrap(), None);
    assert!(!end.link.may_lend());
    drop(end);
    assert_eq!(process.says("found"), "0");
    assert!(process.ends_well());
    drop(secret);
}

fn is_root() -> bool {
    // The owner of this process's directory is its effective user.
    std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}
