//! Where the encoder stores segments.
//!
//! tonic runs the encoder inside `poll_frame` of the body that it makes. The transport polls that
//! body, and sets a sink for the duration of the poll: segments that this crate's encoder stores
//! there belong to the frame that the poll returns. If anything else polls the body, no sink is set
//! and the encoder emits whole messages.

use std::cell::Cell;
use std::collections::VecDeque;

use bytes::{BufMut, BytesMut};
use prost::Message;
use tonic::Status;
use tonic::codec::EncodeBuf;
use tonic_rdma_memory::{Segment, SegmentBuf};

use crate::codec::SEGMENT;
use crate::codec::placeholder::{self, HEADER, Key};

/// Length in bytes of a frame at which tonic stops adding messages.
const BATCH: usize = 32 * 1024;
/// Maximum capacity in bytes that the buffer for small fields keeps between messages.
const SCRATCH: usize = 64 * 1024;

/// Polls a body that is sent unchanged. Hides the sink of an outer body in whose poll this poll
/// runs, so that the inner encoder does not use it.
pub(super) fn without<R>(poll: impl FnOnce() -> R) -> R {
    struct Reset(Option<Sink>);
    impl Drop for Reset {
        fn drop(&mut self) {
            SINK.set(self.0.take());
        }
    }
    let _reset = Reset(SINK.take());
    poll()
}

thread_local! {
    static SINK: Cell<Option<Sink>> = const { Cell::new(None) };
    static SMALL: Cell<BytesMut> = Cell::new(BytesMut::new());
}

/// The sink of one body.
#[derive(Debug)]
pub(super) struct Sink {
    /// Messages of up to this many bytes are encoded whole: they are copied to a control slot
    /// anyway.
    whole: usize,
    /// Longest message in bytes that tonic's limit is known to accept.
    pub(super) proven: usize,
    /// Whether this crate's encoder has run.
    pub(super) ours: bool,
    /// None until a message is split: most bodies need none, and a sink is moved at each poll.
    pub(super) apart: Option<Box<Apart>>,
}

/// Messages that were split.
#[derive(Debug, Default)]
pub(super) struct Apart {
    pub(super) out: VecDeque<Taken>,
    /// The segments of all messages in `out`.
    pub(super) segments: VecDeque<Segment>,
    /// Bytes that were copied to become segments.
    pub(super) moved: usize,
    /// Bytes of filling.
    pub(super) filled: usize,
}

/// A message that was split.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) key: Key,
    /// Length of the whole message in bytes.
    pub(super) len: usize,
    /// Length of its placeholder in bytes, filling included.
    pub(super) placeholder: usize,
    /// Bytes of the message that are not in segments.
    pub(super) small: usize,
    pub(super) segments: usize,
}

impl Sink {
    pub(super) fn new(whole: usize) -> Self {
        Sink { whole: whole.max(SEGMENT), proven: 0, ours: false, apart: None }
    }

    /// Runs `poll` with this sink set, and restores the outer one afterwards.
    pub(super) fn set<R>(&mut self, poll: impl FnOnce() -> R) -> R {
        struct Reset<'a> {
            own: &'a mut Sink,
            outer: Option<Sink>,
        }
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                if let Some(sink) = SINK.replace(self.outer.take()) {
                    *self.own = sink;
                }
            }
        }
        let own = std::mem::replace(self, Sink::new(self.whole));
        let outer = SINK.replace(Some(own));
        let _reset = Reset { own: self, outer };
        poll()
    }

    /// Discards messages whose frame was never returned.
    pub(super) fn clear(&mut self) {
        if let Some(apart) = &mut self.apart {
            apart.out.clear();
            apart.segments.clear();
        }
    }

    /// Bytes copied to become segments, and bytes of filling, since the last call.
    pub(super) fn take_copied(&mut self) -> (u64, u64) {
        self.apart.as_mut().map_or((0, 0), |apart| {
            (std::mem::take(&mut apart.moved) as u64, std::mem::take(&mut apart.filled) as u64)
        })
    }

    /// Whether no message waits for its frame.
    pub(super) fn is_empty(&self) -> bool {
        self.apart.as_ref().is_none_or(|apart| apart.out.is_empty())
    }
}

