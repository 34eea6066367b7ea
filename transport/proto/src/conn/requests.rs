//! The peer's requests for memory on a stream, and the memory granted to them.

use std::collections::VecDeque;

use super::alignment::Modulus;
use crate::payload::Field;

/// One of the peer's requests for memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestKey {
    /// The request's number among all requests of the connection.
    pub(super) number: u64,
    /// The required address of the byte after the request's last byte, modulo the modulus. This
    /// address minus the number of bytes left is the address of the next byte.
    pub(super) end: u32,
    /// The request's length in bytes.
    pub(super) len: u64,
    /// The field of the message that lands in separate memory, if this side names memory for it.
    pub(super) field: Option<Field>,
}

/// The next byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextByte {
    /// The request's number.
    pub(super) number: u64,
    /// The number of bytes left in the request, this byte included.
    rest: u64,
}

/// A request that has not been granted completely.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerRequest {
    pub(super) request: RequestKey,
    /// Bytes that are not granted yet.
    pub(super) rest: u64,
}

impl PeerRequest {
    pub(super) fn next_byte(&self) -> NextByte {
        NextByte { number: self.request.number, rest: self.rest }
    }

    /// The required address of the request's next byte, modulo the modulus.
    pub(super) fn begin(&self, modulus: Modulus) -> u32 {
        modulus.rest(u64::from(self.request.end).wrapping_sub(self.rest))
    }

    /// The section of the message that the request's next byte belongs to. If the stream does not
    /// name memory, the message has only one section.
    pub(super) fn section(&self, names: bool) -> Section {
        let at = self.request.len - self.rest;
        match self.request.field.filter(|_| names) {
            Some(field) if at < field.at.into() => {
                Section::Around { len: u64::from(field.at) - at }
            }
            Some(field) if at < field.end() => Section::Field {
                offset: (at - u64::from(field.at)) as u32,
                len: (field.end() - at) as u32,
            },
            _ => Section::Around { len: self.rest },
        }
    }
}

/// The rest of a section of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// The bytes before or after the field, or the whole message.
    Around { len: u64 },
    /// The rest of the field, from this offset on.
    Field { offset: u32, len: u32 },
}

/// The memory that the receiving half of a stream wants and holds.
#[derive(Debug, Default)]
pub(super) struct StreamLanding {
    /// The peer's requests that are not granted completely, in order.
    pub(super) requests: VecDeque<PeerRequest>,
    /// Bytes that are granted on request, or have landed and are unread.
    pub(super) held: u64,
    /// The number of grants on request that the peer has not ended.
    pub(super) open_grants: u32,
    /// The number of `open_grants` that have been recalled.
    pub(super) recalled: u32,
    /// Whether this side grants the stream no more memory, so that the rest of the body is sent by
    /// DATA.
    pub(super) declined: bool,
    /// The first byte for which the driver has been asked to name memory.
    pub(super) naming: Option<NextByte>,
}

impl StreamLanding {
    /// Sets `declined`, and forgets the requests. Returns whether `declined` was not set before.
    pub(super) fn decline(&mut self) -> bool {
        self.requests.clear();
        !std::mem::replace(&mut self.declined, true)
    }

    /// Counts `len` bytes of the first request as granted, and returns that request.
    pub(super) fn take_request(&mut self, len: u32) -> Option<RequestKey> {
        let PeerRequest { request, rest } = self.requests.front_mut()?;
        let request = *request;
        *rest -= u64::from(len);
        if *rest == 0 {
            self.requests.pop_front();
        }
        self.open_grants += 1;
        Some(request)
    }

    /// Makes the rest of a request land as if the request had stated no field.
    pub(super) fn forget_field(&mut self, number: u64) {
        let mut requests = self.requests.iter_mut();
        if let Some(want) = requests.find(|want| want.request.number == number) {
            want.request.field = None;
        }
    }

    /// Restores `len` bytes to a request: the peer has returned them, unwritten, from a recalled
    /// grant.
    pub(super) fn restore(&mut self, request: RequestKey, len: u32) {
        if self.declined || len == 0 {
            return;
        }
        let requests = &mut self.requests;
        let at = requests.iter().position(|want| want.request.number >= request.number);
        let at = at.unwrap_or(requests.len());
        match requests.get_mut(at) {
            Some(want) if want.request.number == request.number => want.rest += u64::from(len),
            _ => requests.insert(at, PeerRequest { request, rest: len.into() }),
        }
    }
}
