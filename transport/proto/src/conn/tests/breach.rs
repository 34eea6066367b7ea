//! Every breach: a hostile peer commits it, receives its name, and causes nothing else (R15).

use std::collections::BTreeSet;

use bytes::Bytes;

use super::super::credits::Returned;
use super::super::*;
use super::pair::*;
use crate::config::Config;
use crate::error::{Breach, CloseCode};
use crate::frame::{Field, Frame, MAX_HEADER_BLOCK, Reader};
use crate::ids::{GrantId, ResetCode, StreamId};
use crate::payload::{LentBody, LentPlace};

fn config() -> Config {
    Config {
        slot_size: 32_768,
        recv_slots: 16,
        max_recvs: 16,
        max_streams: 4,
        stream_window: 65_536,
        standing_grants: 0,
        takes_lent: true,
        ..Config::default()
    }
}

fn pair() -> Pair {
    let mut p = Pair::new(config(), config(), 1 << 20);
    p.settle();
    p
}

/// Injects a message of one frame with these raw fields.
fn raw(p: &mut Pair, from: usize, kind: u8, flags: u8, stream: u32, stated: u16, payload: &[u8]) {
    let credits = p.ends[from].conn.credits.sent().credits as u8;
    let mut message = vec![credits, 0, 0, 0, 16 + payload.len() as u8, 0, 0, 0, kind, flags];
    message.extend_from_slice(&stated.to_le_bytes());
    message.extend_from_slice(&stream.to_le_bytes());
    message.extend_from_slice(payload);
    p.inject_raw(from, message.into());
}

fn data(stream: u32, len: usize, end: bool) -> Frame {
    Frame::Data { stream, end, data: pattern(1, len) }
}

fn grant(stream: u32, id: u32, len: u32) -> Frame {
    Frame::Grant { stream, id, rkey: 1, len, addr: 0x1000 }
}

/// Lets the hostile client open stream 1.
fn opened(p: &mut Pair) {
    p.inject(CLIENT, &[head(1)]);
    p.drive(SERVER);
}

/// Lets an honest client open stream 1 and wait for memory for 50,000 bytes.
fn asking(p: &mut Pair) {
    p.ends[SERVER].memory.budget = 0;
    let id = p.open("head", false);
    p.send(CLIENT, id, pattern(1, 50_000));
    p.settle();
}

/// Gives the hostile client grant 0 (stream 1, 20,000 bytes).
fn granted(p: &mut Pair) {
    p.inject(CLIENT, &[head(1), Frame::Request { stream: 1, len: 20_000, begin: 0, field: None }]);
    p.drive(SERVER);
    assert_eq!(p.server().pending().grants, 1);
}

struct Case {
    /// The hostile side.
    from: usize,
    breach: Breach,
    act: fn(&mut Pair),
}

fn case(from: usize, breach: Breach, act: fn(&mut Pair)) -> Case {
    Case { from, breach, act }
}

fn stream(id: u32) -> StreamId {
    StreamId(id)
}

