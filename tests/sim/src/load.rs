//! The calls of a plan.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tonic::Code;

/// The metadata key for the call's number.
pub(crate) const CALL: &str = "sim-call";

pub(crate) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Unary,
    /// One request, many responses.
    ServerStreaming,
    /// Many requests, one response.
    ClientStreaming,
    Bidirectional,
    /// Bodies as the transport delivers them, without tonic's codec: the reader retains the
    /// transport's own memory.
    Raw,
}

/// When a handler reads its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// The handler reads all requests before it answers.
    First,
    /// The handler reads one request before each answer, and the rest at the end.
    Between,
    /// The handler reads no requests.
    Never,
    /// The handler reads all requests, and echoes each unchanged. Raw calls have this order, and
    /// [`CallPlan::echo`] sets it.
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
    /// Whether requests are sent from pool memory, if the pool has room.
    pub(crate) pinned: bool,
    /// Whether the client, and the server, use the zero-copy codec.
    pub(crate) client_zero_copy: bool,
    pub(crate) server_zero_copy: bool,
    pub(crate) request_gap: Duration,
    pub(crate) response_gap: Duration,
    /// How long the handler waits before it does anything.
    pub(crate) handler_delay: Duration,
    pub(crate) reading: Reading,
    /// How long the caller waits after each response, and the handler after each request.
    pub(crate) read_delay: Duration,
    /// How long a reader retains a message.
    pub(crate) retain_for: Duration,
    pub(crate) code: Code,
    pub(crate) deadline: Option<Duration>,
    /// The caller drops the call after this time.
    pub(crate) drop_after: Option<Duration>,
    /// The caller drops the call after this many responses.
    pub(crate) drop_after_responses: Option<usize>,
}

/// Sizes around every threshold: empty, what fits into a slot after a head, a slot, a granule, a
/// grant, a staging block, a window.
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
            let max = if large && rng.random_bool(0.3) { EDGES.len() } else { EDGES.len() - 4 };
            let edge = EDGES[rng.random_range(0..max)];
            (edge + rng.random_range(0..16)).saturating_sub(rng.random_range(0..24))
        }
    }
}

fn sometimes(rng: &mut StdRng, chance: f64, max: u64) -> Duration {
    if rng.random_bool(chance) { ms(rng.random_range(0..=max)) } else { Duration::ZERO }
}

pub(crate) fn draw(
    rng: &mut StdRng,
    channels: usize,
    span: Duration,
    pressure: bool,
) -> Vec<CallPlan> {
    let count = *[1, 5, 15, 30, 60].choose(rng).unwrap_or(&5);
    // Whether all calls begin at the same time, or are spread over the span.
    let burst = rng.random_bool(0.3);
    (0..count)
        .map(|id| {
            let at = if burst { 0 } else { rng.random_range(0..=span.as_millis() as u64) };
            call(rng, id, rng.clone().random_range(0..channels), ms(at), pressure)
        })
        .collect()
}

impl CallPlan {
    /// Makes the handler echo its input in three of four unary and bidirectional calls whose ends
    /// both have the zero-copy codec. The handler then lends memory again that its peer has lent.
    pub(crate) fn echo(&mut self) {
        let may = matches!(self.kind, Kind::Unary | Kind::Bidirectional)
            && self.client_zero_copy
            && self.server_zero_copy;
        if may && self.id % 4 != 1 {
            self.reading = Reading::Echo;
            self.responses = self.requests.clone();
            if full_both_ways(&self.requests, &self.responses) {
                (self.drop_after, self.drop_after_responses) = (None, None);
            }
        }
    }

    /// Whether there is a buffer for the response to land in: for a third of the calls whose client
    /// has the codec for it.
    pub(crate) fn has_buffer(&self) -> bool {
        self.client_zero_copy && self.kind != Kind::Raw && self.id % 3 == 1
    }

    /// The length of a buffer for a field of this many bytes. Some buffers are too short.
    pub(crate) fn buffer_len(&self, field: usize) -> usize {
        if self.id % 9 == 1 { field / 2 } else { field + self.id % 2 }
    }

    /// Whether the first response is longer than its buffer.
    pub(crate) fn response_is_too_long(&self) -> bool {
        self.has_buffer() && self.is_too_long(self.responses.first())
    }

