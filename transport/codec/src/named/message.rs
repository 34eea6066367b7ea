//! Gathers and decodes a message whose longest `bytes` field is to lie in the caller's buffer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::{Buf, Bytes};
use prost::{DecodeError, Message};
use tonic::Status;
use tonic_rdma_memory::{Landed, Window};

use crate::land_in::{Claimed, WhyEmpty};

/// A message in the parts in which it arrived, and the buffer for its longest field.
#[derive(Debug)]
pub(crate) struct NamedMessage {
    pub(crate) parts: Vec<Landed>,
    pub(crate) claimed: Arc<Claimed>,
}

impl NamedMessage {
    /// Decodes the message. If possible, the longest `bytes` field of the message is a view of the
    /// buffer: the field either landed in the buffer, or is copied to the buffer now. A field that
    /// is longer than the buffer is an error.
    ///
    /// The position that the peer stated for the field is not trusted. So the message is decoded
    /// twice. The first pass finds the field.
    pub(crate) fn decode<U: Message + Default>(self) -> Result<U, Status> {
        let NamedMessage { mut parts, claimed } = self;
        let Some((at, len)) = longest_field::<U>(parts.clone()).map_err(malformed)? else {
            claimed.stays_empty(WhyEmpty::NoField);
            return decode(parts);
        };
        if has_landed(&parts, &claimed, at, len) {
            claimed.has_landed(len);
            return decode(parts);
        }
        if !claimed.fits(len) {
            return Err(claimed.too_long(len));
        }
        for part in &mut parts {
            // Copy parts that lie in the buffer to private memory, because the field is copied over
            // them below.
            if claimed.lease.range_of(part).is_some() {
                *part = part.to_private().into();
            }
        }
        let behind = cut(&mut parts, at + len);
        let field = cut(&mut parts, at);
        match claimed.lease.fill(&field) {
            Some(view) => {
                claimed.was_copied(len);
                parts.push(view.into());
            }
            None => {
                claimed.stays_empty(WhyEmpty::InUse);
                parts.extend(field);
            }
        }
        parts.extend(behind);
        decode(parts)
    }
}

/// Maps protobuf errors to INTERNAL, like tonic-prost.
fn malformed(error: DecodeError) -> Status {
    Status::internal(error.to_string())
}

fn decode<U: Message + Default>(parts: Vec<Landed>) -> Result<U, Status> {
    U::decode(Landed::reader_of(parts, &mut Window::new())).map_err(malformed)
}

/// Whether the `len` bytes of the message from `at` on are one part, which lies at the start of the
/// buffer.
fn has_landed(parts: &[Landed], claimed: &Claimed, at: usize, len: usize) -> bool {
    let mut before = 0;
    let part = parts.iter().find(|part| {
        let found = before == at && !part.is_empty();
        before += part.len();
        found
    });
    part.is_some_and(|part| {
        part.len() == len && claimed.lease.range_of(part).is_some_and(|range| range.start == 0)
    })
}

/// Splits off the bytes from `at` on.
fn cut(parts: &mut Vec<Landed>, at: usize) -> Vec<Landed> {
    let mut left = at;
    let whole = parts.iter().take_while(|part| {
        let fits = part.len() <= left;
        left -= if fits { part.len() } else { 0 };
        fits
    });
    let whole = whole.count();
    let mut behind = parts.split_off(whole);
    if left > 0
        && let Some(first) = behind.first_mut()
    {
        parts.push(first.split_to(left));
    }
    behind
}

/// Returns the offset and the length of the longest field of type `Bytes`. If several fields have
/// this length, returns the first of them.
fn longest_field<U: Message + Default>(
    parts: Vec<Landed>,
) -> Result<Option<(usize, usize)>, DecodeError> {
    let len: usize = parts.iter().map(Landed::len).sum();
    let mut longest = (0, 0);
    let mut window = Window::new();
    U::decode(Finder { inner: Landed::reader_of(parts, &mut window), len, longest: &mut longest })?;
    Ok((longest.1 > 0).then_some(longest))
}

/// A buffer that records which bytes prost takes as `Bytes`.
struct Finder<'a, B> {
    inner: B,
    len: usize,
    longest: &'a mut (usize, usize),
}

impl<B: Buf> Buf for Finder<'_, B> {
    fn remaining(&self) -> usize {
        self.inner.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.inner.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.inner.advance(count);
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        if len > self.longest.1 {
            *self.longest = (self.len - self.inner.remaining(), len);
        }
        self.inner.copy_to_bytes(len)
    }
}

/// A message that is being received.
#[derive(Debug)]
pub(crate) struct Gather {
    pub(crate) claimed: Arc<Claimed>,
    pub(crate) parts: Vec<Landed>,
    /// Whether a part of the message's header has been read. This part is not passed on.
    pub(crate) begun: bool,
}

/// The state that remains of a [`Gather`] once its message is complete and the decoder owns the
/// buffer.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    /// The number of bytes that the decoder has copied to the buffer.
    pub(crate) copied: Option<Arc<AtomicU64>>,
    /// Whether the rest of the body cannot land in the buffer, so that the stream may release the
    /// buffer.
    pub(crate) lets_go: bool,
}

impl Gather {
    /// Appends a part. Consecutive parts in the buffer become one part.
    pub(crate) fn push(&mut self, part: Landed) {
        let lease = &self.claimed.lease;
        let both = self.parts.last().and_then(|last| lease.range_of(last));
        if let (Some(before), Some(now)) = (both, lease.range_of(&part))
            && before.end == now.start
            && let Some(joined) = lease.view(before.start..now.end)
        {
            self.parts.pop();
            self.parts.push(joined.into());
        } else if !part.is_empty() {
            self.parts.push(part);
        }
    }
}