/// Messages and frames that are malformed.
fn malformed() -> Vec<Case> {
    vec![
        case(CLIENT, Breach::MessageLength { received: 0, stated: 8 }, |p| {
            p.inject_raw(CLIENT, Bytes::new())
        }),
        case(CLIENT, Breach::MessageLength { received: 8, stated: 9 }, |p| {
            p.inject_raw(CLIENT, Bytes::from_static(&[0, 0, 0, 0, 9, 0, 0, 0]));
        }),
        case(CLIENT, Breach::Reserved("message header"), |p| {
            p.inject_raw(CLIENT, Bytes::from_static(&[0, 0, 4, 0, 8, 0, 0, 0]));
        }),
        case(SERVER, Breach::Reserved("GRANT frame"), |p| {
            let mut payload = [1; 24];
            payload[12] = 1;
            raw(p, SERVER, 6, 0, 0, 24, &payload);
        }),
        case(CLIENT, Breach::FrameLength { frame: "?", stated: 8, left: 3 }, |p| {
            let credits = p.client().credits.sent().credits as u8;
            p.inject_raw(CLIENT, vec![credits, 0, 0, 0, 11, 0, 0, 0, 1, 1, 1].into());
        }),
        case(CLIENT, Breach::FrameLength { frame: "DATA", stated: 5, left: 4 }, |p| {
            raw(p, CLIENT, 2, 0, 1, 5, &[0; 4]);
        }),
        case(CLIENT, Breach::PayloadLength { frame: "WINDOW", got: 3 }, |p| {
            raw(p, CLIENT, 3, 0, 1, 3, &[0; 3])
        }),
        case(CLIENT, Breach::PayloadLength { frame: "REQUEST", got: 4 }, |p| {
            raw(p, CLIENT, 5, 0, 1, 4, &[0; 4])
        }),
        case(CLIENT, Breach::PayloadLength { frame: "GRANT", got: 16 }, |p| {
            raw(p, CLIENT, 6, 0, 1, 16, &[0; 16])
        }),
        case(CLIENT, Breach::PayloadLength { frame: "CLOSE", got: 3 }, |p| {
            raw(p, CLIENT, 12, 0, 0, 3, &[0; 3])
        }),
        case(CLIENT, Breach::UnknownFrame(0), |p| raw(p, CLIENT, 0, 0, 0, 0, &[])),
        case(SERVER, Breach::UnknownFrame(16), |p| raw(p, SERVER, 16, 0, 0, 0, &[])),
        case(CLIENT, Breach::UnknownFlags { frame: "DATA", flags: 2 }, |p| {
            raw(p, CLIENT, 2, 2, 1, 0, &[])
        }),
        case(CLIENT, Breach::UnknownFlags { frame: "HEADERS", flags: 3 }, |p| {
            raw(p, CLIENT, 1, 3, 1, 1, &[0])
        }),
        case(CLIENT, Breach::StreamField { frame: "DATA", id: 0 }, |p| {
            raw(p, CLIENT, 2, 0, 0, 0, &[])
        }),
        case(CLIENT, Breach::StreamField { frame: "PING", id: 7 }, |p| {
            raw(p, CLIENT, 10, 0, 7, 8, &[0; 8])
        }),
    ]
}

/// Credits, and frames that belong to the connection.
fn connection() -> Vec<Case> {
    vec![
        case(CLIENT, Breach::NoCredit, |p| {
            while p.client().credits.available() > 0 {
                p.inject(CLIENT, &[]);
            }
            p.inject_raw(CLIENT, Bytes::from_static(&[0, 0, 0, 0, 8, 0, 0, 0]));
        }),
        case(CLIENT, Breach::LongerThanItsRecv { len: 32_769, recv: 32_768 }, |p| {
            let mut message = vec![0; 32_769];
            message[4..8].copy_from_slice(&32_769_u32.to_le_bytes());
            p.client().credits.sent();
            p.inject_raw(CLIENT, message.into());
        }),
        case(CLIENT, Breach::CreditOverflow { returned: 17, room: 0 }, |p| {
            p.client().credits.sent();
            p.inject_raw(CLIENT, Bytes::from_static(&[17, 0, 0, 0, 8, 0, 0, 0]));
        }),
        case(CLIENT, Breach::WrongSide("GOAWAY"), |p| {
            p.inject(CLIENT, &[Frame::GoAway { ack: false, code: 0, text: Bytes::new() }]);
        }),
        case(SERVER, Breach::WrongSide("GOAWAY"), |p| {
            p.inject(SERVER, &[Frame::GoAway { ack: true, code: 0, text: Bytes::new() }]);
        }),
        case(CLIENT, Breach::UnexpectedGoAway, |p| {
            p.inject(CLIENT, &[Frame::GoAway { ack: true, code: 0, text: Bytes::new() }]);
        }),
        case(SERVER, Breach::UnexpectedGoAway, |p| {
            let goaway = Frame::GoAway { ack: false, code: 0, text: Bytes::new() };
            p.inject(SERVER, &[goaway.clone(), goaway]);
        }),
        case(CLIENT, Breach::OpenedAfterGoAway(stream(1)), |p| {
            p.server().go_away(CloseCode::Ok, "");
            p.drive(SERVER);
            p.inject(CLIENT, &[Frame::GoAway { ack: true, code: 0, text: Bytes::new() }, head(1)]);
        }),
        case(SERVER, Breach::UnexpectedPong, |p| {
            p.inject(SERVER, &[Frame::Ping { ack: true, token: 0 }])
        }),
        case(CLIENT, Breach::Flood(4160), |p| {
            for _ in 0..5 {
                p.inject(CLIENT, &vec![Frame::Ping { ack: false, token: 0 }; 1000]);
            }
        }),
        case(SERVER, Breach::Flood(4160), |p| {
            for _ in 0..9 {
                let pairs = (0..500).flat_map(|n| [grant(0, n, 1), Frame::Recall { id: n }]);
                p.inject(SERVER, &pairs.collect::<Vec<_>>());
            }
        }),
    ]
}

