//! Message headers and frames.

use std::collections::BTreeMap;

use bytes::Bytes;
use tonic_rdma_source_rules::golden::{Case, Document};

use super::golden;
use crate::error::CloseCode;
use crate::frame::{
    Composer, FRAME_HEADER, Field, Frame, FrameKind, MESSAGE_HEADER, MIN_GRANT, Reader,
};
use crate::hello::HEADERS;
use crate::ids::ResetCode;
use crate::payload::{LentBody, LentPlace};
use crate::{Config, frame};

/// Values whose bytes all differ, so that no two fields can be taken for each other.
fn cases() -> Vec<(&'static str, Frame)> {
    let (stream, block) = (0x0403_0201, Bytes::from_static(b"block"));
    let headers = Frame::Headers {
        stream,
        end: false,
        more: false,
        indexed: false,
        lands: false,
        block: block.clone(),
    };
    let lent = LentBody {
        head: Bytes::from_static(b"he"),
        place: LentPlace { lease: 0x1413_1211, key: 0x2423_2221, addr: 0x4847_4645_4443_4241 },
        len: 0x3433_3231,
        tail: Bytes::from_static(b"tail"),
    };
    let (request_len, begin) = (0x1817_1615_1413_1211, 0x2423_2221);
    let text = Bytes::from_static(b"why");
    vec![
        ("HEADERS", headers),
        (
            "HEADERS/end-indexed",
            Frame::Headers {
                stream,
                end: true,
                more: false,
                indexed: true,
                lands: false,
                block: Bytes::from_static(&[0xc0]),
            },
        ),
        (
            "HEADERS/more-lands",
            Frame::Headers { stream, end: false, more: true, indexed: false, lands: true, block },
        ),
        ("DATA", Frame::Data { stream, end: false, data: Bytes::from_static(b"data") }),
        ("DATA/end-empty", Frame::Data { stream, end: true, data: Bytes::new() }),
        ("WINDOW", Frame::Window { stream, increment: 0x1413_1211 }),
        ("RESET", Frame::Reset { stream, code: 0x1413_1211 }),
        ("REQUEST", Frame::Request { stream, len: request_len, begin, field: None }),
        (
            "REQUEST/field",
            Frame::Request {
                stream,
                len: request_len,
                begin,
                field: Some(Field { at: 0x3433_3231, len: 0x4443_4241 }),
            },
        ),
        (
            "GRANT",
            Frame::Grant {
                stream,
                id: 0x1413_1211,
                rkey: 0x2423_2221,
                len: 0x3433_3231,
                addr: 0x4847_4645_4443_4241,
            },
        ),
        (
            "GRANT/standing",
            Frame::Grant { stream: 0, id: 1, rkey: 2, len: 3, addr: 0x7fff_0000_1000 },
        ),
        (
            "DONE",
            Frame::Done {
                stream,
                end: false,
                id: 0x1413_1211,
                len: 0x2423_2221,
                begin: 0x3433_3231,
            },
        ),
        ("DONE/end", Frame::Done { stream, end: true, id: 1, len: 2, begin: 3 }),
        ("ABORT", Frame::Abort { id: 0x1413_1211 }),
        ("RECALL", Frame::Recall { id: 0x1413_1211 }),
        ("PING", Frame::Ping { ack: false, token: 0x1817_1615_1413_1211 }),
        ("PING/ack", Frame::Ping { ack: true, token: 1 }),
        ("GOAWAY", Frame::GoAway { ack: false, code: 0x1413_1211, text: text.clone() }),
        ("GOAWAY/ack", Frame::GoAway { ack: true, code: 0, text: Bytes::new() }),
        ("CLOSE", Frame::Close { code: 0x1413_1211, text }),
        ("LENT", Frame::Lent { stream, end: false, lent: Box::new(lent.clone()) }),
        (
            "LENT/end",
            Frame::Lent {
                stream,
                end: true,
                lent: Box::new(LentBody { head: Bytes::new(), tail: Bytes::new(), ..lent }),
            },
        ),
        ("RETURN", Frame::Return { lease: 0x1413_1211 }),
        ("DECLINE", Frame::Decline { stream, own: false }),
        ("DECLINE/own", Frame::Decline { stream, own: true }),
    ]
}

