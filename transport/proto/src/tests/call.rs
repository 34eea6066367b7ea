//! The messages of unary calls.

use std::time::Instant;

use bytes::{Bytes, BytesMut};
use tonic_rdma_source_rules::golden::Document;

use super::golden;
use crate::headers::encode;
use crate::{Config, Connection, Event, Room, StreamId, Transmit};

const REQUEST: &[(&str, &str)] = &[
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "host:50051"),
    (":path", "/hello.Greeter/SayHello"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "tonic/0.14"),
];
const HEAD: &[(&str, &str)] = &[(":status", "200"), ("content-type", "application/grpc")];
const TRAILERS: &[(&str, &str)] = &[("grpc-status", "0")];
/// gRPC messages: each has a flag (not compressed), its length, and one protobuf field.
const ASKED: &[u8] = b"\0\0\0\0\x07\x0a\x05world";
const ANSWERED: &[u8] = b"\0\0\0\0\x04\x0a\x02hi";

fn block(fields: &[(&str, &str)]) -> Bytes {
    let mut block = BytesMut::new();
    fields.iter().for_each(|(name, value)| encode(&mut block, name, value.as_bytes()).unwrap());
    block.freeze()
}

fn message(conn: &mut Connection) -> Vec<u8> {
    let (mut slot, room) = (vec![0; 4096], Room { write: 0, staging: 0, chunk: 0 });
    let Some(Transmit::Send(len)) = conn.poll_transmit(Some(&mut slot), room) else {
        panic!("nothing is to be sent")
    };
    slot.truncate(len);
    slot
}

#[test]
fn two_unary_calls_have_their_bytes() {
    let (golden, config, now) = (golden(), Config::default(), Instant::now());
    let mut client = Connection::client(config.clone(), config.settings(), now);
    let mut server = Connection::server(config.clone(), config.settings(), now);
    let mut names =
        ["CALL/request", "CALL/response", "CALL/request-again", "CALL/response-again"].into_iter();
    for n in 1..=2 {
        let request = golden.case(names.next().unwrap());
        let stream = client.open(block(REQUEST), false).unwrap();
        assert_eq!(stream, StreamId(n));
        client.send_data(stream, ASKED.into(), false, true).unwrap();
        request.assert_bytes(&message(&mut client));
        server.receive(now, request.bytes().into()).unwrap();
        let opened = Event::Opened { stream, block: block(REQUEST), end: false };
        assert_eq!(server.poll_event(), Some(opened));
        let data = Event::Data { stream, data: ASKED.into(), end: true };
        assert_eq!(server.poll_event(), Some(data));

        let response = golden.case(names.next().unwrap());
        server.send_headers(stream, block(HEAD), false).unwrap();
        server.send_data(stream, ANSWERED.into(), false, false).unwrap();
        server.send_headers(stream, block(TRAILERS), true).unwrap();
        response.assert_bytes(&message(&mut server));
        client.receive(now, response.bytes().into()).unwrap();
        let events: Vec<Event> = std::iter::from_fn(|| client.poll_event())
            .filter(|event| !matches!(event, Event::Writable { .. }))
            .collect();
        assert_eq!(
            events,
            [
                Event::Headers { stream, block: block(HEAD), end: false },
                Event::Data { stream, data: ANSWERED.into(), end: false },
                Event::Headers { stream, block: block(TRAILERS), end: true },
            ]
        );
        while server.poll_event().is_some() {}
    }
    assert_eq!(golden.names("CALL/").len(), 4);
    let document = Document::protocol();
    let dump = ["request", "response"].map(|name| document.dump(&format!("### The {name}")));
    assert_eq!(dump[0], golden.case("CALL/request").bytes());
    assert_eq!(dump[1], golden.case("CALL/response").bytes());
    assert_eq!(document.dump("### The second request"), golden.case("CALL/request-again").bytes());
}