/// Streams, header blocks and windows.
fn streams() -> Vec<Case> {
    vec![
        case(CLIENT, Breach::RapidReset { burst: 1600, per_second: 1000 }, |p| {
            for first in [1, 402, 803, 1204] {
                let reset = |stream| Frame::Reset { stream, code: ResetCode::CANCEL.0 };
                let pairs = (first..first + 401).flat_map(|id| [head(id), reset(id)]);
                p.inject(CLIENT, &pairs.collect::<Vec<_>>());
            }
        }),
        case(SERVER, Breach::UnknownStream { frame: "HEADERS", stream: stream(1) }, |p| {
            p.inject(SERVER, &[head(1)]);
        }),
        case(SERVER, Breach::UnknownStream { frame: "RESET", stream: stream(1) }, |p| {
            // The stream is open, but the server cannot know of it yet.
            p.open("head", true);
            p.inject(SERVER, &[Frame::Reset { stream: 1, code: 0 }]);
        }),
        case(CLIENT, Breach::UnknownStream { frame: "DATA", stream: stream(1) }, |p| {
            p.inject(CLIENT, &[data(1, 1, false)]);
        }),
        case(CLIENT, Breach::UnknownStream { frame: "WINDOW", stream: stream(9) }, |p| {
            p.inject(CLIENT, &[Frame::Window { stream: 9, increment: 1 }]);
        }),
        case(CLIENT, Breach::UnknownStream { frame: "GRANT", stream: stream(9) }, |p| {
            p.inject(CLIENT, &[grant(9, 1, 1)]);
        }),
        case(CLIENT, Breach::ClosedStream { frame: "DATA", stream: stream(1) }, |p| {
            opened(p);
            p.inject(CLIENT, &[data(1, 1, true), data(1, 1, true)]);
        }),
        case(CLIENT, Breach::ClosedStream { frame: "HEADERS", stream: stream(3) }, |p| {
            // Ids may be skipped, but skipped ids may not be used later.
            p.inject(CLIENT, &[head(5), head(3)]);
        }),
        case(CLIENT, Breach::ClosedStream { frame: "REQUEST", stream: stream(1) }, |p| {
            opened(p);
            let reset = Frame::Reset { stream: 1, code: 8 };
            p.inject(
                CLIENT,
                &[
                    reset.clone(),
                    reset,
                    Frame::Request { stream: 1, len: 1, begin: 0, field: None },
                ],
            );
        }),
        case(CLIENT, Breach::TooManyStreams(4), |p| {
            p.inject(CLIENT, &[head(1), head(2), head(3), head(4), head(5)]);
        }),
        case(
            CLIENT,
            Breach::HeaderBlock { stream: stream(1), limit: MAX_HEADER_BLOCK as u32 },
            |p| {
                let part = |len| Frame::Headers {
                    stream: 1,
                    end: false,
                    more: true,
                    indexed: false,
                    lands: false,
                    block: pattern(1, len),
                };
                for _ in 0..8 {
                    p.inject(CLIENT, &[part(8191)]);
                }
                p.inject(CLIENT, &[part(8), part(1)]);
            },
        ),
        case(CLIENT, Breach::FrameOrder { frame: "DATA", stream: stream(1) }, |p| {
            let part = Frame::Headers {
                stream: 1,
                end: false,
                more: true,
                indexed: false,
                lands: false,
                block: block("half"),
            };
            p.inject(CLIENT, &[part, data(1, 1, false)]);
        }),
        case(SERVER, Breach::FrameOrder { frame: "DATA", stream: stream(1) }, |p| {
            p.open("head", true);
            p.drive(CLIENT);
            p.inject(SERVER, &[data(1, 1, false)]);
        }),
        case(SERVER, Breach::FrameOrder { frame: "second HEADERS", stream: stream(1) }, |p| {
            p.open("head", true);
            p.drive(CLIENT);
            p.inject(SERVER, &[head(1), head(1)]);
        }),
        case(CLIENT, Breach::FrameOrder { frame: "empty HEADERS", stream: stream(1) }, |p| {
            p.inject(
                CLIENT,
                &[Frame::Headers {
                    stream: 1,
                    end: false,
                    more: true,
                    indexed: false,
                    lands: false,
                    block: Bytes::new(),
                }],
            );
        }),
        case(CLIENT, Breach::Window { stream: stream(1), len: 6000, window: 5536 }, |p| {
            p.ends[SERVER].stalled.insert(1);
            opened(p);
            for _ in 0..11 {
                p.inject(CLIENT, &[data(1, 6000, false)]);
            }
        }),
        case(CLIENT, Breach::WindowUpdate(stream(1), 0), |p| {
            opened(p);
            p.inject(CLIENT, &[Frame::Window { stream: 1, increment: 0 }]);
        }),
        case(CLIENT, Breach::WindowUpdate(stream(1), i32::MAX as u32), |p| {
            opened(p);
            p.inject(CLIENT, &[Frame::Window { stream: 1, increment: i32::MAX as u32 }]);
        }),
        case(CLIENT, Breach::WindowUpdate(stream(1), u32::MAX), |p| {
            opened(p);
            p.inject(CLIENT, &[Frame::Window { stream: 1, increment: u32::MAX }]);
        }),
    ]
}

