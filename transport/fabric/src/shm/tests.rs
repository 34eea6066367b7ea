//! Checks that the messages of the socket, the ring and the page for wake-ups have the bytes in
//! golden/socket.txt and the layouts in docs/protocol.md.

use std::sync::Arc;

use tonic_rdma_source_rules::golden::{Document, Golden};

use crate::atomics::{AtomicU64, Ordering};
use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::Takes;
use crate::shm::ring::{MAX_RING, Put, Reader, Shape, Words, Writer};
use crate::shm::socket::wire::{LendOn, MAX_TEXT, Message, MessageKind, VERSION};
use crate::shm::socket::{MAX_FDS, MAX_MESSAGE};
use crate::shm::wakeup::event_fd::{ChannelEnd, ChannelName};
use crate::shm::wakeup::wake_page::{CAPACITY, Direction, Stage, WORDS};

fn golden() -> Golden {
    Golden::parse(include_str!("../../golden/socket.txt"))
}

/// All values in a message differ, so that no two of its fields can be mistaken for each other.
fn cases() -> Vec<(&'static str, Message)> {
    let shape = Shape { slots: 0x0102, slot_size: 0x0140 };
    let takes = Takes { lent: true, named: false };
    let private_data = b"private".to_vec();
    let (runtime, nonce) = (0x1817_1615_1413_1211, 0x2827_2625_2423_2221);
    let (key, addr, len) = (0x0403_0201, 0x1817_1615_1413_1211, 0x2827_2625_2423_2221);
    let lend = |lend_on| Message::Lend { key, addr, len, lend_on };
    let ready = |end| Message::Ready {
        nonce,
        channel: Some(ChannelName { number: 0x3837_3635_3433_3231, runtime, end }),
    };
    vec![
        ("HELLO", Message::Hello { shape, takes, private_data: private_data.clone() }),
        ("HELLO/takes-all", Message::Hello { shape, takes: Takes::ALL, private_data: vec![] }),
        (
            "ACCEPT",
            Message::Accept {
                shape,
                takes: Takes { lent: false, named: true },
                runtime,
                nonce,
                private_data: private_data.clone(),
            },
        ),
        ("REJECT", Message::Reject { private_data }),
        ("REFUSED", Message::Refused { text: "why".into() }),
        ("CHUNK", Message::Chunk { rkey: key, addr, len }),
        ("FORGET", Message::Forget { rkey: key }),
        ("WAKE", Message::Wake),
        ("READY", ready(ChannelEnd::Maker)),
        ("READY/server-made", ready(ChannelEnd::Taker)),
        ("READY/no-channel", Message::Ready { nonce, channel: None }),
        ("OTHER_USER", Message::OtherUser { uid: key }),
        ("LEND", lend(LendOn::Never)),
        ("LEND/allowed", lend(LendOn::Allowed)),
        ("LEND/done", lend(LendOn::Done)),
        ("TAKEN", Message::Taken { key }),
        ("DECLINED", Message::Declined { key }),
        ("UNLEND", Message::Unlend { key }),
        ("NAME", Message::Name { key, addr, len }),
        ("UNNAME", Message::Unname { key }),
        ("NO_ROOM", Message::NoRoom { errno: key }),
    ]
}

/// The numbers in a message, with the names of their fields.
fn values(message: &Message) -> Vec<(&'static str, u64)> {
    let shape = |shape: &Shape| {
        let Shape { slots, slot_size } = *shape;
        [("slots", slots.into()), ("slot_size", slot_size.into())]
    };
    match message {
        Message::Hello { shape: own, takes: Takes { lent, named }, private_data: _ } => {
            let takes = u64::from(*lent) + 2 * u64::from(*named);
            [&shape(own)[..], &[("takes", takes)]].concat()
        }
        Message::Accept {
            shape: own,
            takes: Takes { lent, named },
            runtime,
            nonce,
            private_data: _,
        } => {
            let takes = u64::from(*lent) + 2 * u64::from(*named);
            let numbers = [("takes", takes), ("runtime", *runtime), ("nonce", *nonce)];
            [&shape(own)[..], &numbers].concat()
        }
        Message::Reject { private_data: _ } | Message::Refused { text: _ } => vec![],
        Message::OtherUser { uid } => vec![("uid", (*uid).into())],
        Message::NoRoom { errno } => vec![("errno", (*errno).into())],
        Message::Chunk { rkey, addr, len } => {
            vec![("rkey", (*rkey).into()), ("address", *addr), ("len", *len)]
        }
        Message::Forget { rkey } => vec![("rkey", (*rkey).into())],
        Message::Wake => vec![],
        Message::Ready { nonce, channel: None } => vec![("nonce", *nonce)],
        Message::Ready { nonce, channel: Some(ChannelName { number, runtime, end }) } => vec![
            ("nonce", *nonce),
            ("number", *number),
            ("runtime", *runtime),
            (
                "end",
                match end {
                    ChannelEnd::Maker => 0,
                    ChannelEnd::Taker => 1,
                },
            ),
        ],
        Message::Lend { key, addr, len, lend_on } => {
            let lend_on = match lend_on {
                LendOn::Never => 0,
                LendOn::Allowed => 1,
                LendOn::Done => 2,
            };
            vec![("key", (*key).into()), ("address", *addr), ("len", *len), ("lend_on", lend_on)]
        }
        Message::Taken { key }
        | Message::Declined { key }
        | Message::Unlend { key }
        | Message::Unname { key } => vec![("key", (*key).into())],
        Message::Name { key, addr, len } => {
            vec![("key", (*key).into()), ("address", *addr), ("len", *len)]
        }
    }
}

