//! The streams of a connection, by key and by id.

use std::collections::{BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};
use std::time::Instant;

use slab::Slab;

use super::reset_limit::ResetLimit;
use super::send_half::OutputItem;
use super::stream::Stream;
use crate::config::Config;
use crate::error::Breach;
use crate::hello::PeerSettings;
use crate::ids::Ids;
use crate::ids::StreamId;

/// Maximum number of empty queues that are kept for later streams, and maximum capacity of each.
const MAX_FREE_QUEUES: usize = 16;

/// All streams. A key is an index, and valid until the stream is removed.
#[derive(Debug)]
pub(super) struct Streams {
    slab: Slab<Stream>,
    keys: Ids<usize>,
    /// Empty queues of streams that have ended, to be reused.
    free_queues: Vec<VecDeque<OutputItem>>,
    /// The windows for small messages with which a stream begins.
    send_window: u32,
    recv_window: u32,
    pub(super) resets: ResetLimit,
    /// The highest stream id opened by this side (client).
    last_opened: u32,
    /// The ids of the streams that wait until the peer allows one more stream.
    waiting: BTreeSet<u32>,
    /// How many streams the peer allows this side to have open, not counting those that wait.
    max_open: usize,
    /// The highest stream id that has been transmitted (client) or accepted (server). Streams are
    /// transmitted in the order of their ids, so the peer may know of a stream if and only if its
    /// id is not above this id.
    last_known: u32,
}

impl Index<usize> for Streams {
    type Output = Stream;

    fn index(&self, key: usize) -> &Stream {
        &self.slab[key]
    }
}

impl IndexMut<usize> for Streams {
    fn index_mut(&mut self, key: usize) -> &mut Stream {
        &mut self.slab[key]
    }
}

