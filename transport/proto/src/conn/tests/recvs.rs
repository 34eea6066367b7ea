//! RECVs that are added under load and removed when idle.

use std::time::Duration;

use super::super::heartbeat::QUIET;
use super::super::timers::RETIRE_INTERVAL;
use super::pair::*;
use crate::config::Config;

/// A burst adds credits. An idle connection removes the extra RECVs within five seconds by PINGs,
/// and sends nothing else.
#[test]
fn an_idle_connection_returns_to_its_initial_recvs() {
    let config = Config { recv_slots: 4, max_recvs: 24, ..small() };
    let mut p = Pair::new(config.clone(), config.clone(), 1 << 20);
    let posted = |p: &Pair| p.ends.each_ref().map(|end| end.conn.credits.posted());
    for round in 0..3 {
        let ids: Vec<_> = (0..20).map(|_| p.open("head", false)).collect();
        for id in &ids {
            p.client().send_data(*id, pattern(round, 900), true, false).unwrap();
        }
        p.settle();
        assert_eq!(posted(&p)[SERVER], 24, "{round}: the client ran short");
        for id in ids {
            p.answer(id, pattern(round, 900));
        }
        p.settle();
        assert!(p.ends.iter().all(|end| !end.leaving));

        p.advance(QUIET);
        p.settle();
        p.advance(QUIET);
        p.settle();
        assert!(p.ends.iter().all(|end| end.leaving || !end.conn.has_extra_recvs()), "at rest");
        for _ in 0..32 {
            p.advance(RETIRE_INTERVAL + Duration::from_millis(1));
            p.settle();
        }
        assert_eq!(posted(&p), [4, 4]);
        let pings = p.count(CLIENT, "PING") + p.count(SERVER, "PING");
        p.advance(RETIRE_INTERVAL * 2);
        p.settle();
        assert_eq!(
            p.count(CLIENT, "PING") + p.count(SERVER, "PING"),
            pings,
            "no extra RECV is left"
        );
    }
    p.assert_clean();
}

/// A peer that does not answer gets a single PING.
#[test]
fn a_silent_peer_is_not_flooded_with_pings() {
    let config = Config { recv_slots: 4, max_recvs: 24, ..small() };
    let mut p = Pair::new(config.clone(), config.clone(), 1 << 20);
    let id = p.open("head", false);
    for round in 0..20 {
        p.client().send_data(id, pattern(round, 900), round == 19, false).unwrap();
    }
    p.settle();
    p.answer(id, pattern(0, 10));
    p.settle();
    assert!(p.server().has_extra_recvs());
    p.hold = [true, true];
    let before = p.count(SERVER, "PING");
    for _ in 0..20 {
        p.advance(RETIRE_INTERVAL);
        p.settle();
    }
    assert_eq!(p.count(SERVER, "PING") - before, 1);
}

/// RECVs that were refused under load are not posted once the peer has nothing to send.
#[test]
fn recvs_refused_under_load_are_not_posted_when_idle() {
    let config = Config { recv_slots: 4, max_recvs: 24, ..small() };
    let mut p = Pair::new(config.clone(), config.clone(), 1 << 20);
    p.ends[SERVER].refuses = true;
    let id = p.open("head", false);
    for round in 0..100 {
        p.client().send_data(id, pattern(round, 900), round == 99, false).unwrap();
        p.settle();
    }
    for round in 0..20 {
        let id = p.open("head", false);
        p.client().send_data(id, pattern(round, 900), true, false).unwrap();
    }
    p.settle();
    assert!(p.client().stats().credit_waits > 0);
    p.ends[SERVER].refuses = false;
    for _ in 0..200 {
        p.advance(QUIET);
        p.settle();
    }
    assert_eq!(p.server().credits.posted(), 4);
}

