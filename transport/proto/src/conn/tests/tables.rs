//! The transition tables of a stream's halves and of a connection: every state with every event.
//!
//! Functions repeat the tables of the documentation. Each state that these functions reach is set
//! up in a real connection, which must make the same transitions.

use std::collections::BTreeSet;
use std::time::Instant;

use bytes::Bytes;

use super::super::heartbeat::QUIET;
use super::super::lifecycle::Lifecycle;
use super::super::recv_half::RecvState;
use super::super::send_half::{OutputItem, SendState};
use super::super::*;
use super::pair::{block, head, small};
use crate::error::{Breach, CloseCode};
use crate::frame::{Composer, Frame, Reader};
use crate::ids::{ResetCode, StreamId};

const ID: StreamId = StreamId(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// This side queues its END.
    QueueEnd,
    /// Output is transmitted.
    Emit,
    ResetHere,
    Reset,
    Head,
    HeadEnd,
    Data,
    DataEnd,
    Window,
}

const EVENTS: [Event; 9] = [
    Event::QueueEnd,
    Event::Emit,
    Event::ResetHere,
    Event::Reset,
    Event::Head,
    Event::HeadEnd,
    Event::Data,
    Event::DataEnd,
    Event::Window,
];

/// The states of both halves, or `None` for a stream that has been removed.
type State = Option<(SendState, RecvState)>;

/// The kind of the peer's breach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Closed,
    Order,
}

/// Combines the two tables of `stream`.
fn next(side: Side, state: State, event: Event) -> Result<State, Wrong> {
    use RecvState as R;
    use SendState as S;
    let Some((send, recv)) = state else {
        return match event {
            Event::Head | Event::HeadEnd | Event::Data | Event::DataEnd => Err(Wrong::Closed),
            _ => Ok(None),
        };
    };
    let (send, recv) = match event {
        Event::QueueEnd => (if send == S::Open { S::Ending } else { send }, recv),
        Event::Emit if send == S::Ending => match (side, recv) {
            // The response is complete, so the rest of the request is not wanted.
            (Side::Server, R::Headers | R::Body) => (S::Ended, R::Discarding),
            _ => (S::Ended, recv),
        },
        Event::Emit | Event::Window => (send, recv),
        Event::ResetHere => (
            match send {
                S::Open | S::Ending => S::Reset,
                S::Ended | S::Reset => send,
            },
            match recv {
                R::Headers | R::Body => R::Discarding,
                R::Discarding | R::Ended | R::Reset => recv,
            },
        ),
        Event::Reset => (
            match send {
                S::Open | S::Ending => S::Reset,
                S::Ended | S::Reset => send,
            },
            match recv {
                R::Headers | R::Body | R::Discarding => R::Reset,
                R::Ended | R::Reset => recv,
            },
        ),
        Event::Head => match recv {
            R::Headers => (send, R::Body),
            R::Body => return Err(Wrong::Order),
            R::Discarding => (send, recv),
            R::Ended | R::Reset => return Err(Wrong::Closed),
        },
        Event::HeadEnd => match recv {
            R::Headers | R::Body | R::Discarding => (send, R::Ended),
            R::Ended | R::Reset => return Err(Wrong::Closed),
        },
        Event::Data | Event::DataEnd => match recv {
            R::Headers => return Err(Wrong::Order),
            R::Body | R::Discarding => {
                (send, if event == Event::DataEnd { R::Ended } else { recv })
            }
            R::Ended | R::Reset => return Err(Wrong::Closed),
        },
    };
    let gone = matches!(send, S::Ended | S::Reset) && matches!(recv, R::Ended | R::Reset);
    Ok((!gone).then_some((send, recv)))
}

fn connection(side: Side) -> Connection {
    let (config, now) = (small(), Instant::now());
    match side {
        Side::Client => Connection::client(config.clone(), config.settings(), now),
        Side::Server => Connection::server(config.clone(), config.settings(), now),
    }
}

/// A message of one frame.
fn message(frame: &Frame, credits: u16) -> Bytes {
    let mut slot = [0; 512];
    let mut composer = Composer::new(&mut slot);
    assert!(composer.add(frame));
    let len = composer.finish(credits);
    Bytes::copy_from_slice(&slot[..len])
}

