//! A profiler sends SIGPROF to each thread of both ends every millisecond, from their start. No
//! connection is refused and no call fails, whatever system call a signal interrupts.

use tonic_rdma_memory::test_util::process::SIGNALS;
use tonic_rdma_tests::fabric::Fabric;

use crate::client::{Client, SIZES};
use crate::server::Server;

/// Number of channels that connect at the same time.
const CHANNELS: usize = 20;

/// Checks that the process has the thread that sends the signals.
fn assert_signalled(id: &str) {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    // A thread that ends has no name any more.
    let name = |path: std::path::PathBuf| std::fs::read_to_string(path.join("comm")).ok();
    let names: Vec<_> = threads.filter_map(|thread| name(thread.unwrap().path())).collect();
    assert!(names.iter().any(|name| name == "signals\n"), "{names:?}");
}

pub async fn connecting_and_calling(fabric: Fabric) {
    let signals = format!("env {SIGNALS}=1");
    let server = Server::start(fabric, &signals, "").await;
    let mut client = Client::start(&server, fabric, &signals, "").await;
    assert_signalled(&server.process.id());
    assert_signalled(&client.process.id());
    client.is_on_its_path().await;
    for _ in 0..3 {
        client.does(&format!("crowd {CHANNELS}")).await;
        client.echo(&SIZES).await;
    }
    assert_eq!(client.counts().await[2], 0);
}
