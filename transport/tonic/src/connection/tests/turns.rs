//! Tests turns of a driver whose peer and link never make it wait (R20).

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::AtomicU64;

use bytes::BytesMut;
use tonic_rdma_fabric::AnyLink;
use tonic_rdma_fabric::sim::{InstantCounts, InstantLink, InstantPeer};
use tonic_rdma_proto::frame::{Composer, Frame, Reader};
use tonic_rdma_proto::headers;

use super::*;

const TURNS: usize = 50;
/// Maximum operations of a turn: tokio's budget, and one round of the driver, which takes all
/// messages that the link has and answers them.
const MAX_TURN: u64 = 128 + 64;

/// A peer that sends PINGs as fast as it gets credits.
struct Pinging {
    /// Number of SENDs that the peer may post.
    credits: u16,
    /// Number of credits that the peer has to return.
    owed: u16,
    token: u64,
}

impl InstantPeer for Pinging {
    fn receive(&mut self, message: &[u8]) {
        self.credits += u16::from_le_bytes([message[0], message[1]]);
        self.owed += 1;
    }

    fn next_message(&mut self) -> Option<Vec<u8>> {
        self.credits = self.credits.checked_sub(1)?;
        self.token += 1;
        let credits = std::mem::take(&mut self.owed).to_le_bytes();
        let mut message = vec![credits[0], credits[1], 0, 0, 24, 0, 0, 0];
        message.extend([10, 0, 8, 0, 0, 0, 0, 0]);
        message.extend(self.token.to_le_bytes());
        Some(message)
    }
}

/// A peer that sends a body that nobody reads, with one byte in each frame and as many frames as a
/// short message holds.
struct Dripping {
    credits: u16,
    owed: u16,
    /// Whether the stream has been opened.
    opened: bool,
    pieces: Arc<AtomicU64>,
}

/// Frames of one byte in a message.
const PIECES: u64 = 60;

impl InstantPeer for Dripping {
    fn receive(&mut self, message: &[u8]) {
        self.credits += u16::from_le_bytes([message[0], message[1]]);
        self.owed += 1;
    }

    fn next_message(&mut self) -> Option<Vec<u8>> {
        self.credits = self.credits.checked_sub(1)?;
        let mut message = vec![0; 1024];
        let mut composer = Composer::new(&mut message);
        if std::mem::replace(&mut self.opened, true) {
            for _ in 0..PIECES {
                let data = Bytes::from_static(b"x");
                assert!(composer.add(&Frame::Data { stream: 1, end: false, data }));
            }
            self.pieces.fetch_add(PIECES, Relaxed);
        } else {
            assert!(composer.add(&opening(1)));
        }
        let len = composer.finish(std::mem::take(&mut self.owed));
        message.truncate(len);
        Some(message)
    }
}

/// A peer that opens streams, and asks for as many grants on each as it may.
struct Requesting {
    credits: u16,
    owed: u16,
    /// Number of streams that have been opened.
    opened: u32,
    grants: Arc<AtomicU64>,
}

/// Streams that a message opens, and grants that it asks for on each.
const OPENED: u32 = 3;
const REQUESTS: u64 = 8;
/// Number of streams after which the peer only sends PINGs.
const STREAMS: u32 = 900;

impl InstantPeer for Requesting {
    fn receive(&mut self, message: &[u8]) {
        let mut reader = Reader::new(Bytes::copy_from_slice(message)).unwrap();
        self.credits += reader.credits;
        self.owed += 1;
        while let Some(frame) = reader.next_frame().unwrap() {
            if let Frame::Grant { .. } = frame {
                self.grants.fetch_add(1, Relaxed);
            }
        }
    }

    fn next_message(&mut self) -> Option<Vec<u8>> {
        self.credits = self.credits.checked_sub(1)?;
        let mut message = vec![0; 1024];
        let mut composer = Composer::new(&mut message);
        if self.opened == STREAMS {
            assert!(composer.add(&Frame::Ping { ack: false, token: 1 }));
        } else {
            for stream in self.opened + 1..=self.opened + OPENED {
                assert!(composer.add(&opening(stream)));
                for _ in 0..REQUESTS {
                    let (len, begin, field) = (100, 0, None);
                    assert!(composer.add(&Frame::Request { stream, len, begin, field }));
                }
            }
            self.opened += OPENED;
        }
        let len = composer.finish(std::mem::take(&mut self.owed));
        message.truncate(len);
        Some(message)
    }
}

/// The frame that opens a stream whose handler reads nothing.
fn opening(stream: u32) -> Frame {
    let mut block = BytesMut::new();
    for (name, value) in [(":method", "POST"), (":scheme", "http"), (":path", "/hang")] {
        headers::encode(&mut block, name, value.as_bytes()).unwrap();
    }
    let (end, more, indexed, lands) = (false, false, false, false);
    Frame::Headers { stream, end, more, indexed, lands, block: block.freeze() }
}