    /// Whether the first request is longer than its buffer. `at_server` says that the server has
    /// buffers for requests.
    pub(crate) fn request_is_too_long(&self, at_server: bool) -> bool {
        let lands = matches!(self.kind, Kind::Unary | Kind::ClientStreaming)
            && self.server_zero_copy
            && at_server;
        lands && self.is_too_long(self.requests.first())
    }

    fn is_too_long(&self, field: Option<&usize>) -> bool {
        field.is_some_and(|field| self.buffer_len(*field) < *field)
    }
}

/// Payload bytes that fit HTTP/2's windows with their framing: of 1 MiB towards the server, and of
/// 2 MiB towards the client.
const HTTP2_UP_WINDOW: usize = 1000 << 10;
const HTTP2_DOWN_WINDOW: usize = 2000 << 10;

/// Whether a call fills its windows in both directions. Over TCP such a call cannot be dropped,
/// because hyper does not reset a stream whose request waits for HTTP/2's window, and the handler
/// waits to send and does not read. The call stays until its connection ends, also with stock
/// tonic.
fn full_both_ways(requests: &[usize], responses: &[usize]) -> bool {
    requests.iter().sum::<usize>() > HTTP2_UP_WINDOW
        && responses.iter().sum::<usize>() > HTTP2_DOWN_WINDOW
}

fn call(rng: &mut StdRng, id: usize, channel: usize, at: Duration, pressure: bool) -> CallPlan {
    let kinds = [
        Kind::Unary,
        Kind::Unary,
        Kind::Unary,
        Kind::ServerStreaming,
        Kind::ClientStreaming,
        Kind::Bidirectional,
        Kind::Raw,
        Kind::Raw,
    ];
    let kind = *kinds.choose(rng).unwrap_or(&Kind::Unary);
    let many = |rng: &mut StdRng| *[0, 1, 2, 3, 5, 20].choose(rng).unwrap_or(&1);
    let sizes = |rng: &mut StdRng, n: usize| (0..n).map(|_| size(rng, n <= 3)).collect::<Vec<_>>();
    let (up, down) = match kind {
        Kind::Unary => (1, 1),
        Kind::ServerStreaming => (1, many(rng)),
        Kind::ClientStreaming => (many(rng), 1),
        Kind::Bidirectional | Kind::Raw => (many(rng), many(rng)),
    };
    let reading = match kind {
        Kind::Unary | Kind::ServerStreaming => Reading::First,
        Kind::ClientStreaming | Kind::Bidirectional => {
            [Reading::First, Reading::Between, Reading::Never][rng.random_range(0..3)]
        }
        Kind::Raw => [Reading::First, Reading::Between, Reading::Never, Reading::Echo]
            [rng.random_range(0..4)],
    };
    let requests = sizes(rng, up);
    let responses = if reading == Reading::Echo { requests.clone() } else { sizes(rng, down) };
    let codes = [Code::Ok, Code::Ok, Code::Ok, Code::Ok, Code::Aborted, Code::NotFound];
    let full_both_ways = full_both_ways(&requests, &responses);
    CallPlan {
        id,
        channel,
        at,
        kind,
        requests,
        responses,
        pinned: rng.random_bool(0.5),
        client_zero_copy: rng.random_bool(0.6),
        server_zero_copy: rng.random_bool(0.6),
        request_gap: sometimes(rng, 0.2, 30),
        response_gap: sometimes(rng, 0.2, 30),
        handler_delay: sometimes(rng, 0.3, 200),
        reading,
        read_delay: sometimes(rng, if pressure { 0.5 } else { 0.2 }, 100),
        retain_for: sometimes(rng, if pressure { 0.6 } else { 0.2 }, 2_000),
        code: *codes.choose(rng).unwrap_or(&Code::Ok),
        deadline: rng.random_bool(0.15).then(|| ms(rng.random_range(1..400))),
        drop_after: rng
            .random_bool(0.1)
            .then(|| ms(rng.random_range(0..200)))
            .filter(|_| !full_both_ways),
        drop_after_responses: rng
            .random_bool(0.1)
            .then(|| rng.random_range(0..3))
            .filter(|_| !full_both_ways),
    }
}