pub(super) fn prefixes() -> impl Iterator<Item = &'static str> {
    FrameKind::ALL.iter().map(|kind| kind.name()).chain(["MESSAGE"])
}

fn compose(frame: &Frame) -> Vec<u8> {
    let mut slot = [0xee; 512];
    let mut message = Composer::new(&mut slot);
    assert!(message.add(frame));
    let len = message.finish(0);
    slot[..len].to_vec()
}

fn read(frame: &[u8]) -> Frame {
    let len = (MESSAGE_HEADER + frame.len()) as u32;
    let message = [&[0; 4][..], &len.to_le_bytes(), frame].concat();
    let mut reader = Reader::new(message.into()).unwrap();
    let read = reader.next_frame().unwrap().unwrap();
    assert_eq!(reader.next_frame().unwrap(), None);
    read
}

/// Compares the fields of a case with those that the frame displays: numbers by value, bytes by
/// length.
fn check_fields(case: &Case, frame: &Frame) {
    let shown = frame.to_string();
    let mut fields: BTreeMap<&str, &str> =
        shown.split(' ').filter_map(|word| word.split_once('=')).collect();
    for field in &case.fields {
        let shown = match field.name.as_str() {
            "type" => {
                assert_eq!(field.bytes, [frame.kind().code()], "{}", case.name);
                continue;
            }
            "flags" => {
                let set = field.bytes[0];
                let names = frame.kind().flags().iter().filter(|(bit, _)| set & bit != 0);
                let names: Vec<&str> = names.map(|(_, name)| *name).collect();
                let words = shown.split(' ').skip(1).filter(|word| !word.contains('='));
                assert_eq!(words.collect::<Vec<_>>(), names, "{}", case.name);
                continue;
            }
            "length" => {
                assert_eq!(field.number() as usize, case.bytes().len() - FRAME_HEADER);
                continue;
            }
            "reserved" => {
                assert!(field.bytes.iter().all(|byte| *byte == 0), "{}", case.name);
                continue;
            }
            // This field states the length of the head, which a frame displays as "head".
            "head_len" => format!("{}B", field.number()),
            "stream" if !fields.contains_key("stream") => {
                assert_eq!(field.number(), 0, "{}", case.name);
                continue;
            }
            name => fields.remove(name).unwrap_or_else(|| panic!("{}: {name}", case.name)).into(),
        };
        if field.name == "head_len" {
            assert_eq!(fields["head"], shown);
            continue;
        }
        match (field.varies, shown.strip_suffix('B'), shown.strip_prefix("0x")) {
            (true, Some(len), _) => assert_eq!(field.bytes.len().to_string(), len),
            (false, _, Some(hex)) => assert_eq!(format!("{:x}", field.number()), hex),
            (false, ..) => assert_eq!(field.number().to_string(), shown, "{}", field.name),
            (true, ..) => panic!("{}: {} is no length", case.name, field.name),
        }
    }
    assert!(fields.is_empty(), "{}: not in the golden file: {fields:?}", case.name);
}

#[test]
fn each_frame_has_its_bytes_its_line_and_its_table() {
    let (golden, document) = (golden(), Document::protocol());
    for (name, frame) in cases() {
        let (case, kind) = (golden.case(name), frame.kind());
        assert_eq!(name.split('/').next(), Some(kind.name()));
        case.assert_bytes(&compose(&frame)[MESSAGE_HEADER..]);
        assert_eq!(read(&case.bytes()), frame, "{name}");
        assert_eq!(frame.to_string(), case.note, "{name}");
        check_fields(case, &frame);
        let layout = case.layout();
        document.assert_table("### Frames", &layout[..4]);
        if layout.len() > 4 {
            let heading = format!("#### {} ({})", kind.name(), kind.code());
            document.assert_table(&heading, &layout[4..]);
        }
    }
}

