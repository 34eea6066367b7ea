//! Random operations against a model: each accepted body arrives in order and exactly once.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;

use super::pair::*;
use crate::config::Config;
use crate::error::CloseCode;
use crate::frame::{Frame, Reader};
use crate::ids::{ResetCode, StreamId};
use crate::payload::Payload;

#[derive(Clone, Debug)]
enum Op {
    Open {
        block: usize,
        end: bool,
        naming: Option<Naming>,
    },
    /// Two segments. The second lies at `place` modulo 4096, and should land aligned.
    Send {
        end: usize,
        stream: Index,
        front: usize,
        place: usize,
        len: usize,
        pinned: bool,
        lend: bool,
        last: bool,
    },
    Trailers {
        end: usize,
        stream: Index,
        len: usize,
    },
    Reset {
        end: usize,
        stream: Index,
    },
    Release {
        stream: Index,
    },
    Stall {
        end: usize,
        stream: Index,
    },
    Unstall {
        end: usize,
        stream: Index,
    },
    Steps(usize),
    Drive(usize),
    Deliver {
        end: usize,
        messages: usize,
    },
    Recall(usize),
    RecallGrants {
        end: usize,
        one_in: usize,
    },
    Shrink(usize),
    /// The end keeps lent bytes, or returns them.
    Keep {
        end: usize,
        keeps: bool,
    },
    Advance(u64),
    GoAway(usize),
}

/// Everything accepted for one direction of a stream.
#[derive(Debug, Default)]
struct Half {
    body: Vec<u8>,
    blocks: usize,
    ended: bool,
}

#[derive(Debug, Default)]
struct Model {
    halves: BTreeMap<(u32, usize), Half>,
    reset: BTreeMap<u32, bool>,
    seed: u32,
}

