//! Accounts for the bytes that are granted or unread in all streams together (R13).

use super::recv_half::RecvState;
use super::stream::Stream;
use crate::config::Config;
use crate::ids::Ids;
use crate::ids::StreamId;

/// How much of their common limit, [`unread_total`](Config::unread_total), the streams use.
#[derive(Debug)]
pub(super) struct Unread {
    total: u64,
    /// The window for small messages with which a stream begins, and its maximum.
    first_window: u32,
    max_window: u32,
    /// Bytes of all streams that are granted or unread, including the bytes in `ended`.
    held: u64,
    /// Bytes by which all windows together exceed the windows with which streams begin.
    pub(super) windows: u64,
    /// The unread bytes of streams that have ended.
    ended: Ids<u64>,
}

impl Unread {
    pub(super) fn new(config: &Config) -> Self {
        Unread {
            total: config.unread_total,
            first_window: config.stream_window,
            max_window: config.max_stream_window,
            held: 0,
            windows: 0,
            ended: Ids::default(),
        }
    }

    /// The unused part of the limit.
    pub(super) fn room(&self) -> u64 {
        self.total.saturating_sub(self.held + self.windows)
    }

    /// Whether there is room for `want` bytes of a stream. Messages are not split to fit. Any
    /// message may exceed the limit if nothing else is unread. A short message may exceed the limit
    /// if its stream has nothing else granted or unread.
    pub(super) fn has_room(&self, stream: &Stream, want: u32) -> bool {
        let floor = stream.landing.held == 0 && want <= self.first_window;
        floor || self.held == 0 || u64::from(want) <= self.room()
    }

    /// Adds `len` to the number of the stream's bytes that are granted or unread.
    pub(super) fn add(&mut self, stream: &mut Stream, len: u32) {
        stream.landing.held += u64::from(len);
        self.held += u64::from(len);
    }

    /// Removes bytes of the stream that have been read, or returned unwritten.
    pub(super) fn release(&mut self, stream: &mut Stream, len: u32) {
        let len = stream.landing.held.min(len.into());
        stream.landing.held -= len;
        self.held -= len;
    }

    /// Records that bytes of small messages have been read. The stream's window grows as far as the
    /// limit of all streams has room. Returns the window bytes to give back to the peer, if they
    /// are due.
    pub(super) fn read_small(&mut self, stream: &mut Stream, len: u32) -> Option<u32> {
        let recv = &mut stream.recv;
        if recv.state != RecvState::Body {
            return None;
        }
        recv.unreported = recv.unreported.saturating_add(len).min(recv.limit - recv.window);
        if recv.unreported < recv.limit / 2 {
            return None;
        }
        let room = u32::try_from(self.room()).unwrap_or(u32::MAX);
        let growth = (self.max_window - recv.limit).min(recv.limit).min(room);
        let increment = std::mem::take(&mut recv.unreported) + growth;
        recv.limit += growth;
        recv.window += increment;
        self.windows += u64::from(growth);
        Some(increment)
    }

    /// Settles the account of a stream that is removed. `granted` is the number of granted bytes
    /// that have not landed. The stream's unread bytes continue to count, unless the application
    /// has released the stream.
    #[inline]
    pub(super) fn settle(&mut self, stream: &Stream, granted: u64) {
        let held = stream.landing.held;
        let unread = if stream.recv.released { 0 } else { held.saturating_sub(granted) };
        self.held -= held - unread;
        self.windows -= u64::from(stream.recv.limit - self.first_window);
        if unread > 0 {
            self.ended.insert(stream.id, unread);
        }
    }

    /// Records that bytes of a stream that has ended have been read.
    pub(super) fn read_of_ended(&mut self, id: StreamId, len: u32) {
        let Some(unread) = self.ended.get_mut(&id.0) else { return };
        let len = u64::from(len).min(*unread);
        *unread -= len;
        let all = *unread == 0;
        self.held -= len;
        if all {
            self.ended.remove(&id.0);
        }
    }

    /// Stops counting a stream that has ended, because the application will not read the rest.
    pub(super) fn release_ended(&mut self, id: StreamId) {
        self.held -= self.ended.remove(&id.0).unwrap_or(0);
    }

    /// The bytes that all streams hold. Asserts that this is the sum of its parts.
    #[cfg(test)]
    pub(super) fn held(&self, streams: &super::streams::Streams) -> u64 {
        let sum: u64 = streams.iter().map(|(_, stream)| stream.landing.held).sum();
        assert_eq!(self.held, sum + self.ended.values().sum::<u64>());
        let grown = |stream: &Stream| u64::from(stream.recv.limit - self.first_window);
        assert_eq!(self.windows, streams.iter().map(|(_, s)| grown(s)).sum::<u64>());
        self.held
    }
}
