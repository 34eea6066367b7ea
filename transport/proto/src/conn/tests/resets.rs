//! Streams that are opened and reset: as fast as a hostile client can, and as often as an honest
//! one does.

use std::time::Duration;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::{Composer, Frame};
use crate::ids::{ResetCode, StreamId};

fn server(max_streams: u32) -> Pair {
    let config = Config { max_streams, slot_size: 4096, recv_slots: 64, max_recvs: 64, ..small() };
    Pair::new(config.clone(), config, 1 << 20)
}

/// Delivers two messages of a client that respects its credits and the limit of streams: the first
/// opens `n` streams, and the second resets them. Returns the number of calls that the server would
/// begin, and the breach if the server closed the connection.
fn open_and_reset(p: &mut Pair, first: u32, n: u32) -> (u32, Option<Breach>) {
    let reset = |stream| Frame::Reset { stream, code: ResetCode::CANCEL.0 };
    let ids = first..first + n;
    let messages: [Vec<Frame>; 2] = [ids.clone().map(head).collect(), ids.map(reset).collect()];
    let mut begun = 0;
    for frames in messages {
        let mut slot = vec![0; 4096];
        let mut composer = Composer::new(&mut slot);
        assert!(frames.iter().all(|frame| composer.add(frame)));
        let len = composer.finish(64 - p.server().credits.available() as u16);
        slot.truncate(len);
        p.inject_raw(CLIENT, slot.into());
        while let Some(event) = p.server().poll_event() {
            begun += u32::from(matches!(event, Event::Opened { .. }));
        }
        p.ends[SERVER].slots = 4;
        p.drive_unchecked(SERVER);
        p.to[CLIENT].clear();
    }
    (begun, p.ends[SERVER].error.take())
}

#[test]
fn rapid_resets_are_a_breach() {
    for (max_streams, burst, per_second) in [(4, 1600, 1000), (1024, 16_384, 10_240)] {
        let mut p = server(max_streams);
        let n = max_streams.min(64);
        let (mut first, mut begun) = (1, 0);
        let breach = loop {
            let (more, breach) = open_and_reset(&mut p, first, n);
            (first, begun) = (first + n, begun + more);
            if let Some(breach) = breach {
                break breach;
            }
            assert!(
                begun <= burst,
                "{begun} calls begun for a client that reads none of their answers"
            );
        };
        assert_eq!(breach, Breach::RapidReset { burst: burst.into(), per_second });
        let text = breach.to_string();
        let names = ["enhance your calm", "Server::max_concurrent_streams"];
        assert!(names.iter().all(|name| text.contains(name)), "{text}");
        assert!(begun > burst - n && begun <= burst + n, "{begun}");
    }
}

#[test]
fn time_restores_the_reset_budget() {
    let mut p = server(64);
    // Open and reset all permitted streams at once, ten times a second for a minute.
    let mut first = 1;
    for _ in 0..600 {
        p.now += Duration::from_millis(100);
        let (begun, breach) = open_and_reset(&mut p, first, 64);
        assert_eq!((begun, breach), (64, None));
        first += 64;
    }
    // By waiting, an attacker gains the burst and no more.
    p.now += Duration::from_secs(3600);
    let mut begun = 0;
    let breach = loop {
        let (more, breach) = open_and_reset(&mut p, first, 64);
        (first, begun) = (first + 64, begun + more);
        if let Some(breach) = breach {
            break breach;
        }
        assert!(begun <= 1600, "{begun}");
    };
    assert!(matches!(breach, Breach::RapidReset { burst: 1600, per_second: 1000 }), "{breach}");
    // A steady rate above the rate at which the budget is restored takes longer to exhaust the
    // budget.
    let mut p = server(64);
    let (mut first, mut rounds) = (1, 0);
    while open_and_reset(&mut p, first, 64).1.is_none() {
        p.now += Duration::from_millis(32);
        (first, rounds) = (first + 64, rounds + 1);
        assert!(rounds <= 60, "two thousand a second");
    }
    assert!(rounds >= 40, "{rounds}");
}

#[test]
fn answers_restore_the_reset_budget() {
    let mut p = Pair::small();
    // No time passes. Of each call's five attempts, one is answered.
    for _ in 0..2000 {
        let attempts: Vec<StreamId> = (0..5).map(|_| p.open("head", true)).collect();
        p.settle();
        p.answer(attempts[0], pattern(1, 10));
        p.settle();
        for id in &attempts[1..] {
            p.client().reset(*id, ResetCode::CANCEL);
        }
        p.settle();
        assert_eq!(p.ends[SERVER].error, None);
    }
    // The server has ended its half, so the client's RESET does not count.
    for _ in 0..2000 {
        let id = p.open("head", false);
        p.settle();
        p.answer(id, pattern(1, 10));
        p.settle();
        p.client().reset(id, ResetCode::CANCEL);
        p.settle();
        assert_eq!(p.ends[SERVER].error, None);
    }
}
