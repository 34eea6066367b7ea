//! GOAWAY, drain, CLOSE, heartbeat.

use std::time::Duration;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::CloseCode;
use crate::ids::{ResetCode, StreamId};

#[test]
fn drain_finishes_known_streams_and_refuses_others() {
    let mut p = Pair::small();
    let old = p.open("old", false);
    p.send(CLIENT, old, pattern(1, 50_000));
    p.settle();
    assert_eq!(p.client().pending().peer_grants, 4);
    p.server().go_away(CloseCode::Ok, "restarting");
    p.server().go_away(CloseCode::Internal, "only the first counts");
    // This stream crosses GOAWAY, and is served.
    let crossing = p.open("crossing", true);
    p.drive(SERVER);
    p.drive(CLIENT);
    // These streams have not been transmitted when GOAWAY arrives.
    let unheard: Vec<StreamId> = (0..3).map(|_| p.open("unheard", false)).collect();
    p.send(CLIENT, unheard[0], pattern(1, 50_000));
    p.send(CLIENT, unheard[1], pattern(1, 10));
    p.deliver(CLIENT);
    p.settle();
    let goaway = Event::GoAway { code: CloseCode::Ok, text: "restarting".into() };
    assert_eq!(p.ends[CLIENT].events, [goaway]);
    assert_eq!(p.ends[CLIENT].refused, unheard);
    assert!(p.ends[CLIENT].conn.pending().streams == 2 && !p.client().takes_streams());
    assert_eq!(p.client().open(block("late"), true), Err(SendError::GoingAway));
    assert!(!p.server().is_drained());
    assert_eq!(p.count(SERVER, "GOAWAY"), 1);
    p.answer(crossing, pattern(2, 40_000));
    p.settle();
    assert!(!p.server().is_drained());
    p.answer(old, pattern(3, 40_000));
    p.settle();
    assert!(p.server().is_drained());
    assert_eq!(p.ends[CLIENT].app(crossing).body, pattern(2, 40_000));
    assert_eq!(p.ends[CLIENT].app(old).body, pattern(3, 40_000));
    assert!(p.ends[SERVER].streams.keys().all(|id| *id <= crossing.get()));
    p.assert_clean();
}

/// Only the acknowledgement tells the server that no new stream is in flight.
#[test]
fn a_server_is_not_drained_before_the_acknowledgement() {
    let mut p = Pair::small();
    p.settle();
    p.hold = [true, true];
    p.server().go_away(CloseCode::Ok, "");
    let id = p.open("crossing", true);
    p.settle();
    assert!(!p.server().is_drained());
    p.hold = [false, false];
    p.deliver(SERVER);
    p.drive(SERVER);
    assert!(p.ends[SERVER].streams.contains_key(&id.get()));
    p.settle();
    p.answer(id, pattern(1, 10));
    p.settle();
    assert!(p.server().is_drained());
    p.assert_clean();
}

#[test]
fn a_client_drains() {
    let mut p = Pair::small();
    let id = p.open("head", true);
    p.client().go_away(CloseCode::Ok, "");
    assert!(!p.client().takes_streams());
    p.settle();
    assert!(!p.client().is_drained());
    // The server may drain as well.
    p.server().go_away(CloseCode::Ok, "");
    p.settle();
    p.answer(id, pattern(1, 10));
    p.settle();
    assert!(p.client().is_drained() && p.server().is_drained());
    p.assert_clean();
}

#[test]
fn nothing_is_sent_after_close() {
    for side in [CLIENT, SERVER] {
        let mut p = Pair::small();
        let id = p.open("head", false);
        p.send(CLIENT, id, pattern(1, 300_000));
        p.until("some of it", |p| p.ends[CLIENT].conn.stats().writes > 0);
        let before = p.ends[side].conn.stats();
        let conn = &mut p.ends[side].conn;
        conn.close(CloseCode::Resources, "no memory");
        conn.close(CloseCode::Ok, "only the first counts");
        // These calls no longer have an effect.
        conn.reset(id, ResetCode::CANCEL);
        conn.consume(id, 1 << 20, Flow::Window);
        conn.recall_standing();
        conn.go_away(CloseCode::Ok, "");
        conn.handle_timeout(p.now + Duration::from_secs(1000)).unwrap();
        assert_eq!(conn.send_data(id, pattern(2, 10), false, true), Err(SendError::Closed));
        assert_eq!(conn.open(block("late"), true), Err(SendError::GoingAway));
        assert_eq!((conn.poll_landing(|_| true), conn.next_timeout()), (None, None));
        assert!(!conn.has_room(id) && !conn.is_open_for_sending(id) && !conn.takes_streams());
        p.settle();
        let after = p.ends[side].conn.stats();
        assert_eq!(after.messages_sent, before.messages_sent + 1);
        assert_eq!(after.writes, before.writes);
        assert_eq!((p.count(side, "CLOSE"), p.count(1 - side, "CLOSE")), (1, 0));
        let closed = Event::Closed { code: CloseCode::Resources, text: "no memory".into() };
        assert_eq!(p.ends[1 - side].events, [closed]);
        assert!(p.ends[1 - side].error.is_none());
    }
}

/// CLOSE takes the last credit, or waits until there is one.
#[test]
fn close_takes_the_last_credit_or_waits_for_one() {
    for left in [1, 0] {
        let config = Config { recv_slots: 4, max_recvs: 4, ..small() };
        let mut p = Pair::new(config.clone(), config, 1 << 20);
        p.ends[CLIENT].limit(16, 4, 65_536, 1 << 20);
        let id = p.open("head", false);
        p.settle();
        p.hold[SERVER] = true;
        for n in 0..8 {
            p.client().send_data(id, pattern(n, 900), false, false).unwrap();
        }
        p.settle();
        assert_eq!(p.client().credits.available(), 1);
        if left == 0 {
            // A message that returns a credit may take the last credit. The server's first message
            // returns a credit itself.
            for end in [false, true] {
                p.server().send_headers(id, block("head"), end).unwrap();
                p.settle();
            }
        }
        assert_eq!(p.client().credits.available(), left);
        p.client().close(CloseCode::Internal, "why");
        p.drive(CLIENT);
        assert_eq!(p.count(CLIENT, "CLOSE"), left as usize);
        p.hold[SERVER] = false;
        p.settle();
        assert_eq!(p.count(CLIENT, "CLOSE"), 1);
        let closed = Event::Closed { code: CloseCode::Internal, text: "why".into() };
        assert_eq!(p.ends[SERVER].events, [closed]);
    }
}

#[test]
fn a_server_sends_nothing_before_the_client() {
    let mut p = Pair::small();
    p.server().close(CloseCode::Resources, "no memory");
    assert!(!p.drive(SERVER));
}

#[test]
fn long_texts_are_truncated() {
    let mut p =
        Pair::new(Config { slot_size: 512, ..small() }, Config { slot_size: 512, ..small() }, 0);
    p.settle();
    p.server().go_away(CloseCode::Other(77), &"ä".repeat(1000));
    p.settle();
    p.server().close(CloseCode::Ok, &"x".repeat(1000));
    p.settle();
    let text = |n: &str, len| n.repeat(len);
    assert_eq!(
        p.ends[CLIENT].events,
        [
            Event::GoAway { code: CloseCode::Other(77), text: text("ä", 120) },
            Event::Closed { code: CloseCode::Ok, text: text("x", 240) }
        ]
    );
}