/// Runs the driver of a connection for [`TURNS`] turns, on an instant link with a peer that `peer`
/// creates from its credits. Returns how much `count` has grown in each turn.
async fn turns_with<P: InstantPeer>(
    peer: impl FnOnce(u16) -> P,
    count: impl Fn(&InstantCounts) -> u64,
) -> Vec<u64> {
    let device = SimNet::new(SimConfig::default()).device("sim0", "10.0.0.1".parse().unwrap());
    let pool = Pool::new(PoolConfig::default(), Fabric::Sim(device).registrar()).unwrap();
    let mut options = ConnectionConfig::for_pool(&pool, false, None);
    // Make room for everything that a peer sends in all turns, so that no turn ends with a breach.
    options.proto.stream_window = 1 << 20;
    let settings = options.proto.settings();
    let link = InstantLink::new(&options.link, peer(settings.recv_slots));
    let counts = link.counts();
    let (link, counters) = (AnyLink::Instant(link), Arc::default());
    let accepted = Accepted::new(link, pool, settings, options, counters, Arc::default());
    let echo = Echo { dropped: mpsc::unbounded_channel().0 };
    let mut driver = pin!(serve_connection(accepted, echo));
    let (mut turns, mut before) = (Vec::new(), 0);
    poll_fn(|cx| {
        if let Poll::Ready(reason) = driver.as_mut().poll(cx) {
            panic!("{reason} after {turns:?}");
        }
        let now = count(&counts);
        turns.push(now - before);
        before = now;
        if turns.len() < TURNS { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    turns
}

#[tokio::test]
async fn a_driver_leaves_messages_that_never_end() {
    let peer = |credits| Pinging { credits, owed: 0, token: 0 };
    let turns = turns_with(peer, InstantCounts::operations).await;
    assert!(turns.iter().all(|turn| (1..=MAX_TURN).contains(turn)), "{turns:?}");
}

/// The attack sends messages full of frames with one byte. Such a frame costs the driver more than
/// it costs the peer, so frames are charged to the turn.
#[tokio::test]
async fn a_driver_leaves_messages_that_are_full_of_frames() {
    // Sixteen frames count as one operation. A round of the driver adds one message for each RECV.
    const MOST: u64 = 128 * 16 + 32 * PIECES;
    let pieces = Arc::new(AtomicU64::new(0));
    let sent = pieces.clone();
    let peer = |credits| Dripping { credits, owed: 0, opened: false, pieces };
    let turns = turns_with(peer, |_| sent.load(Relaxed)).await;
    assert!(turns.iter().skip(1).all(|turn| (1..=MOST).contains(turn)), "{turns:?}");
}

/// A message of 1 KiB asks for 24 grants, so grants are charged to the turn.
#[tokio::test]
async fn a_driver_leaves_messages_that_are_full_of_requests() {
    // One round of the driver grants what the messages of all RECVs ask for.
    const MOST: u64 = 128 + 32 * OPENED as u64 * REQUESTS;
    let grants = Arc::new(AtomicU64::new(0));
    let got = grants.clone();
    let peer = |credits| Requesting { credits, owed: 0, opened: 0, grants };
    let turns = turns_with(peer, |_| got.load(Relaxed)).await;
    assert!(turns.iter().all(|turn| (0..=MOST).contains(turn)), "{turns:?}");
    // The connection also gives standing grants.
    assert!(turns.iter().sum::<u64>() >= u64::from(STREAMS) * REQUESTS, "{turns:?}");
}

/// The reader makes the copies on delivery, because the driver holds the connection's lock. So data
/// that nobody reads is not copied.
#[tokio::test]
async fn what_nobody_reads_is_not_copied_on_delivery() {
    const LEN: usize = 1 << 20;
    let s = setup(SimConfig::default(), 32 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let pair = connect_to(&fabrics, &s.pools, |options| options.copy_on_delivery = true).await;
    let Pair { client, server, server_counters, .. } = pair;
    let copied = || server_counters.snapshot().copied_fast.delivery as usize;
    let unread = tokio::spawn(client.call(request("/hang", full(pattern(LEN)))));
    landing::until("it has landed", || s.pools[0].stats().filled >= LEN).await;
    assert_eq!(copied(), 0);
    let response = client.call(request("/collect", full(pattern(LEN)))).await.unwrap();
    assert_eq!(collect(response).await.0, pattern(LEN));
    assert!((LEN..LEN + LEN / 1000).contains(&copied()), "{}", copied());
    unread.abort();
    drop(client);
    assert_eq!(server.await.unwrap().code(), ReasonCode::GoAway);
    s.finish().await;
}