/// A kind or a flag without a case would not be tested at all.
#[test]
fn every_kind_and_every_flag_has_a_case() {
    let (golden, mut set) = (golden(), BTreeMap::new());
    for (name, frame) in cases() {
        let flags = golden.case(name).field("flags").bytes[0];
        *set.entry(frame.kind().code()).or_insert(0) |= flags;
    }
    for kind in FrameKind::ALL {
        let flags = kind.flags().iter().fold(0, |all, (bit, _)| all | bit);
        assert_eq!(set.get(&kind.code()), Some(&flags), "the cases of {}", kind.name());
    }
    let listed: Vec<&str> = cases().into_iter().map(|(name, _)| name).collect();
    for prefix in prefixes().filter(|prefix| *prefix != "MESSAGE") {
        for name in golden.names(prefix) {
            assert!(listed.contains(&name), "no test looks at {name}");
        }
    }
}

#[test]
fn message_headers_have_their_bytes() {
    let golden = golden();
    for (name, waited, full) in
        [("MESSAGE", false, false), ("MESSAGE/waited", true, false), ("MESSAGE/full", false, true)]
    {
        let mut slot = [0xee; 64];
        let mut message = Composer::new(&mut slot);
        if waited {
            message.waited();
        }
        if full {
            message.full();
        }
        let (case, len) = (golden.case(name), message.finish(0x0201));
        case.assert_bytes(&slot[..len]);
        case.assert_values(&[("credits", 0x0201), ("length", len as u64)], &["flags", "reserved"]);
        let reader = Reader::new(case.bytes().into()).unwrap();
        assert_eq!((reader.credits, reader.waited, reader.full), (0x0201, waited, full));
        Document::protocol().assert_table("### Messages", &case.layout());
    }
    assert_eq!(golden.names("MESSAGE").len(), 3);
}

#[test]
fn the_document_has_the_codes_and_limits_of_the_code() {
    let document = Document::protocol();
    let mut kinds = Vec::new();
    for kind in FrameKind::ALL {
        let flags = kind.flags().iter().map(|(bit, name)| format!("{name} {bit}"));
        let streams = match (kind.allows_stream(0), kind.allows_stream(1)) {
            (true, true) => "0 or a stream",
            (true, false) => "0",
            _ => "a stream",
        };
        let flags = flags.collect::<Vec<_>>().join(", ");
        kinds.push([kind.code().to_string(), kind.name().to_owned(), streams.to_owned(), flags]);
    }
    document.assert_table("### Kinds of frames", &kinds);
    let named = |show: &dyn Fn(u32) -> String, unknown: &str| -> Vec<[String; 2]> {
        let codes = (0..64).map(|code| [code.to_string(), show(code)]);
        codes.filter(|[_, name]| !name.starts_with(unknown)).collect()
    };
    let resets = named(&|code| ResetCode(code).to_string(), "reset code");
    document.assert_table("### Reset codes", &resets);
    let closes = named(&|code| CloseCode::from_wire(code).to_string(), "close code");
    document.assert_table("### Close codes", &closes);
    let limits = [
        ("MESSAGE_HEADER", MESSAGE_HEADER as u64),
        ("FRAME_HEADER", FRAME_HEADER as u64),
        ("MAX_TEXT", frame::MAX_TEXT as u64),
        ("MIN_GRANT", MIN_GRANT.into()),
        ("MAX_HEADER_BLOCK", u64::from(Config::default().max_headers)),
        ("HEADERS.start", u64::from(*HEADERS.start())),
        ("HEADERS.end", u64::from(*HEADERS.end())),
        ("ENTRIES", crate::headers::table::ENTRIES as u64),
        ("LONGEST", crate::headers::table::LONGEST as u64),
    ];
    let limits = limits.map(|(name, value)| [name.to_owned(), value.to_string()]);
    document.assert_table("### Limits of the control protocol", &limits);
}
