//! Resets, and the frames that cross them.

use bytes::Bytes;

use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::ids::{ResetCode, StreamId};

/// Two streams that send bulk both ways with little memory. The cancellation of the first stream
/// must not affect the second.
struct Scene {
    pair: Pair,
    victim: StreamId,
    other: StreamId,
    /// Streams to which the server has begun to respond.
    answered: Vec<StreamId>,
}

const UP: usize = 120_000;
const DOWN: usize = 90_000;

impl Scene {
    fn new(standing_grants: u8, tight: bool) -> Self {
        let config = Config { standing_grants, write_chunk: 16 << 10, ..small() };
        let mut pair = Pair::new(config.clone(), config, 96 << 10);
        pair.ends[SERVER].copy_out = true;
        if tight {
            // One SEND at a time, so that WRITEs get far ahead of their DONE.
            for end in &mut pair.ends {
                end.limit(1, 1, 16 << 10, 64 << 10);
            }
        }
        let (victim, other) = (pair.open("victim", false), pair.open("other", false));
        for id in [victim, other] {
            pair.client().send_data(id, pattern(id.get(), 30_000), true, false).unwrap();
            pair.client().send_data(id, pattern(id.get(), 500), false, false).unwrap();
            pair.client().send_data(id, pattern(id.get(), UP), false, true).unwrap();
        }
        Scene { pair, victim, other, answered: Vec::new() }
    }

    /// The server responds as soon as a stream is open, and ends its half after the client's.
    fn step(&mut self) {
        self.pair.step();
        for id in [self.victim, self.other] {
            let Some(app) = self.pair.ends[SERVER].streams.get(&id.get()) else { continue };
            let ended = app.ended;
            let server = self.pair.server();
            if !server.is_open_for_sending(id) {
                continue;
            }
            if !self.answered.contains(&id) {
                self.answered.push(id);
                server.send_headers(id, block("head"), false).unwrap();
                server.send_data(id, pattern(!id.get(), DOWN), false, false).unwrap();
            }
            if ended {
                server.send_headers(id, block("trailers"), true).unwrap();
            }
        }
    }

    fn is_over(&self) -> bool {
        self.answered.contains(&self.other)
            && self.pair.ends.iter().all(|end| end.conn.pending().streams == 0)
    }

    fn check(mut self, at: usize) {
        let mut left = 100_000;
        while !self.is_over() {
            self.step();
            left -= 1;
            assert!(left > 0, "cancelled at {at}: {:?}", self.pair);
        }
        self.pair.settle();
        let up: Vec<u8> = [30_000, 500, UP].iter().flat_map(|len| pattern(2, *len)).collect();
        assert!(self.pair.ends[SERVER].app(self.other).body == up, "cancelled at {at}");
        let down = self.pair.ends[CLIENT].app(self.other);
        assert!(down.body == pattern(!2, DOWN) && down.ended, "cancelled at {at}");
        assert!(down.reset.is_none() && self.pair.ends[SERVER].app(self.other).reset.is_none());
        self.pair.assert_clean();
    }
}

fn length_of_scene(standing: u8, tight: bool) -> usize {
    let mut scene = Scene::new(standing, tight);
    while !scene.is_over() {
        scene.step();
    }
    scene.pair.steps
}

#[test]
fn either_side_cancels_at_every_step() {
    for (standing, tight) in [(0, true), (2, false)] {
        let steps = length_of_scene(standing, tight);
        assert!(steps > 80, "{steps}");
        for at in 0..steps {
            for sides in [&[CLIENT][..], &[SERVER], &[CLIENT, SERVER]] {
                let mut scene = Scene::new(standing, tight);
                for _ in 0..at {
                    scene.step();
                }
                for side in sides {
                    let id = scene.victim;
                    if scene.pair.ends[*side].streams.contains_key(&id.get()) || *side == CLIENT {
                        scene.pair.ends[*side].conn.reset(id, ResetCode(0x100 + *side as u32));
                    }
                }
                scene.check(at);
            }
        }
    }
}