fn naming() -> impl Strategy<Value = Option<Naming>> {
    prop_oneof![
        4 => Just(None),
        1 => Just(Some(Naming::Whole)),
        1 => (1..100_000u32).prop_map(|most| Some(Naming::Parts(most))),
        1 => prop_oneof![Just(u32::MAX), 1..100_000u32]
            .prop_map(|most| Some(Naming::Late(most))),
        1 => Just(Some(Naming::Refuse)),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let end = 0..2usize;
    let len = prop_oneof![
        0..20usize,
        480..520usize,
        1000..1100usize,
        2000..70_000usize,
        100_000..400_000usize
    ];
    let front = prop_oneof![8 => 0..40usize, 1 => 250..262usize];
    let place = prop_oneof![Just(0usize), 0..64usize, 0..4096usize];
    let op = prop_oneof![
        4 => (prop_oneof![0..100usize, 100..5000usize], any::<bool>(), naming())
            .prop_map(|(block, end, naming)| Op::Open { block, end, naming }),
        8 => (end.clone(), any::<Index>(), (front, place), len, any::<(bool, bool)>(), prop::bool::weighted(0.2)).prop_map(
            |(end, stream, (front, place), len, (pinned, lend), last)| {
                Op::Send { end, stream, front, place, len, pinned, lend, last }
            }
        ),
        2 => (end.clone(), any::<Index>(), 0..3000usize)
            .prop_map(|(end, stream, len)| Op::Trailers { end, stream, len }),
        1 => (end.clone(), any::<Index>()).prop_map(|(end, stream)| Op::Reset { end, stream }),
        1 => any::<Index>().prop_map(|stream| Op::Release { stream }),
        2 => (end.clone(), any::<Index>()).prop_map(|(end, stream)| Op::Stall { end, stream }),
        2 => (end.clone(), any::<Index>()).prop_map(|(end, stream)| Op::Unstall { end, stream }),
        6 => (1..40usize).prop_map(Op::Steps),
        3 => end.clone().prop_map(Op::Drive),
        4 => (end.clone(), 1..6usize).prop_map(|(end, messages)| Op::Deliver { end, messages }),
        1 => end.clone().prop_map(Op::Recall),
        2 => (end.clone(), 1..4usize).prop_map(|(end, one_in)| Op::RecallGrants { end, one_in }),
        1 => end.clone().prop_map(Op::Shrink),
        1 => (end.clone(), any::<bool>()).prop_map(|(end, keeps)| Op::Keep { end, keeps }),
        1 => (1..1000u64).prop_map(Op::Advance),
    ];
    let ops = prop::collection::vec(op, 1..60);
    (ops, prop::option::weighted(0.2, (any::<Index>(), end))).prop_map(|(mut ops, away)| {
        if let Some((at, end)) = away {
            let at = at.index(ops.len());
            ops.insert(at, Op::GoAway(end));
        }
        ops
    })
}

fn configs() -> impl Strategy<Value = Config> {
    (
        (prop::sample::select(vec![512, 1024, 2048, 4096]), prop::sample::select(vec![1, 2, 4])),
        (4..12u16, prop::sample::select(vec![0, 1, 4, 20])),
        prop::sample::select(vec![1, 2, 5, 100]),
        prop::sample::select(vec![4096, 20_000, 300_000]),
        prop::sample::select(vec![65_536, 150_000, 8 << 20]),
        (
            prop::sample::select(vec![0, 100_000, 8 << 20]),
            prop::sample::select(vec![0, 65_536, 1 << 30]),
        ),
        (0..4u8, prop::sample::select(vec![1, 8, 64, 256, 4096])),
        prop::sample::select(vec![4096, 20_000, 256 << 10]),
    )
        .prop_map(
            |(
                (slot_size, fraction),
                (recv_slots, extra),
                max_streams,
                stream_window,
                bulk_window,
                (whole, unread_total),
                (standing_grants, align),
                write_chunk,
            )| Config {
                slot_size,
                rest_slot_size: (slot_size / fraction).max(512),
                recv_slots,
                max_recvs: recv_slots + extra,
                max_streams,
                stream_window,
                bulk_window,
                whole,
                unread_total: u64::from(unread_total.max(65_536_u32)),
                max_stream_window: stream_window.max(100_000),
                standing_grants,
                align,
                write_chunk,
                idle_recall: Duration::from_millis(500),
                takes_lent: true,
                ..Config::default()
            },
        )
}

/// For each end: memory budget, copy-out, SEND slots, staging blocks, bytes of WRITEs in flight.
fn machines() -> impl Strategy<Value = [(usize, bool, usize, usize, usize); 2]> {
    let machine = || {
        (
            prop::sample::select(vec![16 << 10, 40 << 10, 200 << 10, 4 << 20]),
            any::<bool>(),
            1..5usize,
            1..4usize,
            prop::sample::select(vec![16 << 10, 100_000, 1 << 20]),
        )
    };
    [machine(), machine()]
}

impl Model {
    fn pick(&self, p: &Pair, end: usize, stream: &Index) -> Option<StreamId> {
        let known: Vec<u32> = if end == CLIENT {
            self.halves.keys().filter(|(_, end)| *end == CLIENT).map(|(id, _)| *id).collect()
        } else {
            p.ends[SERVER].streams.keys().copied().collect()
        };
        (!known.is_empty()).then(|| StreamId(known[stream.index(known.len())]))
    }

    fn half(&mut self, id: StreamId, end: usize) -> &mut Half {
        self.halves.entry((id.get(), end)).or_default()
    }

    fn apply(&mut self, p: &mut Pair, op: &Op) {
        self.seed += 1;
        let seed = self.seed;
        match op {
            Op::Open { block, end, naming } => {
                if let Ok(id) = p.client().open(pattern(seed, *block), *end) {
                    if let Some(naming) = naming {
                        p.client().name_memory(id);
                        p.ends[CLIENT].naming.insert(id.get(), *naming);
                    }
                    let half = self.half(id, CLIENT);
                    (half.blocks, half.ended) = (1, *end);
                }
            }
            Op::Send { end, stream, front, place, len, pinned, lend, last } => {
                let Some(id) = self.pick(p, *end, stream) else { return };
                // A response begins with its head.
                if *end == SERVER && self.half(id, SERVER).blocks == 0 {
                    if p.server().send_headers(id, pattern(seed, 30), false).is_err() {
                        return;
                    }
                    self.half(id, SERVER).blocks = 1;
                }
                let (front, bytes) = (pattern(!seed, *front), pattern_at(*place, seed, *len));
                let mut payload = Payload::new();
                payload.push(front.clone(), !pinned);
                payload.push_aligned(bytes.clone(), *pinned);
                if *lend {
                    payload.last_is_lendable();
                }
                if p.ends[*end].conn.send_payload(id, payload, *last).is_ok() {
                    p.aligned.push(bytes.clone());
                    let half = self.half(id, *end);
                    half.body.extend_from_slice(&front);
                    half.body.extend_from_slice(&bytes);
                    half.ended |= *last;
                }
            }
            Op::Trailers { end, stream, len } => {
                let Some(id) = self.pick(p, *end, stream) else { return };
                if p.ends[*end].conn.send_headers(id, pattern(seed, *len), true).is_ok() {
                    let half = self.half(id, *end);
                    half.blocks += 1;
                    half.ended = true;
                }
            }
            Op::Reset { end, stream } => {
                let Some(id) = self.pick(p, *end, stream) else { return };
                self.reset.insert(id.get(), true);
                p.ends[*end].conn.reset(id, ResetCode::CANCEL);
            }
            Op::Release { stream } => {
                let Some(id) = self.pick(p, SERVER, stream) else { return };
                if !self.half(id, SERVER).ended {
                    self.reset.insert(id.get(), true);
                }
                p.server().release(id, ResetCode::CANCEL);
            }
            Op::Stall { end, stream } => {
                let Some(id) = self.pick(p, *end, stream) else { return };
                p.ends[*end].stalled.insert(id.get());
            }
            Op::Unstall { end, stream } => {
                let Some(id) = self.pick(p, *end, stream) else { return };
                p.ends[*end].unstall(id);
            }
            Op::Steps(steps) => (0..*steps).for_each(|_| {
                p.step();
            }),
            Op::Drive(end) => {
                p.drive(*end);
            }
            Op::Deliver { end, messages } => (0..*messages).for_each(|_| {
                p.deliver(*end);
            }),
            Op::Recall(end) => p.ends[*end].conn.recall_standing(),
            Op::RecallGrants { end, one_in } => {
                p.ends[*end].conn.recall_grants(|memory| memory % one_in == 0);
            }
            Op::Shrink(end) => p.ends[*end].shrink(),
            Op::Keep { end, keeps } => p.ends[*end].loans.keeps = *keeps,
            Op::Advance(millis) => p.advance(Duration::from_millis(*millis)),
            Op::GoAway(end) => p.ends[*end].conn.go_away(CloseCode::Ok, "enough"),
        }
    }

    /// The received data is a prefix of the accepted data.
    fn check(&self, p: &Pair) {
        for ((id, from), half) in &self.halves {
            let Some(app) = p.ends[1 - from].streams.get(id) else { continue };
            assert!(
                half.body.starts_with(&app.body),
                "stream {id} from {from}: other bytes than were sent"
            );
            assert!(app.blocks.len() <= half.blocks);
            assert!(
                !app.ended || (half.ended && app.body.len() == half.body.len()),
                "stream {id}: early end"
            );
        }
    }

    /// Every grant is in exactly one place: in flight, with the peer, or on its way back (R8, R9).
    fn check_grants(p: &Pair) {
        for (granter, holder) in [(CLIENT, SERVER), (SERVER, CLIENT)] {
            p.ends[granter].conn.held();
            let frames = |from: usize| {
                let queued = p.ends[from].conn.output.control.frames().cloned();
                let sent = p.to[1 - from].iter().flat_map(|wire| {
                    let message = match wire {
                        Wire::Send(message) => message.clone(),
                        Wire::Write(_) => return Vec::new(),
                    };
                    let mut reader = Reader::new(message).unwrap();
                    std::iter::from_fn(|| reader.next_frame().unwrap()).collect()
                });
                queued.chain(sent).collect::<Vec<Frame>>()
            };
            let coming = frames(granter).into_iter().filter_map(|frame| match frame {
                Frame::Grant { id, .. } => Some(id),
                _ => None,
            });
            let going = frames(holder).into_iter().filter_map(|frame| match frame {
                Frame::Done { id, .. } | Frame::Abort { id } => Some(id),
                _ => None,
            });
            let held = p.ends[holder].conn.peer_grants.ids();
            let mut there: Vec<u32> = coming.chain(held).chain(going).collect();
            there.sort_unstable();
            let mut out: Vec<u32> = p.ends[granter].conn.landing.grants.ids().collect();
            out.sort_unstable();
            assert_eq!(out, there, "grants of end {granter}");
        }
    }

    /// Ends all halves. Everything that was not reset must have arrived.
    fn finish(mut self, p: &mut Pair) {
        for end in 0..2 {
            p.ends[end].loans.keeps = false;
            for id in std::mem::take(&mut p.ends[end].stalled) {
                p.ends[end].read(StreamId(id));
            }
        }
        p.settle();
        let ids: Vec<u32> =
            self.halves.keys().filter(|(_, end)| *end == CLIENT).map(|(id, _)| *id).collect();
        let ended = |id: &u32| self.halves.get(&(*id, SERVER)).is_some_and(|half| half.ended);
        let early: Vec<u32> = ids.iter().copied().filter(ended).collect();
        let is_open = |p: &Pair| {
            let mut open = ids.iter().flat_map(|id| p.ends.iter().map(|end| (end, StreamId(*id))));
            open.any(|(end, id)| end.conn.is_open_for_sending(id))
        };
        // Each round ends the streams that the server allows at a time. Then the streams that wait
        // begin.
        while is_open(p) {
            for end in [CLIENT, SERVER] {
                for id in ids.iter().map(|id| StreamId(*id)) {
                    if p.ends[end].conn.is_open_for_sending(id) {
                        p.ends[end].conn.send_headers(id, pattern(1, 10), true).unwrap();
                        let half = self.half(id, end);
                        half.blocks += 1;
                        half.ended = true;
                    }
                }
                // The server ends after the client, so that it does not cut off the request.
                p.settle();
            }
        }
        self.check(p);
        let refused = std::mem::take(&mut p.ends[CLIENT].refused);
        for id in ids {
            if refused.contains(&StreamId(id)) {
                assert!(
                    !p.ends[SERVER].streams.contains_key(&id),
                    "stream {id} was refused and served"
                );
                continue;
            }
            if self.reset.contains_key(&id) {
                continue;
            }
            let down = p.ends[CLIENT].app(StreamId(id));
            let half = &self.halves[&(id, SERVER)];
            assert!(
                down.ended && down.body == half.body && down.blocks.len() == half.blocks,
                "stream {id} down"
            );
            let up = p.ends[SERVER].app(StreamId(id));
            assert_eq!(up.reset, None);
            // An early response may have cut off the request.
            if early.contains(&id) {
                assert!(down.reset.is_none_or(|code| code == ResetCode::NO_ERROR));
                continue;
            }
            assert_eq!(down.reset, None);
            let half = &self.halves[&(id, CLIENT)];
            assert!(
                up.ended && up.body == half.body && up.blocks.len() == half.blocks,
                "stream {id} up"
            );
        }
        p.assert_clean();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bodies_arrive_in_order_and_once(
        ops in ops(),
        client in configs(),
        server in configs(),
        names_requests in any::<bool>(),
        machines in machines(),
    ) {
        let mut p = Pair::new(client, Config { names_requests, ..server }, 0);
        p.ends[SERVER].names = |id| match id.get() % 6 {
            0 => None,
            1 => Some(Naming::Refuse),
            2 => Some(Naming::Late(50_000)),
            3 => Some(Naming::Parts(50_000)),
            _ => Some(Naming::Whole),
        };
        for (end, (budget, copy_out, slots, staging, room)) in p.ends.iter_mut().zip(machines) {
            end.memory.budget = budget;
            end.copy_out = copy_out;
            end.loans.limit = budget;
            end.loans.postpones = budget % 2;
            end.limit(slots, staging, 16 << 10, room);
        }
        let mut model = Model::default();
        for op in &ops {
            model.apply(&mut p, op);
            model.check(&p);
            Model::check_grants(&p);
        }
        model.finish(&mut p);
    }

    #[test]
    fn the_same_operations_give_the_same_bytes(ops in ops(), config in configs()) {
        let run = || {
            let mut p = Pair::new(config.clone(), config.clone(), 64 << 10);
            p.ends.iter_mut().for_each(|end| end.loans.limit = 300_000);
            let mut model = Model::default();
            for op in &ops {
                model.apply(&mut p, op);
            }
            (p.digest, p.sent, p.ends.map(|end| end.conn.stats()))
        };
        prop_assert_eq!(run(), run());
    }
}
