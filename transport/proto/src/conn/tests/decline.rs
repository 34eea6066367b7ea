//! Streams whose messages come by DATA, because the receiver has no landing memory, or the sender
//! cannot write to the receiver's memory.

use super::pair::*;
use crate::frame::Frame;
use crate::ids::StreamId;

/// Bytes of a message that is longer than the window of a stream, so that DATA waits for the
/// window.
const LONG: usize = 3_000_000;

/// Sends a request to a server that grants memory until it has received `after` bytes, and then
/// declines. Returns the pair and the number of bytes that came by WRITE.
fn declined_after(after: usize, budget: usize) -> (Pair, u64) {
    let mut p = Pair::new(small(), small(), budget);
    let id = p.open("head", false);
    let (one, two) = (pattern(1, LONG), pattern(2, LONG));
    p.client().send_data(id, one.clone(), false, false).unwrap();
    p.client().send_data(id, two.clone(), true, true).unwrap();
    let received = |p: &Pair| p.ends[SERVER].streams.get(&1).map_or(0, |app| app.body.len());
    p.until("so much has been received", |p| {
        received(p) >= after && p.ends[SERVER].streams.contains_key(&1)
    });
    p.server().decline_landing(id);
    p.server().decline_landing(id);
    p.settle();
    let app = p.ends[SERVER].app(id);
    assert!(app.ended && app.reset.is_none());
    assert!(
        app.body[..LONG] == one[..] && app.body[LONG..] == two[..],
        "in order, and nothing twice"
    );
    assert_eq!(p.count(SERVER, "DECLINE"), 1, "once");
    let written = p.client().stats().write_sent;
    assert_eq!(p.client().stats().eager_sent + written, 2 * LONG as u64);
    (p, written)
}

#[test]
fn the_rest_of_a_body_comes_by_data() {
    for budget in [64 << 10, 1 << 30] {
        for after in [0, 100_000, LONG - 1, LONG + 1] {
            let (mut p, written) = declined_after(after, budget);
            // With ample memory, the whole body may have been granted before.
            assert!(budget > LONG || written < 2 * LONG as u64, "some came by DATA: {after}");
            // Other streams still land, and so does the response.
            let other = p.open("other", false);
            p.send(CLIENT, other, pattern(3, 100_000));
            p.settle();
            assert!(p.client().stats().write_sent >= written + 100_000);
            p.answer(StreamId(1), pattern(4, 100_000));
            p.answer(other, pattern(5, 10));
            p.assert_clean();
            assert_eq!(p.ends[CLIENT].app(StreamId(1)).body, pattern(4, 100_000));
        }
    }
}

/// Recalled grants still end, and their bytes come by DATA.
#[test]
fn a_stream_whose_grants_are_recalled_is_declined() {
    for at in 0..40 {
        let mut p = Pair::small();
        let id = p.open("head", false);
        let body = pattern(1, LONG);
        p.client().send_data(id, body.clone(), true, true).unwrap();
        for _ in 0..at {
            p.step();
        }
        if p.ends[SERVER].streams.contains_key(&1) {
            p.server().recall_grants(|_| true);
            p.server().decline_landing(id);
        }
        p.settle();
        assert!(p.ends[SERVER].app(id).body == body, "{at}");
        p.answer(id, pattern(2, 10));
        p.assert_clean();
    }
}

/// A client cannot write to the memory that the server grants, on request or in advance.
#[test]
fn what_cannot_be_written_goes_by_data() {
    for standing in [false, true] {
        let mut p = Pair::small();
        if standing {
            // From here on, the server gives standing grants.
            for _ in 0..4 {
                let id = p.open("head", false);
                p.send(CLIENT, id, pattern(1, 100_000));
                p.settle();
                p.answer(id, pattern(1, 10));
            }
        }
        let written = p.client().stats().write_sent;
        (0..1000).for_each(|rkey| p.client().cannot_write(rkey));
        let id = p.open("head", false);
        let body = pattern(2, LONG);
        p.send(CLIENT, id, body.clone());
        p.settle();
        assert!(p.ends[SERVER].app(id).body.starts_with(&body));
        assert_eq!(p.client().stats().write_sent, written, "nothing is written");
        assert_eq!(p.count(CLIENT, "DECLINE"), 1);
        p.answer(id, pattern(3, 10));
        (0..1000).for_each(|rkey| p.client().forget_unwritable(rkey));
        let id = p.open("head", false);
        p.send(CLIENT, id, pattern(4, 3_000_000));
        p.settle();
        assert!(p.client().stats().write_sent > written);
        p.answer(id, pattern(4, 10));
        p.assert_clean();
    }
}

/// Requests that arrive after this side's DECLINE cost nothing and are no breach, because they may
/// have crossed it.
#[test]
fn requests_that_cross_it_are_forgotten() {
    let mut p = Pair::small();
    p.inject(CLIENT, &[head(1)]);
    p.drive(SERVER);
    p.server().decline_landing(StreamId(1));
    for _ in 0..100 {
        let request = Frame::Request { stream: 1, len: u64::MAX, begin: 0, field: None };
        p.inject(CLIENT, &[request, Frame::Decline { stream: 1, own: true }]);
        p.drive(SERVER);
        while p.deliver(CLIENT) {}
    }
    assert!(p.ends[SERVER].error.is_none());
    assert!(p.server().poll_landing(|_| true).is_none());
}
