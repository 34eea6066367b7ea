//! Peers can neither fill the log nor write lines of their own into it.

use std::future::poll_fn;

use bytes::{BufMut, BytesMut};
use tonic_rdma_fabric::{Link, Work};
use tonic_rdma_proto::Hello;

use crate::tests::admission::tickets::Hand;
use crate::tests::support::logs::Logs;
use crate::tests::support::world::World;

const CONNECTIONS: usize = 100;
/// The close code of an internal error.
const INTERNAL: u32 = 2;

/// The longest text that a CLOSE carries, with new lines, a terminal escape, and a flood of
/// characters.
fn text() -> Vec<u8> {
    let mut text = b"bye\n2026-01-01T00:00:00Z ERROR forged: all is lost\r\x1b[2J".to_vec();
    text.resize(240, b'x');
    text
}

/// The message of a peer that closes the connection with an error.
fn close() -> BytesMut {
    let text = text();
    let mut message = BytesMut::new();
    message.put_u32_le(0);
    message.put_u32_le(8 + 8 + 4 + text.len() as u32);
    message.put_slice(&[12, 0]);
    message.put_u16_le(4 + text.len() as u16);
    message.put_u32_le(0);
    message.put_u32_le(INTERNAL);
    message.put_slice(&text);
    message
}

#[tokio::test]
async fn peers_that_close_with_an_error_again_and_again_leave_few_short_lines() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let message = close();
    for _ in 0..CONNECTIONS {
        let (ticket, addr) = hand.ticket().await;
        let hello = Hello::new(ticket, tonic_rdma_proto::Config::default().settings());
        let (mut connected, _pool) = hand.connect(addr, &hello.encode()).await.unwrap();
        connected.link.block_mut()[..message.len()].copy_from_slice(&message);
        let work = Work::Send { offset: 0, len: message.len() };
        let _ = connected.link.queue(1, work, true).unwrap();
        connected.link.ring_doorbell().unwrap();
        let mut out = Vec::new();
        while poll_fn(|cx| connected.link.poll(cx, &mut out)).await.is_ok() {}
    }
    let lines = logs.lines_with("the peer closed the connection");
    assert!((1..=CONNECTIONS / 2).contains(&lines.len()), "{} lines", lines.len());
    let lost = logs.lines_with("fast path lost");
    assert!((1..=CONNECTIONS / 2).contains(&lost.len()), "{} lines", lost.len());
    for line in lines.iter().chain(&lost) {
        assert!(line.contains(r"bye\n2026-01-01T00:00:00Z ERROR forged"), "{line}");
        assert!(!line.contains("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"), "{line}");
    }
    let forged = logs.lines_with("").iter().filter(|line| line.starts_with("2026-01-01")).count();
    assert_eq!(forged, 0);
}
