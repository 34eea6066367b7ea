//! A live peer that keeps grants whose memory others want.

use super::super::answer_clock::TICK;
use super::super::answer_clock::{AnswerClock, MAX_TICKS};
use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::Frame;
use crate::ids::{GrantId, ResetCode, StreamId};

fn config() -> Config {
    Config { recv_slots: 256, max_recvs: 256, standing_grants: 0, ..small() }
}

fn pair() -> Pair {
    let mut p = Pair::new(config(), config(), 16 << 20);
    p.settle();
    p
}

/// Transmits the victim's output, which the peer ignores except for answering with a PING.
fn ignored(p: &mut Pair, victim: usize) {
    p.ends[victim].slots = 64;
    p.drive_unchecked(victim);
    p.to[1 - victim].clear();
    if p.ends[victim].error.is_none() {
        p.inject(1 - victim, &[Frame::Ping { ack: false, token: 0 }]);
    }
}

/// Runs until the victim closes the connection, for at most 20 ticks. Returns the number of ticks
/// and the breach.
fn judged(p: &mut Pair, victim: usize) -> (u32, Option<Breach>) {
    for ticks in 0..20 {
        ignored(p, victim);
        if let Some(breach) = p.ends[victim].error.clone() {
            return (ticks, Some(breach));
        }
        p.advance(TICK);
    }
    (20, None)
}

/// Lets a hostile client open this many streams, each of which requests 4 MiB and never writes
/// them.
fn hoards(p: &mut Pair, streams: u32) {
    for stream in 1..=streams {
        p.inject(
            CLIENT,
            &[head(stream), Frame::Request { stream, len: 4 << 20, begin: 0, field: None }],
        );
    }
    p.drive_unchecked(SERVER);
    p.to[CLIENT].clear();
    assert_eq!((p.server().pending().grants, p.ends[SERVER].memory.used), (4, 16 << 20));
}

fn assert_judged(p: &mut Pair, victim: usize, expected: &Breach) {
    let (ticks, breach) = judged(p, victim);
    assert_eq!(breach.as_ref(), Some(expected));
    assert!((6..=8).contains(&ticks), "{expected}: after {ticks} ticks");
    assert_eq!(p.ends[victim].conn.next_timeout(), None);
    assert!(p.ends[victim].conn.poll_landing(|_| true).is_none(), "it is over");
}

/// Recalls the memory of all streams, because others want it.
fn wanted(p: &mut Pair) {
    p.server().recall_grants(|_| true);
}

/// The deadlines of all calls have passed, or the calls were answered, but the client does not
/// return the memory. It may keep the memory as long as nobody wants it. The clock runs as soon as
/// somebody does.
#[test]
fn grants_of_reset_streams_that_others_want_close_the_connection() {
    for answered in [false, true] {
        let mut p = pair();
        hoards(&mut p, 4);
        for id in (1..=4).map(StreamId) {
            match answered {
                false => p.server().reset(id, ResetCode::CANCEL),
                true => p.server().send_headers(id, block("unimplemented"), true).unwrap(),
            }
        }
        assert_eq!(judged(&mut p, SERVER), (20, None), "nobody wants it");
        wanted(&mut p);
        assert_judged(&mut p, SERVER, &Breach::GrantKept(GrantId(0)));
    }
}

/// A stream whose RESET is not answered still counts as open, but the connection does not end,
/// because the peer may pause.
#[test]
fn an_unanswered_reset_ends_nothing() {
    let mut p = pair();
    let id = p.open("head", false);
    p.settle();
    p.client().reset(id, ResetCode::CANCEL);
    assert_eq!(judged(&mut p, CLIENT), (20, None));
    assert_eq!(p.client().pending().streams, 1);
    p.client().recall_grants(|_| true);
    assert_eq!(judged(&mut p, CLIENT), (20, None), "it has no memory");
}

/// The streams end properly, but their grants are not returned.
#[test]
fn grants_kept_after_their_stream_close_the_connection() {
    for reset_by_peer in [false, true] {
        let mut p = pair();
        hoards(&mut p, 4);
        let frames: Vec<Frame> = (1..=4).map(|stream| Frame::Reset { stream, code: 8 }).collect();
        if !reset_by_peer {
            for id in (1..=4).map(StreamId) {
                p.server().reset(id, ResetCode::CANCEL);
            }
            p.drive_unchecked(SERVER);
        }
        p.inject(CLIENT, &frames);
        if reset_by_peer {
            // The client resets first, and the server answers.
            p.drive_unchecked(SERVER);
        }
        assert_eq!(p.server().pending(), Pending { streams: 0, grants: 4, peer_grants: 0 });
        assert_eq!(judged(&mut p, SERVER), (20, None), "nobody wants them");
        wanted(&mut p);
        assert_judged(&mut p, SERVER, &Breach::GrantKept(GrantId(0)));
    }
}