#[test]
fn the_other_side_learns_the_code() {
    for (side, code) in [(CLIENT, ResetCode::CANCEL), (SERVER, ResetCode::ENHANCE_YOUR_CALM)] {
        let mut p = Pair::small();
        let id = p.open("head", false);
        p.settle();
        p.ends[side].conn.reset(id, code);
        // A second reset has no effect.
        p.ends[side].conn.reset(id, ResetCode::INTERNAL);
        p.settle();
        assert_eq!(p.ends[1 - side].app(id).reset, Some(code));
        assert_eq!(p.ends[side].streams.get(&id.get()).and_then(|app| app.reset), None);
        assert_eq!((p.count(CLIENT, "RESET"), p.count(SERVER, "RESET")), (1, 1));
        assert_eq!(p.client().send_data(id, pattern(1, 1), false, false), Err(SendError::Closed));
        p.assert_clean();
    }
}

#[test]
fn reset_crosses_end() {
    for side in [CLIENT, SERVER] {
        let mut p = Pair::small();
        let id = p.open("head", false);
        p.settle();
        p.hold = [true, true];
        // One side ends its half, the other resets.
        p.ends[side].conn.send_data(id, pattern(1, 100), false, true).unwrap();
        p.ends[1 - side].conn.reset(id, ResetCode::CANCEL);
        p.settle();
        p.hold = [false, false];
        p.settle();
        if side == CLIENT {
            assert_eq!(p.ends[CLIENT].app(id).reset, Some(ResetCode::CANCEL));
        }
        p.assert_clean();
    }
}

#[test]
fn resets_cross() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.settle();
    p.client().reset(id, ResetCode::CANCEL);
    p.server().reset(id, ResetCode::INTERNAL);
    p.settle();
    // Both sides have reset the stream, so neither sees the other's RESET.
    for end in &p.ends {
        assert!(end.streams.get(&id.get()).is_none_or(|app| app.reset.is_none()));
    }
    p.assert_clean();
}

#[test]
fn grant_crosses_reset() {
    let config = Config { standing_grants: 0, ..small() };
    let mut p = Pair::new(config.clone(), config, 1 << 20);
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 100_000));
    p.hold[CLIENT] = true;
    p.settle();
    assert_eq!(p.count(SERVER, "GRANT"), 1);
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    assert!(p.ends[SERVER].memory.used > 0, "the grant is still out");
    p.hold[CLIENT] = false;
    p.settle();
    assert_eq!(p.count(CLIENT, "ABORT"), 1);
    assert_eq!((p.client().stats().writes, p.ends[SERVER].memory.used), (0, 0));
    p.assert_clean();
}

/// A stream that is reset before its first frame is transmitted returns the standing grants that
/// were bound to it.
#[test]
fn untransmitted_streams_return_their_grants_when_reset() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 50_000));
    p.settle();
    p.answer(id, Bytes::new());
    p.settle();
    assert_eq!(p.client().pending().peer_grants, 4);
    let ids: Vec<StreamId> = (0..4).map(|_| p.open("head", false)).collect();
    for id in ids {
        p.send(CLIENT, id, pattern(1, 50_000));
        assert!(!p.client().is_transmitted(id));
        p.client().reset(id, ResetCode::CANCEL);
        assert!(p.client().is_transmitted(id), "it is gone");
    }
    p.settle();
    assert_eq!((p.count(CLIENT, "ABORT"), p.count(CLIENT, "RESET")), (4, 0));
    assert!(!p.ends[SERVER].streams.contains_key(&2));
    p.assert_clean();
}

/// The stream is reset in the middle of its header block, before the server's application sees it.
#[test]
fn a_reset_discards_a_partial_header_block() {
    let mut p = Pair::small();
    p.settle();
    let id = p.client().open(pattern(1, 10_000), false).unwrap();
    p.drive(CLIENT);
    p.deliver(SERVER);
    assert!(p.client().is_transmitted(id));
    assert_eq!(p.server().pending().streams, 1);
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    assert!(p.ends[SERVER].streams.is_empty());
    p.assert_clean();
}

#[test]
fn reset_drops_queued_output() {
    let mut p = Pair::small();
    let id = p.open("head", false);
    p.settle();
    p.send(CLIENT, id, pattern(1, 500_000));
    p.client().reset(id, ResetCode::CANCEL);
    p.settle();
    assert_eq!(p.client().stats().writes + p.client().stats().eager_sent, 0);
    assert!(p.ends[SERVER].app(id).body.is_empty());
    p.assert_clean();
}
