//! The sink in which the encoder stores segments.
//!
//! tonic runs the encoder inside `poll_frame` of the body that it makes. The transport polls that
//! body, and sets a sink for the duration of the poll. Segments that this crate's encoder stores in
//! the sink belong to the frame that the poll returns. If anything else polls the body, no sink is
//! set and the encoder emits whole messages.

use std::cell::Cell;
use std::collections::VecDeque;

use bytes::{BufMut, BytesMut};
use prost::Message;
use tonic::Status;
use tonic::codec::EncodeBuf;
use tonic_rdma_memory::{Segment, SegmentBuf};

use crate::SEGMENT;
use crate::placeholder::{self, HEADER, Key};

/// Length in bytes of a frame at which tonic stops adding messages.
const BATCH: usize = 32 * 1024;
/// Maximum capacity in bytes that the buffer for small fields keeps between messages.
const SCRATCH: usize = 64 * 1024;

/// Polls a body that is sent unchanged. If this poll runs within the poll of an outer body, the
/// inner encoder does not see the outer sink.
pub(super) fn without<R>(poll: impl FnOnce() -> R) -> R {
    let _scope = ScopedState::new(EncoderState::NONE, None);
    poll()
}

thread_local! {
    static STATE: Cell<EncoderState> = const { Cell::new(EncoderState::NONE) };
    /// Messages that have been split. The value is valid if [`EncoderState::apart`] is set.
    static APART: Cell<Option<Box<Apart>>> = const { Cell::new(None) };
    static SMALL: Cell<BytesMut> = Cell::new(BytesMut::new());
}

/// Values that an encoder and the body being polled exchange. Each poll of a body sets these
/// values, so the type has no destructor, to keep a poll cheap.
#[derive(Clone, Copy, Debug)]
struct EncoderState {
    /// Whether there is a sink.
    is_set: bool,
    /// See [`Sink`].
    ours: bool,
    whole: usize,
    proven: usize,
    /// Whether messages have been split.
    apart: bool,
}

impl EncoderState {
    const NONE: EncoderState =
        EncoderState { is_set: false, ours: false, whole: 0, proven: 0, apart: false };
}

/// Sets a state, and restores the outer state on drop.
struct ScopedState<'a> {
    /// The sink that receives the encoder's results.
    own: Option<&'a mut Sink>,
    outer: EncoderState,
    outer_apart: Option<Box<Apart>>,
}

impl<'a> ScopedState<'a> {
    #[inline]
    fn new(state: EncoderState, mut own: Option<&'a mut Sink>) -> Self {
        let outer = STATE.replace(state);
        let outer_apart = if outer.apart { APART.take() } else { None };
        if state.apart {
            APART.set(own.as_mut().and_then(|own| own.apart.take()));
        }
        ScopedState { own, outer, outer_apart }
    }
}

impl Drop for ScopedState<'_> {
    #[inline]
    fn drop(&mut self) {
        let state = STATE.replace(self.outer);
        let apart = if state.apart { APART.take() } else { None };
        if self.outer.apart {
            APART.set(self.outer_apart.take());
        }
        if let Some(own) = &mut self.own {
            own.ours |= state.ours;
            if apart.is_some() {
                own.apart = apart;
            }
        }
    }
}

/// The sink of one body.
#[derive(Debug)]
pub(super) struct Sink {
    /// Messages of up to this many bytes are encoded whole, because they are copied to a control
    /// slot anyway.
    whole: usize,
    /// Longest message in bytes that tonic's limit is known to accept.
    pub(super) proven: usize,
    /// Whether this crate's encoder has run.
    pub(super) ours: bool,
    /// `None` until a message is split. The value is boxed, because most bodies do not need it, and
    /// each poll moves it to a thread-local variable and back.
    pub(super) apart: Option<Box<Apart>>,
}

/// Messages that were split.
#[derive(Debug, Default)]
pub(super) struct Apart {
    pub(super) out: VecDeque<SplitMessage>,
    /// The segments of all messages in `out`.
    pub(super) segments: VecDeque<Segment>,
    /// Bytes that were copied to become segments.
    pub(super) moved: usize,
    /// Bytes of padding.
    pub(super) filled: usize,
}

/// A message that was split.
#[derive(Debug)]
pub(super) struct SplitMessage {
    pub(super) key: Key,
    /// Length of the whole message in bytes.
    pub(super) len: usize,
    /// Length of the message's placeholder in bytes, padding included.
    pub(super) placeholder: usize,
    /// Bytes of the message that are not in segments.
    pub(super) small: usize,
    pub(super) segments: usize,
}

