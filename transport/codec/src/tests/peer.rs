//! A peer that keeps writing to landed memory. It writes after every read, so a second read of the
//! same bytes is noticed.

use tonic_rdma_memory::test_util::SharedArena;

use crate::tests::*;

/// A message with fields of every kind, at the ends of windows and after borrowed fields.
fn everything() -> Tree {
    let small = |number| Tree { number, text: "short".into(), ..Tree::default() };
    Tree {
        data: vec![1; 70_000].into(),
        number: u64::MAX,
        parts: vec![vec![2; 10].into(), vec![3; 5000].into(), Bytes::new()],
        nested: (0..2000).map(|n| small(1 << (n % 64))).collect(),
        kind: Some(Kind::Inner(Box::new(Tree { data: vec![4; 100].into(), ..small(7) }))),
        map: [(1 << 30, vec![5; 300])].into(),
        vec: vec![6; 9000],
        text: "x".repeat(30_000),
        last: Some(vec![7; 64].into()),
    }
}

/// Landing memory that holds these bytes.
fn land(wire: &[u8]) -> (SharedArena, Bytes) {
    let arena = SharedArena::new(wire.len()).unwrap();
    arena.write(0, wire);
    let bytes = arena.bytes().slice(..wire.len());
    (arena, bytes)
}

#[test]
fn prost_sees_each_byte_once_and_in_private_memory() {
    let message = everything();
    let (arena, landed) = land(&framed(std::slice::from_ref(&message)));
    let got = fuzz::decode_watched::<Tree>(vec![(landed, Came::Landed)], usize::MAX, &arena)
        .remove(0)
        .unwrap();
    assert!(got == message, "other fields than were sent");
    let Tree { data, parts, last, .. } = &got;
    for field in [data, &parts[0], &parts[1], last.as_ref().unwrap()] {
        assert!(arena.contains(field), "a field of bytes does not lie where it landed");
    }
    assert!(arena.looks() > 2000, "{} looks at a message of thousands of fields", arena.looks());
}

/// A reader other than this crate's decoder receives a body in memory that the peer cannot write
/// to.
#[test]
fn no_other_reader_is_given_memory_that_the_peer_can_write_to() {
    let long = [tree(50_000), tree(10), tree(200_000)];
    let short = vec![tree(1000); 200];
    for (messages, used, grpc) in [
        (&long[..], Used::Plain, true),
        (&long, Used::Unknown, true),
        // A body that is compressed, or is not gRPC.
        (&long, Used::Ours, false),
        (&short, Used::Ours, true),
    ] {
        let wire = framed(messages);
        let (arena, landed) = land(&wire);
        let mut deframer = Deframer::new(call().method().clone(), grpc);
        deframer.push(Part::Landed(landed.into()), used);
        let mut got = Vec::new();
        while let Some(bytes) = deframer.pop() {
            assert!(!arena.contains(&bytes), "{used:?}: lent to a reader that does not know");
            got.extend_from_slice(&bytes);
            // The peer can no longer change bytes that have been passed on.
            arena.write(0, &vec![0xff; got.len()]);
        }
        assert!(got == wire, "{used:?}, gRPC {grpc}: other bytes than were sent");
    }
    // If a message landed in two parts, both parts are copied as well.
    let wire = framed(&[tree(100_000)]);
    let (arena, landed) = land(&wire);
    let mut deframer = Deframer::new(call().method().clone(), true);
    let mut got = Vec::new();
    for part in [landed.slice(..60_000), landed.slice(60_000..)] {
        deframer.push(Part::Landed(part.into()), Used::Ours);
        while let Some(bytes) = deframer.pop() {
            assert!(!arena.contains(&bytes));
            got.extend_from_slice(&bytes);
            arena.write(0, &vec![0xff; got.len()]);
        }
    }
    assert!(got == wire);
}

/// A reader that copies everything before it parses anything gets the memory itself: the bytes that
/// arrived in control messages, that landed, and that are lent, in their order.
#[test]
fn a_reader_that_only_copies_is_given_the_memory_itself() {
    let wire = framed(&[tree(200_000), tree(10)]);
    let (arena, landed) = land(&wire);
    let eager = Bytes::copy_from_slice(&wire[..7]);
    let lent = LentPiece {
        head: Bytes::copy_from_slice(&wire[100_000..100_005]),
        lent: landed.slice(100_005..200_020).into(),
        tail: Bytes::copy_from_slice(&wire[200_020..]),
    };
    let parts = [
        Part::Eager(eager),
        Part::Landed(landed.slice(7..100_000).into()),
        Part::Lent(Box::new(lent)),
    ];
    let mut deframer = Deframer::in_place(call().method().clone());
    let (mut got, mut in_place) = (Vec::new(), 0);
    for part in parts {
        // The codec makes no difference here.
        deframer.push(part, Used::Ours);
        while let Some(bytes) = deframer.pop() {
            in_place += if arena.contains(&bytes) { bytes.len() } else { 0 };
            got.extend_from_slice(&bytes);
        }
    }
    assert!(got == wire);
    assert_eq!(in_place, 200_020 - 7 - 5, "the rest was copied before");
    assert_eq!(deframer.take_delivered(), Delivered::default());
}

/// A body whose sender corrupts each header as soon as part of the body has been passed on.
struct Spoilt {
    received: Received,
    arena: SharedArena,
    headers: Vec<usize>,
}

impl http_body::Body for Spoilt {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let frame = std::pin::Pin::new(&mut this.received).poll_frame(cx);
        for at in &this.headers {
            // The header then states a larger length, with which the message would end within the
            // next message.
            this.arena.write(at + 3, &[0xff, 0xff]);
        }
        frame
    }
}

#[tokio::test]
async fn tonic_finds_messages_where_they_were_found_before() {
    let messages = [tree(10), tree(50_000), tree(3000), tree(3001), tree(70_000), tree(0)];
    let mut wire = Vec::new();
    let mut headers = Vec::new();
    for message in &messages {
        headers.push(wire.len());
        wire.extend(framed(std::slice::from_ref(message)));
    }
    let (arena, landed) = land(&wire);
    // The first two headers are read before anything is passed on. Later headers are also read
    // once, but afterwards.
    headers.truncate(2);
    let received = Received {
        deframer: Deframer::new(call().method().clone(), true),
        pieces: [(landed, Came::Landed)].into(),
        ended: false,
    };
    let body = Spoilt { received, arena, headers };
    let decoder = ProstCodec::<Tree, Tree>::new().decoder();
    let mut stream = Streaming::new_response(decoder, body, StatusCode::OK, None, None);
    for message in messages {
        assert!(stream.message().await.unwrap() == Some(message));
    }
    assert_eq!(stream.message().await.unwrap(), None);
}