/// A connection with one stream in this state, which both sides know.
fn stream_in(side: Side, state: State) -> Connection {
    let mut conn = connection(side);
    conn.life.greeted = true;
    let (_, key) = conn.streams.open().unwrap();
    conn.streams.transmitted(ID.0);
    if let Some((send, recv)) = state {
        let stream = &mut conn.streams[key];
        stream.recv.state = recv;
        stream.send.state = send;
        if send == SendState::Ending {
            stream.send.out.push_back(OutputItem::Eager {
                payload: Bytes::new().into(),
                end: true,
                around: false,
            });
            conn.output.mark_send(key, &mut conn.streams[key]);
        }
    } else {
        conn.streams.remove(key);
    }
    conn
}

fn state_of(conn: &Connection) -> State {
    let stream = &conn.streams[conn.streams.key(ID.0)?];
    Some((stream.send.state, stream.recv.state))
}

fn emit(conn: &mut Connection) -> Vec<Frame> {
    let mut slot = [0; 1024];
    let mut frames = Vec::new();
    while let Some(Transmit::Send(len)) =
        conn.poll_transmit(Some(&mut slot), Room { write: 0, staging: 0, chunk: 0 })
    {
        let mut reader = Reader::new(Bytes::copy_from_slice(&slot[..len])).unwrap();
        frames.extend(std::iter::from_fn(|| reader.next_frame().unwrap()));
    }
    frames
}

fn apply(conn: &mut Connection, event: Event) -> Result<(), Breach> {
    let stream = ID.0;
    let head = |end| Frame::Headers {
        stream,
        end,
        more: false,
        indexed: false,
        lands: false,
        block: block("head"),
    };
    let data = |end| Frame::Data { stream, end, data: block("data") };
    let frame = match event {
        Event::QueueEnd => {
            let open = state_of(conn).is_some_and(|(send, _)| send == SendState::Open);
            assert_eq!(conn.finish(ID).is_ok(), open, "only an open half takes an END");
            return Ok(());
        }
        Event::Emit => {
            let before = state_of(conn);
            let frames = emit(conn);
            let ends = frames.iter().filter(|f| matches!(f, Frame::Data { end: true, .. })).count();
            let ending = before.is_some_and(|(send, _)| send == SendState::Ending);
            assert_eq!(ends, usize::from(ending), "{frames:?}");
            return Ok(());
        }
        Event::ResetHere => {
            let before = state_of(conn);
            conn.reset(ID, ResetCode::CANCEL);
            let told = emit(conn).iter().filter(|f| matches!(f, Frame::Reset { .. })).count();
            // The peer gets one RESET, unless this side's half had been reset or the peer's half
            // was already discarded.
            let news = before.is_some_and(|(send, recv)| {
                send != SendState::Reset && recv != RecvState::Discarding
            });
            assert_eq!(told, usize::from(news), "from {before:?}");
            return Ok(());
        }
        Event::Reset => Frame::Reset { stream, code: ResetCode::CANCEL.0 },
        Event::Head => head(false),
        Event::HeadEnd => head(true),
        Event::Data => data(false),
        Event::DataEnd => data(true),
        Event::Window => Frame::Window { stream, increment: 1 },
    };
    conn.receive(Instant::now(), message(&frame, 0))
}

/// All states of a stream that the tables can reach.
fn reachable(side: Side) -> Vec<State> {
    let mut known: Vec<State> = vec![Some((SendState::Open, RecvState::Headers))];
    let mut at = 0;
    while at < known.len() {
        for event in EVENTS {
            if let Ok(state) = next(side, known[at], event)
                && !known.contains(&state)
            {
                known.push(state);
            }
        }
        at += 1;
    }
    known
}