/// A message that only returns credits takes a credit itself. With the minimum of credits it must
/// not trigger another such message with every call.
#[test]
fn with_minimum_credits_a_call_is_one_message_each_way() {
    let config = Config { recv_slots: 4, max_recvs: 4, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    let messages = |p: &Pair| p.ends.iter().map(|end| end.conn.stats().messages_sent).sum::<u64>();
    let id = p.open("head", false);
    for round in 0..5 {
        p.client().send_data(id, pattern(round, 900), round == 4, false).unwrap();
        p.settle();
    }
    p.answer(id, pattern(0, 10));
    p.settle();
    let before = messages(&p);
    for round in 0..50 {
        let id = p.open("head", true);
        p.settle();
        p.answer(id, pattern(round, 10));
        p.settle();
    }
    assert_eq!(messages(&p) - before, 100);
    p.assert_clean();
}

/// A connection at rest has only short RECVs. Output that does not fit is split, and asks for
/// longer RECVs. The longer RECVs replace the short RECVs until the connection is at rest again.
#[test]
fn short_recvs_make_way_for_long_ones_under_load_and_come_back_at_rest() {
    let config = Config { slot_size: 4096, rest_slot_size: 1024, max_recvs: 20, ..small() };
    let config = Config { recv_slots: 6, ..config };
    let mut p = Pair::new(config.clone(), config.clone(), 1 << 20);
    for round in 0..3 {
        // A small call takes one message each way, and no more RECVs.
        let id = p.open("head", true);
        p.settle();
        p.answer(id, pattern(round, 100));
        p.settle();
        assert!(p.ends.iter().all(|end| !end.conn.has_extra_recvs()), "{round}");
        // A message as long as a full slot is sent immediately, in pieces, without waiting for an
        // answer in between.
        let id = p.open("head", false);
        p.client().send_data(id, pattern(round, 4000), true, true).unwrap();
        p.drive(CLIENT);
        assert_eq!((p.to[SERVER].len(), p.client().output.has_output()), (4, false), "{round}");
        p.settle();
        p.answer(id, pattern(round, 4000));
        p.settle();
        assert_eq!(p.ends[SERVER].app(id).body, pattern(round, 4000));
        assert_eq!(p.ends[CLIENT].app(id).body, pattern(round, 4000));
        assert!(p.ends.iter().all(|end| end.conn.has_extra_recvs()), "{round}");
        // With the longer RECVs, a message is one SEND.
        for _ in 0..8 {
            let id = p.open("head", true);
            p.settle();
            p.answer(id, pattern(round, 10));
            p.settle();
        }
        let before = p.client().stats().messages_sent;
        let id = p.open("head", false);
        p.client().send_data(id, pattern(round, 4000), true, true).unwrap();
        p.settle();
        assert_eq!(p.client().stats().messages_sent, before + 1, "{round}");
        p.answer(id, pattern(round, 10));
        p.settle();
        for _ in 0..80 {
            p.advance(RETIRE_INTERVAL + Duration::from_millis(1));
            p.settle();
        }
        for end in &p.ends {
            assert!(end.conn.is_resting() && !end.conn.has_extra_recvs(), "{round}");
            assert_eq!(end.conn.credits.posted(), 6, "{round}");
        }
    }
    p.assert_clean();
}

/// Without memory for longer RECVs, all messages land in the short ones.
#[test]
fn without_memory_for_long_recvs_messages_are_cut() {
    let config = Config { slot_size: 4096, rest_slot_size: 1024, max_recvs: 20, ..small() };
    let config = Config { recv_slots: 6, ..config };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    for end in &mut p.ends {
        end.refuses = true;
    }
    let ids: Vec<_> = (0..20).map(|_| p.open("head", false)).collect();
    for (at, id) in ids.iter().enumerate() {
        p.client().send_data(*id, pattern(at as u32, 4000), true, true).unwrap();
    }
    p.settle();
    for (at, id) in ids.iter().enumerate() {
        assert_eq!(p.ends[SERVER].app(*id).body, pattern(at as u32, 4000));
        p.answer(*id, pattern(at as u32, 3000));
    }
    p.settle();
    for (at, id) in ids.iter().enumerate() {
        assert_eq!(p.ends[CLIENT].app(*id).body, pattern(at as u32, 3000));
    }
    assert!(p.ends.iter().all(|end| !end.conn.has_extra_recvs()));
    p.assert_clean();
}
