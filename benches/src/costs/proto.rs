//! Frames and connections, without IO.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use bytes::Bytes;
use tonic_rdma_proto::frame::{Composer, Frame, Reader};
use tonic_rdma_proto::{Config, Connection, Event, Flow, GrantMemory, Room, StreamId, Transmit};

use super::meter::{Counts, measure};
use super::scenario::Scenario;

/// The scenarios of this module, for [`super::all`].
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "frames-encode",
        what: "one message of HEADERS (200 B) and DATA (64 B) composed",
        run: || Ok(frames(true)),
    },
    Scenario { name: "frames-decode", what: "the same message read", run: || Ok(frames(false)) },
    Scenario {
        name: "proto-unary-64",
        what: "a unary call of 64 B and back through two connections",
        run: || exchange(64),
    },
    Scenario {
        name: "proto-unary-1MiB",
        what: "a unary call of 1 MiB, answered with nothing, through two connections",
        run: || exchange(1 << 20),
    },
];

const SLOT: usize = 4096;
const TIMES: usize = 1000;

fn frames(encode: bool) -> Counts {
    let block = Bytes::from(vec![7; 200]);
    let head =
        Frame::Headers { stream: 1, end: false, more: false, indexed: false, lands: false, block };
    let data = Frame::Data { stream: 1, end: true, data: vec![7; 64].into() };
    let mut slot = vec![0; SLOT];
    let mut compose = || {
        let mut message = Composer::new(black_box(&mut slot));
        message.add(black_box(&head));
        message.add(black_box(&data));
        message.finish(1)
    };
    if encode {
        return measure(TIMES, || {
            for _ in 0..TIMES {
                black_box(compose());
            }
        });
    }
    let len = compose();
    let message = Bytes::copy_from_slice(&slot[..len]);
    measure(TIMES, || {
        for _ in 0..TIMES {
            let Ok(mut reader) = Reader::new(black_box(message.clone())) else { return };
            while let Ok(Some(frame)) = reader.next_frame() {
                black_box(frame);
            }
        }
    })
}

/// Two connections that deliver messages to each other immediately.
struct Pair {
    /// Client and server.
    ends: [Connection; 2],
    slot: Vec<u8>,
    now: Instant,
    /// Number of keys of landing memory given so far, which is also the last key.
    keys: usize,
    /// Number of messages so far.
    messages: u64,
    /// Number of WRITEs so far.
    writes: u64,
}

impl Pair {
    fn new() -> Self {
        let config = Config { slot_size: SLOT as u32, ..Config::default() };
        let now = Instant::now();
        let client = Connection::client(config.clone(), config.settings(), now);
        let server = Connection::server(config.clone(), config.settings(), now);
        Pair { ends: [client, server], slot: vec![0; SLOT], now, keys: 0, messages: 0, writes: 0 }
    }

    /// Transmits until neither side has anything left.
    fn settle(&mut self) -> anyhow::Result<()> {
        let room = Room { write: 1 << 20, staging: 64 << 10, chunk: 0 };
        loop {
            let mut idle = true;
            for from in [0, 1] {
                while let Some(want) = self.ends[from].poll_landing(|_| true) {
                    self.keys += 1;
                    let memory =
                        GrantMemory { key: self.keys, addr: 1 << 20, rkey: 7, len: want.want };
                    self.ends[from].provide_landing(want.key, memory);
                }
                while let Some(work) = self.ends[from].poll_transmit(Some(&mut self.slot), room) {
                    idle = false;
                    match work {
                        Transmit::Send(len) => {
                            self.messages += 1;
                            self.ends[1 - from]
                                .receive(self.now, Bytes::copy_from_slice(&self.slot[..len]))?;
                        }
                        Transmit::Write(write) => {
                            self.writes += 1;
                            black_box(write);
                        }
                    }
                }
            }
            if idle {
                return Ok(());
            }
        }
    }

    /// Handles the events at one end. Returns the opened stream, if any, and the number of body
    /// bytes received.
    fn take(&mut self, end: usize) -> (Option<StreamId>, usize) {
        let (mut opened, mut bytes) = (None, 0);
        while let Some(event) = self.ends[end].poll_event() {
            match event {
                Event::Opened { stream, .. } => opened = Some(stream),
                Event::Data { stream, data, .. } => {
                    bytes += data.len();
                    self.ends[end].consume(stream, data.len() as u32, Flow::Window);
                }
                Event::Landed { stream, len, flow, .. } => {
                    bytes += len as usize;
                    self.ends[end].consume(stream, len, flow);
                }
                other => drop(black_box(other)),
            }
        }
        (opened, bytes)
    }

    fn call(&mut self, block: &Bytes, request: &Bytes, reply: &Bytes) -> anyhow::Result<()> {
        let id = self.ends[0].open(block.clone(), false)?;
        self.ends[0].send_data(id, request.clone(), true, true)?;
        self.settle()?;
        let (opened, bytes) = self.take(1);
        ensure!(
            opened == Some(id) && bytes == request.len(),
            "the request did not arrive: {bytes} bytes"
        );
        let server = &mut self.ends[1];
        server.send_headers(id, block.clone(), false)?;
        server.send_data(id, reply.clone(), true, false)?;
        server.send_headers(id, block.slice(..32), true)?;
        self.settle()?;
        let (_, bytes) = self.take(0);
        ensure!(bytes == reply.len(), "the reply did not arrive: {bytes} bytes");
        Ok(())
    }
}

/// Counts the costs of unary calls whose requests have `len` bytes. The reply has the same length,
/// but is empty if `len` exceeds a slot.
fn exchange(len: usize) -> anyhow::Result<Counts> {
    let mut pair = Pair::new();
    let (block, request) = (Bytes::from(vec![7; 200]), Bytes::from(vec![7; len]));
    let reply = request.slice(..if len > SLOT { 0 } else { len });
    let run = |pair: &mut Pair| (0..TIMES).try_for_each(|_| pair.call(&block, &request, &reply));
    run(&mut pair)?;
    let before = (pair.messages, pair.writes);
    let mut result = Ok(());
    let mut counts = measure(TIMES, || result = run(&mut pair));
    result?;
    counts.insert("sends".into(), (pair.messages - before.0) as f64 / TIMES as f64);
    counts.insert("writes".into(), (pair.writes - before.1) as f64 / TIMES as f64);
    Ok(counts)
}
