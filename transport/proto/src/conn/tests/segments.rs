//! Bodies in several segments: each is one transfer with the same bytes, and no copy joins the
//! segments.

use proptest::prelude::*;

use super::pair::*;
use crate::config::Config;
use crate::payload::Payload;

/// Cuts the bytes into segments, some of them pinned.
fn cut(bytes: &bytes::Bytes, cuts: &[(usize, bool)]) -> Payload {
    let mut payload = Payload::new();
    let mut rest = bytes.clone();
    for (len, pinned) in cuts {
        let len = (*len).min(rest.len());
        payload.push(rest.split_to(len), *pinned);
    }
    payload.push(rest, true);
    payload
}

#[test]
fn a_pinned_segment_is_written_in_place() {
    let mut p = Pair::small();
    let id = p.open("call", false);
    p.ends[CLIENT].limit(16, 4, 64 << 10, 2 << 20);
    let (head, body, tail) = (pattern(1, 20), pattern(2, 600_000), pattern(3, 30));
    let mut payload = Payload::new();
    payload.push(head.clone(), false);
    payload.push(body.clone(), true);
    payload.push(tail.clone(), false);
    p.client().send_payload(id, payload, true).unwrap();
    p.until("the grant", |p| p.ends[CLIENT].conn.pending().peer_grants > 0);
    p.hold[SERVER] = true;
    p.settle();
    let within = body.as_ptr() as usize..body.as_ptr() as usize + body.len();
    let mut pinned = 0;
    for wire in &p.to[SERVER] {
        if let Wire::Write(write) = wire {
            let lies_there = within.contains(&(write.src.as_ptr() as usize));
            assert_eq!(write.pinned, lies_there, "the pinned segment, and it alone");
            pinned += if lies_there { write.src.len() } else { 0 };
        }
    }
    assert_eq!(pinned, body.len());
    p.hold[SERVER] = false;
    p.settle();
    let app = p.ends[SERVER].app(id);
    assert_eq!(app.landed.len(), 1, "one transfer lands in one piece");
    assert_eq!(app.body, [&head[..], &body[..], &tail[..]].concat());
    // One REQUEST covers all segments.
    assert_eq!(p.count(CLIENT, "REQUEST"), 1);
}

#[test]
fn small_segments_are_gathered_into_one_data_frame() {
    let mut p = Pair::small();
    let id = p.open("call", false);
    let bytes = pattern(1, 300);
    p.client().send_payload(id, cut(&bytes, &[(7, false), (90, true), (1, false)]), true).unwrap();
    p.settle();
    assert_eq!(p.count(CLIENT, "DATA"), 1);
    assert_eq!(p.ends[SERVER].app(id).body, bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_segmentation_gives_the_same_bytes(
        len in prop_oneof![0..1200usize, 1000..400_000usize],
        cuts in prop::collection::vec((prop_oneof![0..40usize, 0..100_000usize], any::<bool>()), 0..12),
        budget in prop::sample::select(vec![16usize << 10, 64 << 10, 1 << 20]),
        staging in 1..4usize,
        chunk in prop::sample::select(vec![4096u32, 20_000, 256 << 10]),
    ) {
        let config = Config { write_chunk: chunk, ..small() };
        let mut p = Pair::new(config.clone(), config, budget);
        p.ends[CLIENT].limit(2, staging, 16 << 10, 64 << 10);
        let bytes = pattern(7, len);
        let (whole, parts) = (p.open("whole", false), p.open("parts", false));
        p.client().send_data(whole, bytes.clone(), false, true).unwrap();
        p.client().send_payload(parts, cut(&bytes, &cuts), true).unwrap();
        p.settle();
        for id in [whole, parts] {
            let app = p.ends[SERVER].app(id);
            prop_assert!(app.ended);
            prop_assert_eq!(&app.body[..], &bytes[..]);
        }
        for id in [whole, parts] {
            p.answer(id, pattern(1, 10));
        }
        p.assert_clean();
    }
}