impl Streams {
    pub(super) fn new(config: &Config, peer: &PeerSettings, now: Instant) -> Self {
        Streams {
            slab: Slab::new(),
            keys: Ids::default(),
            free_queues: Vec::new(),
            send_window: peer.stream_window,
            recv_window: config.stream_window,
            resets: ResetLimit::new(config.max_streams, now),
            last_opened: 0,
            waiting: BTreeSet::new(),
            max_open: peer.max_streams as usize,
            last_known: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Asserts that a stream waits only if the peer allows no more streams, and that only the other
    /// streams have work and are counted. `queued` is what the output queue has counted.
    #[cfg(test)]
    pub(super) fn check(&self, queued: usize) {
        let (waiting, open): (Vec<_>, Vec<_>) = self.slab.iter().partition(|(_, s)| s.queues.waits);
        assert_eq!(open.iter().map(|(_, s)| s.send.queued).sum::<usize>(), queued);
        assert!(
            self.waiting.iter().eq(waiting
                .iter()
                .map(|(_, s)| s.id)
                .collect::<BTreeSet<_>>()
                .iter())
        );
        for (_, stream) in waiting {
            assert!(stream.id > self.last_known && !stream.queues.write);
            assert!(stream.transfers.requests.is_empty() && stream.transfers.dones.is_empty());
        }
        assert!(self.waiting.is_empty() || open.len() == self.max_open);
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.slab.iter()
    }

    /// A stream, if it has not been removed, and whether the peer may know of it.
    #[inline]
    pub(super) fn get_mut(&mut self, key: usize) -> Option<(&mut Stream, bool)> {
        let last_known = self.last_known;
        let stream = self.slab.get_mut(key)?;
        let is_known = stream.id <= last_known;
        Some((stream, is_known))
    }

    /// The key of an open stream.
    #[inline]
    pub(super) fn key(&self, id: u32) -> Option<usize> {
        self.keys.get(&id).copied()
    }

    /// An open stream, with its key.
    #[inline]
    pub(super) fn find(&mut self, id: StreamId) -> Option<(usize, &mut Stream)> {
        let key = self.key(id.0)?;
        Some((key, &mut self.slab[key]))
    }

    /// Whether any ids are left for new streams.
    pub(super) fn has_ids(&self) -> bool {
        self.last_opened < u32::MAX
    }

    /// Adds a stream that this side opens. The stream waits if the peer allows no more streams, or
    /// if others wait. `None` if all ids are used.
    #[inline]
    pub(super) fn open(&mut self) -> Option<(u32, usize)> {
        self.last_opened = self.last_opened.checked_add(1)?;
        let waits = !self.waiting.is_empty() || self.slab.len() >= self.max_open;
        let key = self.insert(self.last_opened);
        if waits {
            self.waiting.insert(self.last_opened);
            self.slab[key].queues.wait();
        }
        Some((self.last_opened, key))
    }

    /// Takes the stream that has waited longest, if the peer allows one more stream now.
    #[inline]
    pub(super) fn admit(&mut self) -> Option<usize> {
        if self.waiting.is_empty() || self.slab.len() - self.waiting.len() >= self.max_open {
            return None;
        }
        let id = self.waiting.pop_first()?;
        self.key(id)
    }

    /// Whether a stream waits until the peer allows one more stream.
    #[inline]
    pub(super) fn is_waiting(&self, id: u32) -> bool {
        !self.waiting.is_empty() && self.waiting.contains(&id)
    }

    /// The streams that wait until the peer allows one more stream.
    pub(super) fn waiting(&self) -> Vec<usize> {
        self.waiting.iter().filter_map(|id| self.key(*id)).collect()
    }

    /// Adds a stream that the peer opens.
    ///
    /// # Errors
    /// [`Breach::TooManyStreams`].
    #[inline]
    pub(super) fn accept(&mut self, id: u32, config: &Config) -> Result<usize, Breach> {
        if self.slab.len() >= config.max_streams as usize {
            return Err(Breach::TooManyStreams(config.max_streams));
        }
        self.last_known = id;
        let key = self.insert(id);
        self.slab[key].recv.undecided = config.names_requests;
        Ok(key)
    }

    #[inline]
    fn insert(&mut self, id: u32) -> usize {
        let out = self.free_queues.pop().unwrap_or_default();
        let key = self.slab.insert(Stream::new(id, out, self.send_window, self.recv_window));
        self.keys.insert(id, key);
        key
    }

    /// Removes a stream. The caller removes the stream from the queues.
    #[inline]
    pub(super) fn remove(&mut self, key: usize) -> Stream {
        let mut stream = self.slab.remove(key);
        self.keys.remove(&stream.id);
        if stream.queues.waits {
            self.waiting.remove(&stream.id);
        }
        debug_assert_eq!(self.keys.len(), self.slab.len());
        let out = &mut stream.send.out;
        if self.free_queues.len() < MAX_FREE_QUEUES && out.capacity() <= MAX_FREE_QUEUES {
            out.clear();
            self.free_queues.push(std::mem::take(out));
        }
        stream
    }

    /// Frees the memory kept for later streams.
    pub(super) fn shrink(&mut self) {
        self.free_queues = Vec::new();
        // Many streams may have been open or have waited.
        if self.slab.capacity() > MAX_FREE_QUEUES {
            self.slab.shrink_to_fit();
            self.keys.shrink_to_fit();
        }
    }

    /// Whether the peer may know of a stream with this id, open or not.
    pub(super) fn is_known(&self, id: u32) -> bool {
        id <= self.last_known
    }

    /// Records that the first frame of the stream has been handed out.
    pub(super) fn transmitted(&mut self, id: u32) {
        self.last_known = id;
    }

    /// The streams that the peer does not know of.
    pub(super) fn unknown_to_peer(&self) -> Vec<usize> {
        self.slab.iter().filter(|(_, s)| !self.is_known(s.id)).map(|(key, _)| key).collect()
    }

    /// Looks up the stream of a frame that may also refer to a stream that has ended. Returns
    /// `None` if the stream has ended.
    #[inline]
    pub(super) fn known(&self, frame: &'static str, id: u32) -> Result<Option<usize>, Breach> {
        if !self.is_known(id) {
            return Err(Breach::UnknownStream { frame, stream: StreamId(id) });
        }
        Ok(self.key(id))
    }

    /// Looks up the stream of a frame that the peer may send only while its half is open.
    #[inline]
    pub(super) fn receiving(&self, frame: &'static str, id: u32) -> Result<usize, Breach> {
        match self.known(frame, id)? {
            Some(key) if !self.slab[key].recv.state.is_done() => Ok(key),
            _ => Err(Breach::ClosedStream { frame, stream: StreamId(id) }),
        }
    }
}
