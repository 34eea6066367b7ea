//! The private data of connect, accept and reject.

use tonic_rdma_source_rules::golden::{Case, Document};

use super::golden;
use crate::hello::{Accept, Hello, PeerSettings, Reject, VERSION_MAX, VERSION_MIN};

pub(super) const PREFIXES: [&str; 3] = ["HELLO", "ACCEPT", "REJECT/"];

/// Settings that are in range, and whose bytes differ wherever the range allows.
const SETTINGS: PeerSettings = PeerSettings {
    recv_slots: 0x0201,
    max_recvs: 0x0403,
    slot_size: 0x1413,
    rest_slot_size: 0x0605,
    max_streams: 0x2423_2221,
    stream_window: 0x3433_3231,
    max_headers: 0x0f_4241,
    align: 0x0040,
};

fn check_settings(case: &Case, settings: PeerSettings) {
    let PeerSettings {
        recv_slots,
        max_recvs,
        slot_size,
        rest_slot_size,
        max_streams,
        stream_window,
        max_headers,
        align,
    } = settings;
    let values = [
        ("recv_slots", recv_slots.into()),
        ("max_recvs", max_recvs.into()),
        ("slot_size", slot_size.into()),
        ("rest_slot_size", rest_slot_size.into()),
        ("max_streams", max_streams.into()),
        ("stream_window", stream_window.into()),
        ("max_headers", max_headers.into()),
        ("align", align.into()),
        ("length", case.bytes().len() as u64),
        ("version_min", VERSION_MIN.into()),
        ("version_max", VERSION_MAX.into()),
        ("reserved", 0),
    ];
    case.assert_values(&values, &["magic", "kind", "ticket"]);
}

#[test]
fn hello_and_accept_have_their_bytes_and_their_table() {
    let (golden, document) = (golden(), Document::protocol());
    let ticket = *b"\x51\x52\x53\x54\x55\x56\x57\x58\x59\x5a\x5b\x5c\x5d\x5e\x5f\x60";
    let (hello, case) = (Hello::new(ticket, SETTINGS), golden.case("HELLO"));
    case.assert_bytes(&hello.encode());
    assert_eq!(Hello::decode(&case.bytes()), Ok(hello));
    assert_eq!(case.field("ticket").bytes, ticket);
    check_settings(case, SETTINGS);
    document.assert_table("### HELLO and ACCEPT", &case.layout());

    let (accept, case) =
        (Accept { version: VERSION_MAX, settings: SETTINGS }, golden.case("ACCEPT"));
    case.assert_bytes(&accept.encode());
    assert_eq!(Accept::decode(&case.bytes()), Ok(accept));
    check_settings(case, SETTINGS);
    document.assert_table("### HELLO and ACCEPT", &case.layout());
}

/// The name of the variant's case. A new variant does not compile before it is added here, and its
/// code needs a case below.
fn name(reject: Reject) -> Option<&'static str> {
    Some(match reject {
        Reject::Version { .. } => "REJECT/version",
        Reject::Ticket => "REJECT/ticket",
        Reject::TicketWithdrawn => "REJECT/ticket-withdrawn",
        Reject::Resources => "REJECT/resources",
        Reject::ShuttingDown => "REJECT/shutting-down",
        Reject::Connections => "REJECT/connections",
        Reject::Handshakes => "REJECT/handshakes",
        Reject::Bare => "REJECT/bare",
        Reject::MemoryFiles => "REJECT/memory-files",
        Reject::ProcessLimit { .. } => "REJECT/process-limit",
        Reject::Malformed => "REJECT/malformed",
        Reject::Other(_) => return None,
    })
}

#[test]
fn each_reject_has_its_bytes_its_code_and_its_table() {
    let (golden, document) = (golden(), Document::protocol());
    let (mut codes, mut names) = (Vec::new(), Vec::new());
    // Every code that the decoder knows has a case.
    for code in 0..=255_u8 {
        let mut bytes = golden.case("REJECT/resources").bytes();
        bytes[8] = code;
        let reject = Reject::decode(&bytes).unwrap();
        let Some(name) = name(reject) else { continue };
        let case = golden.case(name);
        let reject = match reject {
            Reject::ProcessLimit { .. } => Reject::ProcessLimit { errno: 0x2221 },
            reject => reject,
        };
        case.assert_bytes(&reject.encode());
        assert_eq!(Reject::decode(&case.bytes()), Ok(reject));
        let errno = if let Reject::ProcessLimit { errno } = reject { errno } else { 0 };
        let values = [
            ("length", case.bytes().len() as u64),
            ("version_min", VERSION_MIN.into()),
            ("version_max", VERSION_MAX.into()),
            ("code", code.into()),
            ("errno", errno.into()),
            ("reserved", 0),
        ];
        case.assert_values(&values, &["magic", "kind"]);
        document.assert_table("### REJECT", &case.layout());
        codes.push([code.to_string(), name["REJECT/".len()..].to_owned()]);
        names.push(name);
    }
    document.assert_table("#### Codes of REJECT", &codes);
    assert_eq!(golden.names("REJECT/").len(), names.len(), "a code that is not decoded");
}

#[test]
fn the_document_has_the_versions_of_the_code() {
    let row = ["control protocol".to_owned(), format!("{VERSION_MIN} to {VERSION_MAX}")];
    let table = Document::protocol().table("## Versions");
    assert!(table.iter().any(|cells| cells[..2] == row), "{row:?} is not in {table:?}");
}