/// Whether tonic should add another message to the frame.
///
/// | | short message | long message | no sink |
/// |---|---|---|---|
/// | Alone(1), at first | Batch | Alone(16) | Batch |
/// | Alone(n) | Alone(n - 1) | Alone(16) | Batch |
/// | Batch | Batch | Alone(16) | Batch |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// tonic decides.
    Batch,
    /// One message per frame until this many short ones have been encoded. tonic counts only the
    /// placeholders' bytes, and would batch many long messages.
    Alone(u8),
}

impl Next {
    pub(super) const FIRST: Next = Next::Alone(1);
    const LONG: Next = Next::Alone(16);

    fn short(self) -> Next {
        match self {
            Next::Batch | Next::Alone(0 | 1) => Next::Batch,
            Next::Alone(n) => Next::Alone(n - 1),
        }
    }
}

/// Encodes a message, split or whole. `last` is the result for the message before.
pub(super) fn encode<T: Message>(
    item: &T,
    dst: &mut EncodeBuf<'_>,
    last: Next,
) -> Result<Next, Status> {
    let Some(mut sink) = SINK.take() else {
        dst.reserve(item.encoded_len());
        item.encode_raw(dst);
        return Ok(Next::Batch);
    };
    sink.ours = true;
    let len = item.encoded_len();
    let result = if len <= sink.whole {
        dst.reserve(len);
        item.encode_raw(dst);
        Ok(last.short())
    } else {
        sink.take_apart(item, dst, last)
    };
    SINK.set(Some(sink));
    result
}

impl Sink {
    fn take_apart<T: Message>(
        &mut self,
        item: &T,
        dst: &mut EncodeBuf<'_>,
        last: Next,
    ) -> Result<Next, Status> {
        let mut small = SMALL.take();
        small.clear();
        let apart = self.apart.get_or_insert_default();
        let all = &mut apart.segments;
        let before = all.len();
        let mut buf = SegmentBuf::new(&mut small, all, SEGMENT);
        item.encode_raw(&mut buf);
        let (len, moved) = (buf.len(), buf.copied_bytes());
        let segments = all.len() - before;
        let next = if segments == 0 {
            dst.put_slice(&small);
            Ok(last.short())
        } else {
            apart.moved += moved;
            let next = self.placeholder(&small, len, segments, dst, last);
            if let (Err(_), Some(apart)) = (&next, &mut self.apart) {
                apart.segments.truncate(before);
            }
            next
        };
        if small.capacity() <= SCRATCH {
            SMALL.set(small);
        }
        next
    }

    fn placeholder(
        &mut self,
        small: &[u8],
        len: usize,
        segments: usize,
        dst: &mut EncodeBuf<'_>,
        last: Next,
    ) -> Result<Next, Status> {
        let Ok(stated) = u32::try_from(len) else {
            // tonic's wording.
            return Err(Status::resource_exhausted(format!(
                "Cannot return body with more than 4GB of data but got {len} bytes"
            )));
        };
        let key = Key::random();
        let bare = placeholder::LEN + HEADER + small.len();
        // A segment is longer than the bytes that replace it, so this does not exceed the message.
        debug_assert!(bare <= len);
        let fill = match last {
            _ if len > self.proven => len,
            Next::Batch => len.min(BATCH),
            Next::Alone(_) => bare,
        }
        .saturating_sub(bare);
        dst.reserve(bare + fill);
        dst.put_slice(&placeholder::OUT);
        dst.put_slice(&key.0);
        dst.put_slice(&placeholder::header(stated));
        dst.put_slice(small);
        dst.put_bytes(0, fill);
        let taken = Taken { key, len, placeholder: bare + fill, small: small.len(), segments };
        let apart = self.apart.get_or_insert_default();
        apart.filled += fill;
        apart.out.push_back(taken);
        Ok(Next::LONG)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_set() -> bool {
        let sink = SINK.take();
        let is_set = sink.is_some();
        SINK.set(sink);
        is_set
    }

    #[test]
    fn a_body_within_a_body_has_its_own_sink_or_none() {
        let (mut outer, mut inner) = (Sink::new(100), Sink::new(100));
        outer.set(|| {
            without(|| assert!(!is_set(), "the outer's is put away"));
            assert!(is_set(), "and comes back");
            let panics = || without(|| inner.set(|| panic!("on purpose")));
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
            assert!(is_set(), "after a panic, too");
        });
        assert!(!is_set());
    }
}