/// Requests and grants.
fn transfers() -> Vec<Case> {
    vec![
        case(CLIENT, Breach::EmptyRequest(stream(1)), |p| {
            p.inject(
                CLIENT,
                &[head(1), Frame::Request { stream: 1, len: 0, begin: 0, field: None }],
            );
        }),
        case(CLIENT, Breach::RequestField { stream: stream(1), len: 9000, end: 9001 }, |p| {
            let field = Some(Field { at: 1, len: 9000 });
            p.inject(CLIENT, &[head(1), Frame::Request { stream: 1, len: 9000, begin: 0, field }]);
        }),
        case(CLIENT, Breach::FrameOrder { frame: "HEADERS with LANDS", stream: stream(1) }, |p| {
            let lands = Frame::Headers {
                stream: 1,
                end: true,
                more: false,
                indexed: false,
                lands: true,
                block: block("x"),
            };
            p.inject(CLIENT, &[head(1), lands]);
        }),
        case(CLIENT, Breach::RequestBegin { stream: stream(1), begin: 64, modulus: 64 }, |p| {
            p.inject(
                CLIENT,
                &[head(1), Frame::Request { stream: 1, len: 9, begin: 64, field: None }],
            );
        }),
        case(CLIENT, Breach::DoneBegin { grant: GrantId(0), begin: 1, limit: 0 }, |p| {
            granted(p);
            p.inject(CLIENT, &[Frame::Done { stream: 1, end: false, id: 0, len: 1, begin: 1 }]);
        }),
        case(CLIENT, Breach::TooManyRequests(stream(1), 8), |p| {
            opened(p);
            p.inject(CLIENT, &vec![Frame::Request { stream: 1, len: 9, begin: 0, field: None }; 9]);
        }),
        case(CLIENT, Breach::UnknownGrant { frame: "DONE", grant: GrantId(7) }, |p| {
            p.inject(
                CLIENT,
                &[head(1), Frame::Done { stream: 1, end: false, id: 7, len: 1, begin: 0 }],
            );
        }),
        case(CLIENT, Breach::UnknownGrant { frame: "ABORT", grant: GrantId(0) }, |p| {
            granted(p);
            p.inject(CLIENT, &[Frame::Abort { id: 0 }, Frame::Abort { id: 0 }]);
        }),
        case(
            CLIENT,
            Breach::DoneLength { grant: GrantId(0), begin: 0, len: 20_001, granted: 20_000 },
            |p| {
                granted(p);
                p.inject(
                    CLIENT,
                    &[Frame::Done { stream: 1, end: false, id: 0, len: 20_001, begin: 0 }],
                );
            },
        ),
        case(
            CLIENT,
            Breach::DoneLength { grant: GrantId(0), begin: 0, len: 0, granted: 20_000 },
            |p| {
                granted(p);
                p.inject(CLIENT, &[Frame::Done { stream: 1, end: false, id: 0, len: 0, begin: 0 }]);
            },
        ),
        case(CLIENT, Breach::DoneStream { grant: GrantId(0), stream: stream(2) }, |p| {
            granted(p);
            p.inject(
                CLIENT,
                &[head(2), Frame::Done { stream: 2, end: false, id: 0, len: 20_000, begin: 0 }],
            );
        }),
        case(CLIENT, Breach::EndWithGrants(stream(1)), |p| {
            granted(p);
            p.inject(CLIENT, &[data(1, 0, true)]);
        }),
        case(CLIENT, Breach::EndWithGrants(stream(1)), |p| {
            opened(p);
            p.inject(
                CLIENT,
                &[Frame::Request { stream: 1, len: 9, begin: 0, field: None }, data(1, 0, true)],
            );
        }),
        case(SERVER, Breach::BadGrant { grant: GrantId(1), why: "no bytes" }, |p| {
            p.inject(SERVER, &[grant(0, 1, 0)])
        }),
        case(SERVER, Breach::BadGrant { grant: GrantId(1), why: "its id is in use" }, |p| {
            p.inject(SERVER, &[grant(0, 1, 9), grant(0, 1, 9)]);
        }),
        case(
            SERVER,
            Breach::BadGrant {
                grant: GrantId(1),
                why: "reaches past the end of the address space",
            },
            |p| {
                p.inject(
                    SERVER,
                    &[Frame::Grant { stream: 0, id: 1, rkey: 1, len: 2, addr: u64::MAX - 1 }],
                )
            },
        ),
        case(
            SERVER,
            Breach::BadGrant { grant: GrantId(64), why: "too many standing grants" },
            |p| {
                p.inject(SERVER, &(0..65).map(|id| grant(0, id, 9)).collect::<Vec<_>>());
            },
        ),
        case(SERVER, Breach::BadGrant { grant: GrantId(1), why: "nothing was asked for" }, |p| {
            p.open("head", false);
            p.drive(CLIENT);
            p.inject(SERVER, &[grant(1, 1, 9)]);
        }),
        case(SERVER, Breach::BadGrant { grant: GrantId(1), why: "more than was asked for" }, |p| {
            asking(p);
            p.inject(SERVER, &[grant(1, 1, 50_001)]);
        }),
        case(
            SERVER,
            Breach::BadGrant { grant: GrantId(2), why: "too short a part of what was asked for" },
            |p| {
                asking(p);
                p.inject(SERVER, &[grant(1, 1, 12_288), grant(1, 2, 12_287)]);
            },
        ),
    ]
}

