//! The frame decoder.

use bytes::Bytes;
use tonic_rdma_proto::frame::{Composer, Frame, Reader};

/// A message must be refused, or consist of exactly its frames: composing these again must give the
/// same bytes.
///
/// # Panics
/// The frame decoder is wrong.
pub fn frames(data: &[u8]) {
    let Ok(mut reader) = Reader::new(Bytes::copy_from_slice(data)) else { return };
    let mut frames = Vec::new();
    let whole = loop {
        match reader.next_frame() {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    let header = (reader.credits, reader.full, reader.waited);
    let again = compose(&frames, header, data.len());
    if whole {
        assert_eq!(again, data, "a message that was taken is made of its frames and nothing else");
    } else {
        assert!(again.len() < data.len());
        assert_eq!(again[8..], data[8..again.len()], "what came before the breach");
    }
    for frame in frames {
        let message = compose(std::slice::from_ref(&frame), (0, false, false), data.len());
        let mut reader = Reader::new(message.into()).expect("composed here");
        assert_eq!(reader.next_frame(), Ok(Some(frame)));
        assert_eq!(reader.next_frame(), Ok(None));
    }
}

fn compose(frames: &[Frame], (credits, full, waited): (u16, bool, bool), room: usize) -> Vec<u8> {
    let mut slot = vec![0; room];
    let mut composer = Composer::new(&mut slot);
    for frame in frames {
        assert!(composer.add(frame), "it fitted before");
    }
    if full {
        composer.full();
    }
    if waited {
        composer.waited();
    }
    let len = composer.finish(credits);
    slot.truncate(len);
    slot
}
