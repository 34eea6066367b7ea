//! A peer that is silent: it pauses, or is gone (R24).

use std::time::Duration;

use super::super::heartbeat::{QUIET, REST};
use super::super::*;
use super::pair::*;
use crate::config::{Config, KeepAlive, Liveness};
use crate::ids::ResetCode;

const STEP: Duration = Duration::from_millis(50);
const HOUR: Duration = Duration::from_secs(3600);

/// Advances the clock by `time`, in steps of `step`.
fn wait(p: &mut Pair, time: Duration, step: Duration) {
    let until = p.now + time;
    while p.now < until {
        p.advance(step);
        p.settle();
    }
}

/// The time until `end` has an event. `None` if it takes longer than `most`.
fn until_event(p: &mut Pair, end: usize, most: Duration) -> Option<Duration> {
    let start = p.now;
    while p.ends[end].events.is_empty() {
        if p.now - start > most {
            return None;
        }
        p.advance(STEP);
        p.settle();
    }
    Some(p.now - start)
}

const TIMED: Liveness = Liveness::Asked(Duration::from_millis(3_750));

fn pair(liveness: Liveness, keep_alive: Option<KeepAlive>) -> Pair {
    let config = Config { liveness, keep_alive, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    p.settle();
    p
}

fn pings(p: &Pair) -> usize {
    p.count(CLIENT, "PING") + p.count(SERVER, "PING")
}

#[test]
fn silence_is_asked_about_without_a_message() {
    for liveness in [Liveness::Told, TIMED] {
        let mut p = pair(liveness, None);
        let id = p.open("head", false);
        p.settle();
        wait(&mut p, Duration::from_secs(300), QUIET / 5);
        assert!(p.ends.iter().all(|end| end.events.is_empty()));
        assert_eq!(pings(&p), 0);
        match liveness {
            Liveness::Told => assert_eq!(p.probed, 0),
            _ => assert!((240..=480).contains(&p.probed), "{}", p.probed),
        }
        p.client().reset(id, ResetCode::CANCEL);
        p.settle();
        p.assert_clean();
    }
}

/// One side's process stops for an hour, with calls open and a message on its way.
#[test]
fn a_pause_loses_nothing() {
    for liveness in [Liveness::Told, TIMED] {
        for end in [CLIENT, SERVER] {
            let mut p = pair(liveness, None);
            let (first, second) = (p.open("head", false), p.open("head", false));
            p.settle();
            p.client().send_data(first, pattern(1, 300), true, false).unwrap();
            // The process neither receives nor answers, but its device does.
            p.hold[end] = true;
            p.client().reset(second, ResetCode::CANCEL);
            wait(&mut p, HOUR, QUIET / 2);
            assert!(p.ends.iter().all(|end| end.events.is_empty() && end.error.is_none()));
            p.hold[end] = false;
            p.settle();
            p.answer(first, pattern(2, 300));
            p.settle();
            assert_eq!(p.ends[CLIENT].app(first).body, pattern(2, 300));
            p.assert_clean();
        }
    }
}

/// With nothing open, a side sends a probe once in two minutes, or never if the link itself reports
/// that the peer's end is gone.
#[test]
fn a_connection_at_rest_asks_rarely() {
    for liveness in [Liveness::Told, TIMED] {
        let mut p = pair(liveness, None);
        for round in 0..3 {
            let id = p.open("head", true);
            p.settle();
            p.answer(id, pattern(round, 10));
            p.settle();
            let (before, told) = (p.probed, liveness == Liveness::Told);
            wait(&mut p, HOUR + REST / 4, QUIET / 2);
            let probes = p.probed - before;
            assert!(if told { probes == 0 } else { (56..=62).contains(&probes) }, "{probes}");
            for end in &p.ends {
                assert!(end.conn.is_resting());
                assert_eq!(end.conn.next_timeout().is_none(), told, "no timer is set");
            }
        }
        assert_eq!(pings(&p), 0);
        p.assert_clean();
    }
}

/// The time until the loss is noticed does not depend on how long the connection was at rest.
#[test]
fn a_call_that_begins_at_rest_finds_in_time_that_the_path_is_gone() {
    for rest in [3, 100] {
        let mut p = pair(TIMED, None);
        wait(&mut p, Duration::from_secs(rest), STEP);
        assert!(p.client().is_resting());
        (p.gone, p.hold) = (true, [true, true]);
        p.open("head", false);
        assert!(p.client().is_roused());
        // The timer was due at once, and ran with the first step.
        let time = until_event(&mut p, CLIENT, Duration::from_secs(60));
        assert_eq!(time, Some(Duration::from_millis(5050)), "{rest}");
        assert_eq!(p.ends[CLIENT].events, [Event::Dead]);
    }
}

/// If the link does not itself report that the peer's end is gone, a path that is lost at rest is
/// noticed after the next probe.
#[test]
fn a_path_that_goes_at_rest_is_given_up() {
    let mut p = pair(TIMED, None);
    wait(&mut p, Duration::from_secs(5), STEP);
    (p.gone, p.hold) = (true, [true, true]);
    for end in [CLIENT, SERVER] {
        until_event(&mut p, end, REST + QUIET * 4).unwrap();
        assert_eq!(p.ends[end].events, [Event::Dead]);
    }
}

#[test]
fn a_path_that_is_gone_is_noticed() {
    let mut p = pair(TIMED, None);
    let id = p.open("head", false);
    p.settle();
    (p.gone, p.hold) = (true, [true, true]);
    let time = until_event(&mut p, CLIENT, Duration::from_secs(60));
    assert_eq!(p.ends[CLIENT].events, [Event::Dead]);
    assert_eq!(time, Some(Duration::from_secs(5)));
    assert_eq!(p.client().next_timeout(), None);
    assert_eq!(p.client().send_data(id, pattern(1, 1), false, false), Err(SendError::Closed));
    assert!(!p.drive(CLIENT));
}

/// A process that was stopped asks before it declares the path gone.
#[test]
fn a_stopped_process_asks_first() {
    let mut p = pair(TIMED, None);
    let id = p.open("head", false);
    p.settle();
    p.advance(HOUR);
    p.settle();
    assert!(p.ends.iter().all(|end| end.events.is_empty()));
    assert!(p.probed > 0);
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    p.assert_clean();
}

/// Only the program's keep-alive ends the calls of a paused peer.
#[test]
fn a_keep_alive_ends_a_pause() {
    let second = Duration::from_secs(1);
    for liveness in [Liveness::Told, TIMED] {
        let keep = KeepAlive { interval: second, timeout: second, while_idle: false };
        let mut p = pair(liveness, Some(keep));
        wait(&mut p, second * 10, STEP);
        assert!(p.client().is_resting());
        assert_eq!(pings(&p), 0, "no stream is open");
        p.open("head", false);
        p.settle();
        wait(&mut p, second * 10, STEP);
        assert!(pings(&p) >= 10);
        assert!(p.ends.iter().all(|end| end.events.is_empty()), "it answers");
        p.hold[SERVER] = true;
        let time = until_event(&mut p, CLIENT, second * 60).unwrap();
        assert!((second..=second * 2 + STEP).contains(&time), "{time:?}");
        assert_eq!(p.ends[CLIENT].events, [Event::KeepAliveTimedOut]);
    }
}

#[test]
fn a_keep_alive_while_idle_watches_a_connection_at_rest() {
    let second = Duration::from_secs(1);
    let keep = KeepAlive { interval: second * 10, timeout: second * 2, while_idle: true };
    let mut p = pair(Liveness::Told, Some(keep));
    wait(&mut p, second * 100, STEP);
    assert!((9..=40).contains(&pings(&p)), "{}", pings(&p));
    assert!(p.client().is_resting());
    p.hold = [true, true];
    let time = until_event(&mut p, CLIENT, second * 60).unwrap();
    assert!(time <= second * 12 + STEP, "{time:?}");
    assert_eq!(p.ends[CLIENT].events, [Event::KeepAliveTimedOut]);
}
