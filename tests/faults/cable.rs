//! The cable between two guests, each with a kernel of its own, is cut, or loses what it is told
//! to. `tests/guest/suite` starts the guests.

use std::path::PathBuf;

use tonic_rdma::{Path, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{FaultTest, Topology};
use crate::log::Log;

/// A file that the cable looks for: `cut`, or `rtu`.
fn control(name: &str) -> PathBuf {
    let folder = std::env::var("CABLE_CONTROL").expect("CABLE_CONTROL names the cable's folder");
    PathBuf::from(folder).join(name)
}

pub async fn cut(log: Log) {
    let control = control("cut");
    let mut test = FaultTest::with_remote_server(Topology::cable(), log).await;
    for _ in 0..2 {
        let mut load = test.under_load().await;
        load.begin_fault();
        std::fs::write(&control, "").unwrap();
        load.assert_fallback(&[ReasonCode::LinkLost]).await;
        load.wait_for_failed_calls().await;
        std::fs::remove_file(&control).unwrap();
        load.wait_for_recovery().await;
        load.end().await;
    }
    test.end("cable cut between two guests").await;
}

/// The message that tells the server of the connection never arrives. Its first call does, and is
/// answered over RDMA. Soft-RoCE only: iWARP has no such message.
pub async fn ready_to_use_is_lost(log: Log) {
    let mut test = FaultTest::with_remote_server(Topology::cable(), log).await;
    std::fs::write(control("rtu"), "").unwrap();
    test.count_fault();
    for _ in 0..3 {
        let channel = test.endpoint(test.at).connect().await.unwrap();
        assert_eq!(channel.path().path, Path::Verbs);
        for n in 0..50 {
            let mut calls = client_of(AnyChannel::Rdma(channel.clone()));
            calls.unary(payload(n, 20_000)).await.unwrap();
        }
        let stats = channel.stats();
        assert_eq!((stats.calls_fast, stats.calls_tcp, stats.connections_lost), (50, 0, 0));
    }
    let lost = std::fs::read_to_string(control("rtu")).unwrap();
    assert!(lost.len() >= 3, "the cable has lost {} of them", lost.len());
    std::fs::remove_file(control("rtu")).unwrap();
    test.end("ready to use is lost").await;
}