fn lent(p: &mut Pair, len: u32, addr: u64) {
    let place = LentPlace { lease: 4, key: 7, addr };
    let lent = Box::new(LentBody { place, len, ..LentBody::default() });
    let frame = Frame::Lent { stream: 1, end: false, lent };
    p.inject(CLIENT, &[head(1), frame]);
}

fn leases() -> Vec<Case> {
    let bad = |why| Breach::BadLease { stream: stream(1), lease: 4, why };
    vec![
        case(CLIENT, bad("no bytes"), |p| lent(p, 0, 0)),
        case(CLIENT, bad("reaches past the end of the address space"), |p| {
            lent(p, 9, u64::MAX - 8)
        }),
        // Any LENT frame is a breach for a side that did not turn borrowing on.
        case(CLIENT, Breach::NotBorrowing(stream(1)), |p| {
            p.server().terms.own.takes_lent = false;
            lent(p, 4096, 0);
        }),
        case(CLIENT, Breach::UnknownLease(3), |p| {
            p.inject(CLIENT, &[head(1), Frame::Return { lease: 3 }]);
        }),
    ]
}

/// The match is exhaustive, so that a new variant does not compile without a case here.
fn name(breach: &Breach) -> &'static str {
    match breach {
        Breach::MessageLength { .. } => "MessageLength",
        Breach::Reserved(_) => "Reserved",
        Breach::FrameLength { .. } => "FrameLength",
        Breach::PayloadLength { .. } => "PayloadLength",
        Breach::UnknownFrame(_) => "UnknownFrame",
        Breach::UnknownFlags { .. } => "UnknownFlags",
        Breach::WrongSide(_) => "WrongSide",
        Breach::NoCredit => "NoCredit",
        Breach::LongerThanItsRecv { .. } => "LongerThanItsRecv",
        Breach::CreditOverflow { .. } => "CreditOverflow",
        Breach::UnknownStream { .. } => "UnknownStream",
        Breach::ClosedStream { .. } => "ClosedStream",
        Breach::StreamField { .. } => "StreamField",
        Breach::TooManyStreams(_) => "TooManyStreams",
        Breach::RapidReset { .. } => "RapidReset",
        Breach::OpenedAfterGoAway(_) => "OpenedAfterGoAway",
        Breach::HeaderBlock { .. } => "HeaderBlock",
        Breach::FrameOrder { .. } => "FrameOrder",
        // The driver finds this breach, because the driver decodes the blocks: see
        // `breaches_found_by_the_driver_are_reported_to_the_peer`.
        Breach::Headers(_) => "",
        Breach::Window { .. } => "Window",
        Breach::WindowUpdate(..) => "WindowUpdate",
        Breach::EmptyRequest(_) => "EmptyRequest",
        Breach::TooManyRequests(..) => "TooManyRequests",
        Breach::UnknownGrant { .. } => "UnknownGrant",
        Breach::DoneLength { .. } => "DoneLength",
        Breach::DoneStream { .. } => "DoneStream",
        Breach::EndWithGrants(_) => "EndWithGrants",
        Breach::BadGrant { .. } => "BadGrant",
        Breach::UnexpectedGoAway => "UnexpectedGoAway",
        Breach::Flood(_) => "Flood",
        // This breach needs no input: see `answer_timeout`.
        Breach::GrantKept(_) => "",
        Breach::RequestBegin { .. } => "RequestBegin",
        Breach::RequestField { .. } => "RequestField",
        Breach::DoneBegin { .. } => "DoneBegin",
        Breach::UnexpectedPong => "UnexpectedPong",
        Breach::BadLease { .. } => "BadLease",
        Breach::NotBorrowing(_) => "NotBorrowing",
        Breach::UnknownLease(_) => "UnknownLease",
    }
}