#[test]
fn every_state_of_a_stream_with_every_event() {
    for side in [Side::Client, Side::Server] {
        let states = reachable(side);
        // Open and Ending combine with Headers, Body and Ended. Ended and Reset combine with
        // Discarding. One more state is the removed stream. On a server, the end of the response
        // discards the rest of the request. On a client, Ended also combines with Headers and Body,
        // because the client waits for the response.
        assert_eq!(states.len(), if side == Side::Client { 11 } else { 9 }, "{side:?}: {states:?}");
        for state in states {
            for event in EVENTS {
                let mut conn = stream_in(side, state);
                let result = apply(&mut conn, event);
                let context = format!("{side:?}: {event:?} in {state:?}");
                match next(side, state, event) {
                    Ok(after) => {
                        assert_eq!(result, Ok(()), "{context}");
                        assert_eq!(state_of(&conn), after, "{context}");
                    }
                    Err(wrong) => {
                        let breach = result.expect_err(&context);
                        let found = match breach {
                            Breach::ClosedStream { .. } => Wrong::Closed,
                            Breach::FrameOrder { .. } => Wrong::Order,
                            other => panic!("{context}: {other}"),
                        };
                        assert_eq!(found, wrong, "{context}");
                        assert_eq!(conn.life.stage, Lifecycle::Closing, "{context}");
                        assert_eq!(state_of(&conn), state, "{context}: a breach changes nothing");
                    }
                }
            }
        }
    }
}