impl Sink {
    pub(super) fn new(whole: usize) -> Self {
        Sink { whole: whole.max(SEGMENT), proven: 0, ours: false, apart: None }
    }

    /// Runs `poll` with this sink set, and restores the outer sink afterwards.
    pub(super) fn set<R>(&mut self, poll: impl FnOnce() -> R) -> R {
        let Sink { whole, proven, ours, .. } = *self;
        let state = EncoderState { is_set: true, ours, whole, proven, apart: self.apart.is_some() };
        let _scope = ScopedState::new(state, Some(self));
        poll()
    }

    /// Discards messages whose frame was never returned.
    pub(super) fn clear(&mut self) {
        if let Some(apart) = &mut self.apart {
            apart.out.clear();
            apart.segments.clear();
        }
    }

    /// Returns two counts since the function was last called: the bytes copied to become segments,
    /// and the bytes of padding.
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
pub(super) enum Batching {
    /// tonic decides.
    Batch,
    /// Each frame gets one message until this many short messages have been encoded. Otherwise
    /// tonic, which counts only the placeholders' bytes, would batch many long messages.
    Alone(u8),
}

impl Batching {
    pub(super) const FIRST: Batching = Batching::Alone(1);
    const LONG: Batching = Batching::Alone(16);

    fn short(self) -> Batching {
        match self {
            Batching::Batch | Batching::Alone(0 | 1) => Batching::Batch,
            Batching::Alone(n) => Batching::Alone(n - 1),
        }
    }
}

/// Encodes a message, split or whole. `last` is the result for the previous message.
pub(super) fn encode<T: Message>(
    item: &T,
    dst: &mut EncodeBuf<'_>,
    last: Batching,
) -> Result<Batching, Status> {
    let mut state = STATE.get();
    if !state.is_set {
        dst.reserve(item.encoded_len());
        item.encode_raw(dst);
        return Ok(Batching::Batch);
    }
    state.ours = true;
    let len = item.encoded_len();
    if len <= state.whole {
        STATE.set(state);
        dst.reserve(len);
        item.encode_raw(dst);
        return Ok(last.short());
    }
    let EncoderState { ours, whole, proven, apart, .. } = state;
    let apart = if apart { APART.take() } else { None };
    let mut sink = Sink { whole, proven, ours, apart };
    // If the encoder panics, the state must not claim that messages were split.
    STATE.set(EncoderState { apart: false, ..state });
    let result = sink.take_apart(item, dst, last);
    state.apart = sink.apart.is_some();
    if state.apart {
        APART.set(sink.apart);
    }
    STATE.set(state);
    result
}

impl Sink {
    fn take_apart<T: Message>(
        &mut self,
        item: &T,
        dst: &mut EncodeBuf<'_>,
        last: Batching,
    ) -> Result<Batching, Status> {
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
        last: Batching,
    ) -> Result<Batching, Status> {
        let Ok(stated) = u32::try_from(len) else {
            // tonic uses the same wording.
            return Err(Status::resource_exhausted(format!(
                "Cannot return body with more than 4GB of data but got {len} bytes"
            )));
        };
        let key = Key::fresh();
        let bare = placeholder::LEN + HEADER + small.len();
        // A segment is longer than the bytes that replace it, so the placeholder is not longer than
        // the message.
        debug_assert!(bare <= len);
        let fill = match last {
            _ if len > self.proven => len,
            Batching::Batch => len.min(BATCH),
            Batching::Alone(_) => bare,
        }
        .saturating_sub(bare);
        dst.reserve(bare + fill);
        dst.put_slice(&placeholder::OUT);
        dst.put_slice(&key.0);
        dst.put_slice(&placeholder::header(stated));
        dst.put_slice(small);
        dst.put_bytes(0, fill);
        let taken =
            SplitMessage { key, len, placeholder: bare + fill, small: small.len(), segments };
        let apart = self.apart.get_or_insert_default();
        apart.filled += fill;
        apart.out.push_back(taken);
        Ok(Batching::LONG)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_set() -> bool {
        STATE.get().is_set
    }

    #[test]
    fn a_body_within_a_body_has_its_own_sink_or_none() {
        let (mut outer, mut inner) = (Sink::new(100), Sink::new(100));
        outer.set(|| {
            without(|| assert!(!is_set(), "the outer's is put away"));
            assert!(is_set(), "and comes back");
            let panics = || without(|| inner.set(|| panic!("on purpose")));
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
            assert!(is_set(), "even after a panic");
        });
        assert!(!is_set());
    }
}