fn all() -> Vec<Case> {
    [malformed(), connection(), streams(), transfers(), leases()].into_iter().flatten().collect()
}

#[test]
fn every_breach_has_a_case() {
    let names: BTreeSet<&str> = all().iter().map(|case| name(&case.breach)).collect();
    assert_eq!(names.len(), 36);
}

#[test]
fn a_breach_closes_the_connection_and_does_nothing_else() {
    for Case { from, breach, act } in all() {
        let mut p = pair();
        let victim = 1 - from;
        act(&mut p);
        let text = breach.to_string();
        assert_eq!(p.ends[victim].error, Some(breach), "{text}");
        p.ends[victim].take_events();
        let sent = p.ends[victim].conn.stats().messages_sent;
        let used = p.ends[victim].memory.used;
        let pending = p.ends[victim].conn.pending();
        // Later messages are ignored, even valid ones.
        if p.ends[from].conn.credits.available() > 0 {
            p.inject(from, &[head(77), Frame::Ping { ack: false, token: 1 }]);
        }
        assert_eq!(p.ends[victim].conn.next_timeout(), None);
        p.to[from].clear();
        p.drive(victim);
        assert_eq!(
            (p.to[from].len(), p.ends[victim].conn.stats().messages_sent),
            (1, sent + 1),
            "{text}"
        );
        let Some(Wire::Send(message)) = p.to[from].front() else { panic!("{text}: not a SEND") };
        let mut reader = Reader::new(message.clone()).unwrap();
        let close = Frame::Close { code: 1, text: block(&text) };
        assert_eq!(
            (reader.next_frame(), reader.next_frame()),
            (Ok(Some(close)), Ok(None)),
            "{text}"
        );
        assert!(!p.drive(victim), "{text}: more than CLOSE");
        assert_eq!(
            (p.ends[victim].memory.used, p.ends[victim].conn.pending()),
            (used, pending),
            "{text}"
        );
        assert!(
            p.ends[victim].events.iter().all(|event| matches!(event, Event::GoAway { .. })),
            "{text}"
        );
        // The peer receives the name of the breach.
        assert!(p.deliver(from));
        p.ends[from].events.clear();
        p.drive(from);
        assert_eq!(p.ends[from].error, None, "{text}");
        let closed = Event::Closed { code: CloseCode::Breach, text };
        assert_eq!(p.ends[from].events, [closed]);
    }
}