#[test]
fn each_message_has_its_bytes_and_its_table() {
    let (golden, document) = (golden(), Document::protocol());
    for (name, message) in cases() {
        let (case, kind) = (golden.case(name), message.kind() as u64);
        case.assert_bytes(&message.encode());
        assert_eq!(Message::decode(&case.bytes()).as_ref(), Some(&message), "{name}");
        let values = [values(&message), vec![("kind", kind)]].concat();
        case.assert_values(&values, &["protocol", "version"]);
        let (title, variant) = name.split_once('/').unwrap_or((name, ""));
        if variant != "no-channel" {
            document.assert_table(&format!("#### {title}: {kind}"), &case.layout());
        }
    }
    let listed: Vec<MessageKind> = cases().iter().map(|(_, message)| message.kind()).collect();
    for kind in MessageKind::ALL {
        assert!(listed.contains(kind), "{kind:?} has no case");
    }
    assert_eq!(golden.names("").len(), cases().len() + 2, "a case that no test looks at");
}

#[derive(Clone)]
struct Memory(Arc<[AtomicU64]>);

impl Words for Memory {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

fn zeros(words: usize) -> Memory {
    Memory((0..words).map(|_| AtomicU64::new(0)).collect())
}

fn bytes(memory: &Memory) -> Vec<u8> {
    memory.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
}

fn memory(bytes: &[u8]) -> Memory {
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    Memory(words.map(AtomicU64::new).collect())
}

#[test]
fn a_ring_has_its_bytes_and_its_table() {
    let (golden, shape) = (golden(), Shape { slots: 2, slot_size: 64 });
    let written = zeros(shape.bytes() / 8);
    let mut writer = Writer::new(written.clone(), shape).unwrap();
    let mut reader = Reader::new(written.clone(), shape).unwrap();
    writer.chunk_sent();
    for message in [&b"first"[..], b"the second"] {
        assert_eq!(writer.put(message), Ok(Put::Done));
    }
    writer.publish();
    writer.set_woken_at(0x1817_1615_1413_1211);
    reader.runs_on(0x2221);
    while reader.next(1).unwrap().is_some() {}
    reader.free(|_| true);
    assert!(reader.wait(0x3231));
    let case = golden.case("RING_MEMORY");
    case.assert_bytes(&bytes(&written));

    let read = memory(&case.bytes());
    let writer = Writer::new(read.clone(), shape).unwrap();
    let mut reader = Reader::new(read, shape).unwrap();
    assert_eq!((writer.peer_runs_on(), reader.woken_at()), (0x2221, 0x1817_1615_1413_1211));
    assert!(reader.next(0).unwrap().is_none(), "a chunk is counted");
    for want in [&b"first"[..], b"the second"] {
        let message = reader.next(1).unwrap().unwrap();
        let mut got = vec![0; message.len as usize];
        message.copy_to(&mut got);
        assert_eq!(got, want);
    }
    let is_layout = |name: &str| !name.starts_with("unused") && !name.ends_with(['1', '2']);
    let rows: Vec<_> = case.layout().into_iter().filter(|row| is_layout(&row[2])).collect();
    Document::protocol().assert_table("### The ring", &rows);
}

#[test]
fn a_page_has_its_bytes_and_its_table() {
    let golden = golden();
    let written = zeros(WORDS);
    let direction = Direction(&written.0);
    assert!(!direction.set(5) && !direction.set(64));
    direction.raise();
    direction.set_stage(Stage::InUse);
    let (case, written) = (golden.case("WAKE_PAGE"), bytes(&written));
    let (used, rest) = written.split_at(case.bytes().len());
    case.assert_bytes(used);
    assert!(rest.iter().all(|byte| *byte == 0));

    let mut page = case.bytes();
    page.resize(8 * WORDS, 0);
    let read = memory(&page);
    let direction = Direction(&read.0);
    assert_eq!((direction.may_sleep(), direction.stage()), (true, Stage::InUse));
    assert_eq!(direction.take().collect::<Vec<_>>(), [5, 64]);
    let is_layout = |name: &str| !name.starts_with("unused") && !name.ends_with('1');
    let rows: Vec<_> = case.layout().into_iter().filter(|row| is_layout(&row[2])).collect();
    Document::protocol().assert_table("### The page for wake-ups", &rows);
}

#[test]
fn the_document_has_the_version_and_the_limits_of_the_code() {
    let document = Document::protocol();
    let row = ["shared-memory socket".to_owned(), VERSION.to_string()];
    let table = document.table("## Versions");
    assert!(table.iter().any(|cells| cells[..2] == row), "{row:?} is not in {table:?}");
    let limits = [
        ("MAX_PRIVATE_DATA", MAX_PRIVATE_DATA as u64),
        ("MAX_MESSAGE", MAX_MESSAGE as u64),
        ("MAX_FDS", MAX_FDS as u64),
        ("MAX_TEXT", MAX_TEXT as u64),
        ("MAX_RING", MAX_RING),
        ("CAPACITY", CAPACITY.into()),
    ];
    let limits = limits.map(|(name, value)| [name.to_owned(), value.to_string()]);
    document.assert_table("### Limits of the shared-memory socket", &limits);
}