#[test]
fn an_unanswered_recall_closes_the_connection() {
    let mut p = pair();
    hoards(&mut p, 4);
    let memory: Vec<usize> =
        p.server().landing.grants.iter().map(|(_, grant)| grant.memory).collect();
    p.server().recall_grants(|key| key == memory[2]);
    p.drive_unchecked(SERVER);
    assert_eq!(p.count(SERVER, "RECALL"), 1);
    assert_judged(&mut p, SERVER, &Breach::GrantKept(GrantId(2)));
}

/// Idle standing grants are recalled while the peer pauses. Nobody else needs their memory, so the
/// connection stays.
#[test]
fn an_unanswered_recall_of_idle_grants_ends_nothing() {
    let config = Config { standing_grants: 4, ..config() };
    let mut p = Pair::new(config.clone(), config, 16 << 20);
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 100_000));
    p.settle();
    assert_eq!(p.server().pending().grants, 4);
    p.server().recall_standing();
    assert_eq!(judged(&mut p, SERVER), (20, None));
    wanted(&mut p);
    let (_, breach) = judged(&mut p, SERVER);
    assert!(matches!(breach, Some(Breach::GrantKept(_))), "{breach:?}");
}

/// Other connections get memory elsewhere in the end, so the peer may keep its grants.
#[test]
fn memory_that_is_not_wanted_any_more_may_be_kept() {
    let mut p = pair();
    hoards(&mut p, 4);
    wanted(&mut p);
    for _ in 0..4 {
        ignored(&mut p, SERVER);
        p.advance(TICK);
    }
    p.server().memory_is_unwanted();
    assert_eq!(judged(&mut p, SERVER), (20, None));
    wanted(&mut p);
    assert!(judged(&mut p, SERVER).1.is_some());
}

/// The peer may keep a grant that is not recalled, because the call has no deadline and nobody else
/// needs the memory.
#[test]
fn grants_that_are_not_recalled_may_be_kept() {
    let mut p = pair();
    hoards(&mut p, 4);
    assert_eq!(judged(&mut p, SERVER), (20, None));
    assert_eq!(p.server().landing.clock, AnswerClock::Idle);
}

/// The peer cannot answer a frame that has not been transmitted.
#[test]
fn the_timeout_starts_when_the_frame_is_transmitted() {
    let mut p = pair();
    hoards(&mut p, 4);
    p.server().reset(StreamId(1), ResetCode::CANCEL);
    wanted(&mut p);
    for _ in 0..40 {
        // No SEND slot is free. The peer is alive.
        p.ends[SERVER].slots = 0;
        p.drive_unchecked(SERVER);
        p.inject(CLIENT, &[Frame::Ping { ack: false, token: 0 }]);
        p.advance(TICK);
        assert_eq!(p.ends[SERVER].error, None);
    }
    assert_eq!(p.count(SERVER, "RESET"), 0);
    assert_judged(&mut p, SERVER, &Breach::GrantKept(GrantId(0)));
    assert_eq!(p.count(SERVER, "RESET"), 1);
}

/// A late timer means that this process was stopped. However late the timer is, it counts as one
/// tick.
#[test]
fn time_while_this_process_was_stopped_does_not_count() {
    let mut p = pair();
    hoards(&mut p, 4);
    p.server().reset(StreamId(1), ResetCode::CANCEL);
    let memory: Vec<usize> =
        p.server().landing.grants.iter().map(|(_, grant)| grant.memory).collect();
    p.server().recall_grants(|key| key == memory[0]);
    for _ in 1..MAX_TICKS {
        ignored(&mut p, SERVER);
        p.advance(TICK * 80);
        assert_eq!(p.ends[SERVER].error, None);
    }
    p.inject(CLIENT, &[Frame::Abort { id: 0 }, Frame::Reset { stream: 1, code: 8 }]);
    assert_eq!(judged(&mut p, SERVER), (20, None), "it was answered");
}