/// A RESET from the peer is answered if and only if this half is open.
#[test]
fn every_reset_is_answered_once() {
    for side in [Side::Client, Side::Server] {
        for state in reachable(side) {
            let mut conn = stream_in(side, state);
            apply(&mut conn, Event::Reset).unwrap();
            let answers =
                emit(&mut conn).iter().filter(|f| matches!(f, Frame::Reset { .. })).count();
            let open = state.is_some_and(|(send, _)| !send.is_done());
            assert_eq!(answers, usize::from(open), "{side:?} {state:?}");
            assert_eq!(state_of(&conn), None, "nothing is left of it");
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    GoAwayHere,
    GoAway,
    Acknowledged,
    CloseHere,
    Emitted,
    Closed,
    Dead,
}

const TURNS: [Turn; 7] = [
    Turn::GoAwayHere,
    Turn::GoAway,
    Turn::Acknowledged,
    Turn::CloseHere,
    Turn::Emitted,
    Turn::Closed,
    Turn::Dead,
];

const STAGES: [Lifecycle; 5] = [
    Lifecycle::Open,
    Lifecycle::Draining,
    Lifecycle::Drained,
    Lifecycle::Closing,
    Lifecycle::Closed,
];

/// The table of [`Lifecycle`]; `None` is a breach.
fn turn(side: Side, stage: Lifecycle, turn: Turn) -> Option<Lifecycle> {
    let live = matches!(stage, Lifecycle::Open | Lifecycle::Draining | Lifecycle::Drained);
    Some(match turn {
        Turn::GoAwayHere => match (stage, side) {
            (Lifecycle::Open, Side::Server) => Lifecycle::Draining,
            (Lifecycle::Open, Side::Client) => Lifecycle::Drained,
            _ => stage,
        },
        Turn::GoAway if live && side == Side::Server => return None,
        Turn::GoAway => stage,
        Turn::Acknowledged => match (stage, side) {
            (Lifecycle::Draining, Side::Server) => Lifecycle::Drained,
            _ if live => return None,
            _ => stage,
        },
        Turn::CloseHere if live => Lifecycle::Closing,
        Turn::Emitted if stage == Lifecycle::Closing => Lifecycle::Closed,
        Turn::Closed | Turn::Dead if live => Lifecycle::Closed,
        Turn::CloseHere | Turn::Emitted | Turn::Closed | Turn::Dead => stage,
    })
}

/// A connection that has been brought into a stage by the usual operations.
fn in_stage(side: Side, stage: Lifecycle) -> Option<Connection> {
    let mut conn = connection(side);
    conn.life.greeted = true;
    match stage {
        Lifecycle::Open => {}
        Lifecycle::Draining if side == Side::Client => return None,
        Lifecycle::Draining => conn.go_away(CloseCode::Ok, "drain"),
        Lifecycle::Drained => {
            conn.go_away(CloseCode::Ok, "drain");
            if side == Side::Server {
                conn.on_go_away(true, 0, b"").unwrap();
            }
        }
        Lifecycle::Closing => conn.close(CloseCode::Ok, "close"),
        Lifecycle::Closed => conn.on_close(0, b""),
    }
    assert_eq!(conn.life.stage, stage);
    Some(conn)
}

#[test]
fn every_stage_of_a_connection_with_every_event() {
    let mut tried = 0;
    for side in [Side::Client, Side::Server] {
        for stage in STAGES {
            for event in TURNS {
                let Some(mut conn) = in_stage(side, stage) else { continue };
                let now = Instant::now();
                let text = Bytes::new();
                let result = match event {
                    Turn::GoAwayHere => {
                        conn.go_away(CloseCode::Ok, "drain");
                        Ok(())
                    }
                    Turn::GoAway => {
                        conn.receive(now, message(&Frame::GoAway { ack: false, code: 0, text }, 0))
                    }
                    Turn::Acknowledged => {
                        conn.receive(now, message(&Frame::GoAway { ack: true, code: 0, text }, 0))
                    }
                    Turn::CloseHere => {
                        conn.close(CloseCode::Ok, "close");
                        Ok(())
                    }
                    Turn::Emitted => {
                        let closes = emit(&mut conn)
                            .iter()
                            .filter(|f| matches!(f, Frame::Close { .. }))
                            .count();
                        assert_eq!(closes, usize::from(stage == Lifecycle::Closing));
                        Ok(())
                    }
                    Turn::Closed => conn.receive(now, message(&Frame::Close { code: 0, text }, 0)),
                    Turn::Dead => {
                        // The connection probes at once, or rests and probes later, and then
                        // declares the peer dead.
                        for quiet in [1, 97, 98, 99, 100] {
                            conn.handle_timeout(now + QUIET * quiet).unwrap();
                        }
                        Ok(())
                    }
                };
                let context = format!("{side:?}: {event:?} in {stage:?}");
                match turn(side, stage, event) {
                    Some(after) => {
                        assert_eq!((result, conn.life.stage), (Ok(()), after), "{context}");
                    }
                    None => {
                        assert!(result.is_err(), "{context}");
                        assert_eq!(
                            conn.life.stage,
                            Lifecycle::Closing,
                            "{context}: a breach closes"
                        );
                    }
                }
                let live = !matches!(conn.life.stage, Lifecycle::Closing | Lifecycle::Closed);
                assert_eq!(
                    conn.next_timeout().is_some(),
                    live,
                    "{context}: timers run while it lives"
                );
                assert_eq!(
                    conn.takes_streams(),
                    conn.life.stage == Lifecycle::Open && !conn.life.peer_going_away
                );
                tried += 1;
            }
        }
    }
    assert_eq!(tried, 9 * TURNS.len());
}

/// Closed connections ignore every kind of frame.
#[test]
fn closed_connections_ignore_all_frames() {
    let frames = [
        head(1),
        Frame::Data { stream: 1, end: true, data: block("x") },
        Frame::Window { stream: 1, increment: 1 },
        Frame::Reset { stream: 1, code: 8 },
        Frame::Request { stream: 1, len: 1, begin: 0, field: None },
        Frame::Grant { stream: 0, id: 1, rkey: 1, len: 1, addr: 1 },
        Frame::Done { stream: 1, end: true, id: 1, len: 1, begin: 0 },
        Frame::Abort { id: 1 },
        Frame::Recall { id: 1 },
        Frame::Ping { ack: false, token: 1 },
        Frame::Ping { ack: true, token: 1 },
        Frame::GoAway { ack: false, code: 0, text: Bytes::new() },
        Frame::Close { code: 0, text: Bytes::new() },
    ];
    let names: BTreeSet<&str> = frames.iter().map(Frame::name).collect();
    assert_eq!(names.len(), 12, "all kinds of frames");
    for side in [Side::Client, Side::Server] {
        for stage in [Lifecycle::Closing, Lifecycle::Closed] {
            for frame in &frames {
                let mut conn = in_stage(side, stage).unwrap();
                conn.events.clear();
                assert_eq!(conn.receive(Instant::now(), message(frame, 0)), Ok(()), "{frame:?}");
                assert_eq!(conn.life.stage, stage);
                assert_eq!(conn.poll_event(), None);
                assert_eq!(conn.pending().streams, 0);
            }
        }
    }
}
