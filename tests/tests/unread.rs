//! 1,000 streams that nobody reads, over shared memory: the heap of the client stays within its
//! bound, while small calls go on. The server is this program again.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;

use libtest_mimic::Trial;
use peak_alloc::PeakAlloc;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tonic_rdma::{Context, FabricKind, Path};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{wait_for_path, with_timeout};
use tonic_rdma_tests::process::{codec_from_name, role, runtime};
use tonic_rdma_tests::server_process::{self, endpoint, fixed_port};
use tonic_rdma_tests::service::script::{echo, send_many, steps};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const STREAMS: usize = 1000;
/// What the server has to send on each of them, in bytes.
const EACH: usize = 4 << 20;
/// The streams have 64 MiB together, held in half as much again, and each its floor of 32 KiB, held
/// in twice as much. The rest of what a stream takes is less than 32 KiB.
const MOST: usize = (96 << 20) + STREAMS * (3 * (32 << 10));

fn main() -> ExitCode {
    if let Some(role) = role() {
        let runtime = runtime(codec_from_name(&role[1]));
        runtime.block_on(server_process::serve(role[2].parse().unwrap(), &role[3], false, || 0));
        runtime.shutdown_background();
        return ExitCode::SUCCESS;
    }
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Each test measures the memory of this process.
    arguments.test_threads = Some(1);
    let trials = [4000, 100_000, EACH].map(|size| {
        Trial::test(format!("messages_of_{size}_bytes_that_nobody_reads"), move || {
            runtime(CodecKind::ZeroCopy).block_on(nobody_reads(size));
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

async fn nobody_reads(size: usize) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let at = SocketAddr::new(ip, fixed_port(ip, &mut SmallRng::from_os_rng()));
    let server = server_process::start("", "zero-copy", at, "shm").await;
    let context = Context::builder().build();
    let channel = endpoint(at, (FabricKind::Shm, &context)).connect().await.unwrap();
    wait_for_path(&channel, Path::Shm).await;
    let mut client = client_of(AnyChannel::Rdma(channel.clone()));
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let mut unread = Vec::new();
    for seed in 0..STREAMS as u64 {
        let request = steps("", [send_many(seed, size, (EACH / size) as u64)]);
        let call = with_timeout("a head", client.download(request)).await;
        unread.push((seed, call.unwrap().into_inner()));
    }
    for seed in 0..1000 {
        let request = steps("", [echo(1)]).with_payload(seed, 100);
        let reply = with_timeout("a small call", client.unary(request)).await.unwrap();
        reply.into_inner().expect(seed, 100);
    }
    let grown = HEAP.peak_usage() - before;
    assert!(grown <= MOST, "{} MiB of heap", grown >> 20);
    // What a reader waits for comes, whatever the others hold.
    let (seed, mut last) = unread.pop().unwrap();
    for n in 0..(EACH / size) as u64 {
        let message = with_timeout("a message", last.message()).await.unwrap();
        message.unwrap().expect(seed + n, size);
    }
    assert_eq!((channel.stats().calls_tcp, channel.stats().connections_lost), (0, 0));
    println!("{size} bytes: {} MiB of heap at most", grown >> 20);
    drop((unread, last));
    server.kill().await;
}
