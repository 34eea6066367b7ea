//! Compares SECURITY.md with the code on tickets, Offers and log lines.

use tonic_rdma_memory::LogThrottle;
use tonic_rdma_source_rules::files;

use crate::bootstrap::connection::{HANDSHAKES_AT_ONCE, OFFERS_AT_ONCE};
use crate::bootstrap::gateways::{MISMATCHES, WINDOW};
use crate::bootstrap::limited::MAX_REQUEST;
use crate::bootstrap::service::{MAX_ANSWER, MAX_FABRICS};
use crate::bootstrap::tickets::{BARE_LIMIT, CAPACITY, LIFETIME};
use crate::path::reason::{MAX_DETAIL_TEXT, MAX_LOG_TEXT};
use crate::server::fast_path::ACCEPT_LIMIT;
use crate::server::fast_path::admission::{MAX_HANDSHAKES, TURN_LIMIT, WAITING_FOR_EACH};

/// Formats a number with a comma before each three digits.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let group = |(at, digit)| match (digits.len() - at) % 3 {
        0 if at > 0 => format!(",{digit}"),
        _ => format!("{digit}"),
    };
    digits.chars().enumerate().map(group).collect()
}

#[test]
fn the_table_of_limits_has_the_constants() {
    let text = std::fs::read_to_string(files::root().join("SECURITY.md")).unwrap();
    let default = |what: &str| {
        let mut rows = text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_prefix(what));
        let row = rows.next().unwrap_or_else(|| panic!("no row: {what}"));
        assert_eq!(rows.next(), None, "{what}");
        row.strip_prefix(" | ").unwrap().split(" | ").next().unwrap().to_owned()
    };
    let kib = |bytes: usize| format!("{} KiB", bytes / 1024);
    assert_eq!((MAX_REQUEST % 1024, MAX_ANSWER % 1024), (0, 0));
    for (what, limit) in [
        (
            "tickets outstanding",
            format!("{}, each for {} s", grouped(CAPACITY), LIFETIME.as_secs()),
        ),
        (
            "handshakes in progress",
            format!("{MAX_HANDSHAKES}, each for {} s at most", ACCEPT_LIMIT.as_secs()),
        ),
        (
            "handshakes that wait; all those of one TCP connection",
            format!("{WAITING_FOR_EACH} for each that may be in progress; {HANDSHAKES_AT_ONCE}"),
        ),
        (
            "Offers of a TCP connection at a time, each until its answer has left",
            OFFERS_AT_ONCE.to_string(),
        ),
        (
            "length of an Offer's request; fabrics that the request names",
            format!("{}; {MAX_FABRICS}, each counted once", kib(MAX_REQUEST)),
        ),
        ("length of an answer to an Offer", kib(MAX_ANSWER)),
        (
            "log lines above DEBUG, of each kind",
            format!(
                "{} at once, then one in {} s",
                LogThrottle::BURST,
                LogThrottle::PERIOD.as_secs()
            ),
        ),
        (
            "text of a peer's in a log line; in the details of a reason",
            format!("{MAX_LOG_TEXT} characters; {MAX_DETAIL_TEXT}, each escaped"),
        ),
    ] {
        assert_eq!(default(what), limit, "{what}");
    }
    let handshakes = text.lines().find(|line| line.starts_with("| handshakes in progress |"));
    let turn = format!("| they wait for their turn, {} s at most |", TURN_LIMIT.as_secs());
    assert!(handshakes.is_some_and(|row| row.ends_with(&turn)), "{handshakes:?}");
    let minutes = [("ten", 10)].iter().find(|(_, n)| n * 60 == WINDOW.as_secs()).unwrap().0;
    assert_eq!(
        default("Offers that state another address than the server sees"),
        format!("{MISMATCHES} from one network in {minutes} minutes")
    );
}

#[test]
fn the_protocol_has_the_age_of_bare_connections() {
    let text = std::fs::read_to_string(files::root().join("docs/protocol.md")).unwrap();
    let (_, section) = text.split_once("\n## Bare connections\n").unwrap();
    let limit = format!("after {} s", BARE_LIMIT.as_secs());
    assert!(section.contains(&limit), "{limit}");
}
