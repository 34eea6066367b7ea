//! A peer that has this process map files for nothing waits, and is told so by nothing else.
#![cfg(all(target_os = "linux", feature = "shm"))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;

use common::stranger::{
    DECLINED, NAME, SLOT_SIZE, SLOTS, Stranger, TAKEN, TAKES_ALL, arrival, chunk, hello_taking,
    sealed, whole,
};
use common::*;
use tonic_rdma_fabric::shm::ShmDevice;
use tonic_rdma_fabric::{AnyLink, Fabric, Lending, LinkConfig, ShmAccess, Takes};

fn name(key: u32, len: u64) -> Vec<u8> {
    let mut message = chunk(key, 0, len);
    message[0] = NAME;
    message
}

/// The attack: a file that is long and cannot be used, and another. The process that gives them has
/// a debt after the first, so this end looks at the second later, though it is in order.
#[tokio::test]
async fn files_of_a_peer_that_owes_too_much_wait() {
    const LONG: u64 = 48 << 30;
    let side = Side::new(Fabric::Shm(ShmDevice::new(ShmAccess::SameUser, Lending::Off)));
    let mut listener = side.listen();
    let stranger = Arc::new(Stranger::connect(listener.local_addr().shm().unwrap().name()));
    stranger.send(&hello_taking(SLOTS, SLOT_SIZE, TAKES_ALL), &[]);
    let incoming = arrival(&mut listener).await;
    let config = LinkConfig { takes: Takes::ALL, ..config() };
    let entering = stranger.enters(stranger.own());
    let (link, _ring) = tokio::join!(incoming.accept(&config, &side.pool, b"", TIMEOUT), entering);
    let mut end = End::new(link.unwrap());

    for (key, len, file) in [(1, LONG, sealed(LONG)), (2, 4096, whole(4096))] {
        stranger.send(&name(key, len), &[file.as_fd()]);
    }
    let asker = stranger.clone();
    let answers = tokio::task::spawn_blocking(move || {
        [(); 2].map(|()| asker.receive().expect("the connection goes on").0)
    });
    let answers = tokio::select! {
        answers = answers => answers.unwrap(),
        error = end.death() => panic!("{error}"),
    };
    let kinds = answers.map(|answer| answer[0]);
    assert_eq!(kinds, [DECLINED, TAKEN]);
    let AnyLink::Shm(link) = &end.link else { panic!("{:?}", end.link) };
    assert_eq!(link.stats().deferred_files, 1);
}