/// 64 streams with bulk in both directions are reset over a link whose round trip takes six ticks.
/// The peer answers each RESET immediately, but its answers follow the data already in flight.
#[test]
fn an_honest_peer_on_a_slow_link_keeps_its_connection() {
    for side in [CLIENT, SERVER] {
        let config = Config { recv_slots: 32, max_recvs: 32, slot_size: 4096, ..small() };
        let mut p = Pair::new(config.clone(), config, 32 << 20);
        let ids: Vec<StreamId> = (0..64).map(|_| p.open("head", false)).collect();
        for &id in &ids {
            p.client().send_data(id, pattern(1, 600_000), true, false).unwrap();
        }
        p.until("streams", |p| p.ends[SERVER].streams.len() == 64);
        for &id in &ids {
            p.server().send_headers(id, block("head"), false).unwrap();
            p.server().send_data(id, pattern(2, 600_000), true, false).unwrap();
        }
        for _ in 0..200 {
            p.step();
        }
        for &id in &ids {
            p.ends[side].conn.reset(id, ResetCode::CANCEL);
        }
        p.ends[side].conn.recall_grants(|_| true);
        let mut ticks = 0;
        // Posted work arrives three ticks later.
        while p.ends.iter().any(|end| end.conn.pending() != Pending::default()) {
            p.drive(CLIENT);
            p.drive(SERVER);
            let waiting = [p.to[CLIENT].len(), p.to[SERVER].len()];
            p.advance(TICK * 3);
            for end in [CLIENT, SERVER] {
                for _ in 0..waiting[end] {
                    p.deliver(end);
                }
            }
            assert!(p.ends.iter().all(|end| end.error.is_none()), "{p:?}");
            ticks += u32::from(p.ends[side].conn.landing.clock != AnswerClock::Idle);
            if waiting == [0, 0] {
                p.ends.iter_mut().for_each(|end| end.conn.recall_standing());
            }
        }
        assert!(ticks > 0, "the clock never ran");
        p.assert_clean();
    }
}

/// Goes through the transition table of the module `answer_clock`.
#[test]
fn the_answer_clock_runs_while_memory_is_wanted_and_owed() {
    let mut p = pair();
    hoards(&mut p, 4);
    let clock = |p: &Pair| p.ends[SERVER].conn.landing.clock;
    let handled = |p: &mut Pair| {
        let now = p.now;
        p.server().handle_timeout(now).unwrap();
        now + TICK
    };
    handled(&mut p);
    assert_eq!(clock(&p), AnswerClock::Idle);
    // Others want memory, but none of this connection's.
    p.server().recall_grants(|_| false);
    assert_eq!(clock(&p), AnswerClock::Pending);
    handled(&mut p);
    assert_eq!(clock(&p), AnswerClock::Idle, "no grant is owed");
    wanted(&mut p);
    assert_eq!(clock(&p), AnswerClock::Pending);
    p.server().memory_is_unwanted();
    assert_eq!(clock(&p), AnswerClock::Idle);
    wanted(&mut p);
    let server = &p.ends[SERVER].conn;
    assert!(
        server.next_timeout().unwrap()
            <= server.landing.clock.deadline(server.timers.heartbeat.last_received()).unwrap()
    );
    let next = handled(&mut p);
    assert_eq!(clock(&p), AnswerClock::Ticking { next });
    wanted(&mut p);
    handled(&mut p);
    assert_eq!(clock(&p), AnswerClock::Ticking { next }, "a tick that is not due");
    ignored(&mut p, SERVER);
    p.advance(TICK);
    let next = p.now + TICK;
    assert_eq!(clock(&p), AnswerClock::Ticking { next });
    let aborts: Vec<Frame> = (0..4).map(|id| Frame::Abort { id }).collect();
    p.inject(CLIENT, &aborts);
    assert_eq!(clock(&p), AnswerClock::Ticking { next }, "an answer is seen by the next tick");
    p.advance(TICK);
    assert_eq!(clock(&p), AnswerClock::Idle);
}

/// A server that has ended its response would discard the request, so it grants no memory for the
/// request.
#[test]
fn an_answered_call_is_granted_no_memory() {
    let mut p = pair();
    p.inject(CLIENT, &[head(1)]);
    p.ends[SERVER].take_events();
    // The end of the response is queued and cannot be transmitted.
    p.server().send_headers(StreamId(1), block("unimplemented"), true).unwrap();
    p.ends[SERVER].slots = 0;
    p.inject(CLIENT, &[Frame::Request { stream: 1, len: 4 << 20, begin: 0, field: None }]);
    p.drive_unchecked(SERVER);
    assert_eq!((p.server().pending().grants, p.ends[SERVER].memory.used), (0, 0));
    assert_eq!(p.server().poll_landing(|_| true), None);
}
