//! The calls of a plan.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tonic::Code;

use crate::plan::ms;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Unary,
    /// One request, many responses.
    Down,
    /// Many requests, one response.
    Up,
    Both,
    /// Bodies as the transport gives them, without tonic's codec: what is held is the transport's
    /// own memory.
    Raw,
}

/// What a handler does with requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// All of them, then it answers.
    First,
    /// One for each answer, the rest at the end.
    Between,
    /// None.
    Never,
    /// None, and it sends them back as they are (raw calls only).
    Echo,
}

#[derive(Debug, Clone)]
pub(crate) struct CallPlan {
    pub(crate) id: usize,
    pub(crate) channel: usize,
    pub(crate) at: Duration,
    pub(crate) kind: Kind,
    /// Bytes of each message.
    pub(crate) requests: Vec<usize>,
    pub(crate) responses: Vec<usize>,
    /// From pool memory, where there is some.
    pub(crate) pinned: bool,
    /// With the zero-copy codec at the client, and at the server.
    pub(crate) client_zero: bool,
    pub(crate) server_zero: bool,
    pub(crate) request_gap: Duration,
    pub(crate) response_gap: Duration,
    /// The handler waits for so long before it does anything.
    pub(crate) think: Duration,
    pub(crate) reading: Reading,
    /// The reader of responses waits for so long after each, and the handler after each request.
    pub(crate) slow: Duration,
    /// What was read is kept for so long.
    pub(crate) hold: Duration,
    pub(crate) code: Code,
    pub(crate) deadline: Option<Duration>,
    /// The caller drops the call after so long.
    pub(crate) give_up: Option<Duration>,
    /// The caller drops the call after so many responses.
    pub(crate) enough: Option<usize>,
}

/// Around every threshold: nothing, what fits beside a head, a slot, a granule, a grant, a staging
/// block, a window.
const EDGES: [usize; 16] = [
    0,
    1,
    100,
    1_900,
    2_048,
    3_900,
    4_096,
    8_192,
    16_384,
    32_768,
    65_536,
    131_072,
    262_144,
    1 << 20,
    (1 << 20) + (64 << 10),
    2 << 20,
];

fn size(rng: &mut StdRng, large: bool) -> usize {
    match rng.random_range(0..10) {
        0..=4 => rng.random_range(0..600),
        5 => rng.random_range(0..20_000),
        6 => rng.random_range(0..300_000),
        _ => {
            let most = if large && rng.random_bool(0.3) { EDGES.len() } else { EDGES.len() - 4 };
            let edge = EDGES[rng.random_range(0..most)];
            (edge + rng.random_range(0..16)).saturating_sub(rng.random_range(0..24))
        }
    }
}

fn sometimes(rng: &mut StdRng, chance: f64, most: u64) -> Duration {
    if rng.random_bool(chance) { ms(rng.random_range(0..=most)) } else { Duration::ZERO }
}

pub(crate) fn draw(
    rng: &mut StdRng,
    channels: usize,
    span: Duration,
    pressure: bool,
) -> Vec<CallPlan> {
    let count = *[1, 5, 15, 30, 60].choose(rng).unwrap_or(&5);
    // All at once, or spread.
    let burst = rng.random_bool(0.3);
    (0..count)
        .map(|id| {
            let at = if burst { 0 } else { rng.random_range(0..=span.as_millis() as u64) };
            call(rng, id, rng.clone().random_range(0..channels), ms(at), pressure)
        })
        .collect()
}

/// Bytes that fit HTTP/2's windows, with what surrounds them: a mebibyte to the server, two to the
/// client.
const UP: usize = 1000 << 10;
const DOWN: usize = 2000 << 10;

fn call(rng: &mut StdRng, id: usize, channel: usize, at: Duration, pressure: bool) -> CallPlan {
    let kinds = [
        Kind::Unary,
        Kind::Unary,
        Kind::Unary,
        Kind::Down,
        Kind::Up,
        Kind::Both,
        Kind::Raw,
        Kind::Raw,
    ];
    let kind = *kinds.choose(rng).unwrap_or(&Kind::Unary);
    let many = |rng: &mut StdRng| *[0, 1, 2, 3, 5, 20].choose(rng).unwrap_or(&1);
    let sizes = |rng: &mut StdRng, n: usize| (0..n).map(|_| size(rng, n <= 3)).collect::<Vec<_>>();
    let (up, down) = match kind {
        Kind::Unary => (1, 1),
        Kind::Down => (1, many(rng)),
        Kind::Up => (many(rng), 1),
        Kind::Both | Kind::Raw => (many(rng), many(rng)),
    };
    let reading = match kind {
        Kind::Unary | Kind::Down => Reading::First,
        Kind::Up | Kind::Both => {
            [Reading::First, Reading::Between, Reading::Never][rng.random_range(0..3)]
        }
        Kind::Raw => [Reading::First, Reading::Between, Reading::Never, Reading::Echo]
            [rng.random_range(0..4)],
    };
    let requests = sizes(rng, up);
    let responses = if reading == Reading::Echo { requests.clone() } else { sizes(rng, down) };
    let codes = [Code::Ok, Code::Ok, Code::Ok, Code::Ok, Code::Aborted, Code::NotFound];
    // Over TCP a call that is full both ways cannot be given up: hyper resets no stream whose
    // request waits for HTTP/2's window, and the handler, waiting to send, does not read on. It
    // stays until its connection ends, in tonic, too.
    let full_both_ways =
        requests.iter().sum::<usize>() > UP && responses.iter().sum::<usize>() > DOWN;
    CallPlan {
        id,
        channel,
        at,
        kind,
        requests,
        responses,
        pinned: rng.random_bool(0.5),
        client_zero: rng.random_bool(0.6),
        server_zero: rng.random_bool(0.6),
        request_gap: sometimes(rng, 0.2, 30),
        response_gap: sometimes(rng, 0.2, 30),
        think: sometimes(rng, 0.3, 200),
        reading,
        slow: sometimes(rng, if pressure { 0.5 } else { 0.2 }, 100),
        hold: sometimes(rng, if pressure { 0.6 } else { 0.2 }, 2_000),
        code: *codes.choose(rng).unwrap_or(&Code::Ok),
        deadline: rng.random_bool(0.15).then(|| ms(rng.random_range(1..400))),
        give_up: rng
            .random_bool(0.1)
            .then(|| ms(rng.random_range(0..200)))
            .filter(|_| !full_both_ways),
        enough: rng.random_bool(0.1).then(|| rng.random_range(0..3)).filter(|_| !full_both_ways),
    }
}