/// Frames after the breach in the same message have no effect.
#[test]
fn frames_after_a_breach_are_ignored() {
    let mut p = pair();
    p.inject(CLIENT, &[head(1), Frame::Abort { id: 9 }, head(2), data(1, 10, true)]);
    p.drive(SERVER);
    assert_eq!(p.ends[SERVER].streams.keys().copied().collect::<Vec<_>>(), [1]);
    assert!(p.ends[SERVER].app(stream(1)).body.is_empty());
    assert_eq!(p.server().pending().streams, 1);
}

#[test]
fn breaches_found_by_the_driver_are_reported_to_the_peer() {
    let mut p = pair();
    opened(&mut p);
    let bad = crate::headers::Decoder::new(p.ends[SERVER].app(stream(1)).blocks[0].clone());
    let breach = bad.filter_map(Result::err).next().unwrap();
    assert!(matches!(breach, Breach::Headers(_)), "{breach}");
    p.server().close(CloseCode::Breach, &breach.to_string());
    p.settle();
    let closed = Event::Closed { code: CloseCode::Breach, text: breach.to_string() };
    assert_eq!(p.ends[CLIENT].events, [closed]);
}

/// PINGs that are answered are not a flood, however many there are.
#[test]
fn answered_pings_are_not_a_flood() {
    let mut p = pair();
    for _ in 0..100 {
        let token = |token| Frame::Ping { ack: false, token };
        p.inject(CLIENT, &(0..100).map(token).collect::<Vec<_>>());
        p.drive(SERVER);
        // The client's connection has not sent these PINGs, so it must not see the answers.
        for wire in std::mem::take(&mut p.to[CLIENT]) {
            let Wire::Send(message) = wire else { continue };
            let credits = Reader::new(message.clone()).unwrap().credits;
            let back = Returned { credits, full: false };
            p.client().credits.received(back, message.len()).unwrap();
            p.ends[SERVER].slots += 1;
        }
    }
    assert_eq!((p.count(SERVER, "PING"), p.ends[SERVER].error.clone()), (10_000, None));
}

/// Frames that may have crossed the end of a stream are not a breach.
#[test]
fn frames_for_ended_streams_are_not_a_breach() {
    let mut p = pair();
    let id = p.open("head", true);
    p.settle();
    p.answer(id, pattern(1, 10));
    p.settle();
    for frame in [
        Frame::Window { stream: 1, increment: 10 },
        Frame::Reset { stream: 1, code: ResetCode::CANCEL.0 },
        Frame::Recall { id: 99 },
        grant(1, 5, 10),
    ] {
        p.inject(SERVER, &[frame]);
        assert_eq!(p.ends[CLIENT].error, None);
    }
    // The grant is returned.
    p.drive(CLIENT);
    assert_eq!(p.count(CLIENT, "ABORT"), 1);
    assert_eq!(p.client().pending(), Pending::default());
}
