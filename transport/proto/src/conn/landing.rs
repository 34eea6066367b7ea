//! Receiving by WRITE: the streams that want landing memory, and the grants they get.

use std::collections::VecDeque;
use std::time::Instant;

use super::alignment::Modulus;
use super::answer_clock::AnswerClock;
use super::control::Control;
use super::grants::{Grants, MAX_REQUESTS, NewGrant};
use super::requests::{PeerRequest, RequestKey, Section};
use super::send_half::SendState;
use super::stream::Stream;
use super::streams::Streams;
use super::transfers::QueuedRequest;
use super::types::{Event, Flow, GrantMemory, LandingWant, Side, WantKey};
use super::unread::Unread;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::MIN_GRANT;
use crate::ids::{GrantId, StreamId};
use crate::payload::Field;

/// The memory that the peer may write to, and the streams that want more.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) grants: Grants,
    pub(super) unread: Unread,
    /// The clock for grants that the peer has to end.
    pub(super) clock: AnswerClock,
    side: Side,
    modulus: Modulus,
    bulk_window: u32,
    whole: u32,
    /// The number of requests so far.
    requests: u64,
    /// Streams that want landing memory.
    queue: VecDeque<usize>,
    /// Streams that want landing memory while too much is unread. Such a stream waits until its own
    /// reader waits for data, or until other streams have been read.
    parked: VecDeque<usize>,
    /// Streams that want memory that this side names.
    pub(super) named_queue: VecDeque<usize>,
}

impl Landing {
    pub(super) fn new(side: Side, config: &Config, now: Instant) -> Self {
        Landing {
            grants: Grants::new(config, now),
            unread: Unread::new(config),
            clock: AnswerClock::default(),
            side,
            modulus: Modulus::of(config.align),
            bulk_window: config.bulk_window,
            whole: config.whole,
            requests: 0,
            queue: VecDeque::new(),
            parked: VecDeque::new(),
            named_queue: VecDeque::new(),
        }
    }

    /// Whether [`poll`](Self::poll) or [`poll_named`](Self::poll_named) may return something.
    pub(super) fn wants_memory(&self, streams: &Streams) -> bool {
        self.streams_want(streams)
            || (self.grants.wants_standing(&self.unread) && self.grants.standing_len() > 0)
    }

    /// Whether a stream may want memory, regardless of standing grants.
    pub(super) fn streams_want(&self, streams: &Streams) -> bool {
        !self.queue.is_empty() || self.unparks(streams) || !self.named_queue.is_empty()
    }

    /// Whether any stream is parked.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Returns the next want, and the same want again until it is answered.
    pub(super) fn poll(
        &mut self,
        streams: &mut Streams,
        awaited: impl Fn(StreamId) -> bool,
    ) -> Option<LandingWant> {
        while self.unparks(streams)
            && let Some(key) = self.parked.pop_front()
        {
            streams[key].queues.parked = false;
            self.queue(key, &mut streams[key]);
        }
        while let Some(&key) = self.queue.front() {
            let stream = &mut streams[key];
            let want = self.want(stream);
            match want {
                Some(want) if self.may_land(stream, want, &awaited) => {
                    return Some(self.with_begin(stream, want));
                }
                _ => {
                    self.queue.pop_front();
                    stream.queues.landing = false;
                }
            }
            if want.is_some() && !std::mem::replace(&mut stream.queues.parked, true) {
                self.parked.push_back(key);
            }
        }
        if !self.grants.wants_standing(&self.unread) {
            return None;
        }
        let want = self.grants.standing_len();
        (want > 0).then_some(LandingWant { key: WantKey::Standing, want, min: want })
    }

    /// Returns the want of the stream at `place` in the queue: see
    /// [`Connection::landing_behind`](super::Connection::landing_behind).
    pub(super) fn behind(&self, place: usize, streams: &Streams) -> Option<Option<LandingWant>> {
        let within = |key: &usize| {
            let stream = &streams[*key];
            let want = self.want(stream)?;
            self.unread.has_room(stream, want.want).then(|| self.with_begin(stream, want))
        };
        self.queue.get(place).map(within)
    }

    /// Whether the first parked stream has room for its want now, or wants nothing any more.
    fn unparks(&self, streams: &Streams) -> bool {
        self.parked.front().is_some_and(|&key| {
            let stream = &streams[key];
            self.want(stream).is_none_or(|want| self.unread.has_room(stream, want.want))
        })
    }

    /// The address, modulo the modulus, at which the stream's next byte has to lie.
    fn begin_of(&self, stream: &Stream) -> u32 {
        stream.landing.requests.front().map_or(0, |want| want.begin(self.modulus))
    }

    /// Adds to a want the unused bytes in front of the address where the sender has to begin.
    fn with_begin(&self, stream: &Stream, want: LandingWant) -> LandingWant {
        let begin = self.begin_of(stream);
        let LandingWant { want: most, min, .. } = want;
        LandingWant { want: most.saturating_add(begin), min: min.saturating_add(begin), ..want }
    }

    /// Whether memory may be granted to the stream now. The limit of all streams must have room for
    /// the want, or the want must be for the one message that the stream's reader waits for.
    fn may_land(
        &self,
        stream: &Stream,
        want: LandingWant,
        awaited: &impl Fn(StreamId) -> bool,
    ) -> bool {
        self.unread.has_room(stream, want.want)
            || (stream.landing.held == 0 && awaited(StreamId(stream.id)))
    }

    fn want(&self, stream: &Stream) -> Option<LandingWant> {
        let landing = &stream.landing;
        let Section::Around { len: want } = landing.requests.front()?.section(stream.recv.names)
        else {
            return None;
        };
        // Grant nothing if the response is already complete, because a server does not need the
        // rest of the request body. The documentation of `grants` says why a recalled grant
        // prevents further grants.
        let answered = self.side == Side::Server && stream.send.state != SendState::Open;
        if answered || stream.recv.undecided || landing.recalled > 0 {
            return None;
        }
        let mut window = u64::from(self.bulk_window);
        if landing.held == 0 {
            window = window.max(self.whole.into());
        }
        let free = window.saturating_sub(landing.held);
        // Wait until half of the window is free, or enough for the want, so that grants do not
        // become short. Reading frees the window. Half of the window is more than MIN_GRANT.
        if free < want.min(window / 2) {
            return None;
        }
        let want = want.min(free) as u32;
        Some(LandingWant {
            key: WantKey::Stream(StreamId(stream.id)),
            want,
            min: want.min(MIN_GRANT),
        })
    }

    /// Grants memory for a want. Returns whether the memory was taken.
    pub(super) fn provide(
        &mut self,
        key: WantKey,
        memory: GrantMemory,
        streams: &mut Streams,
        control: &mut Control,
    ) -> bool {
        let given = match key {
            WantKey::Standing => {
                let given = NewGrant { len: memory.len, ..NewGrant::default() };
                (self.grants.wants_standing(&self.unread) && memory.len > 0).then_some(given)
            }
            WantKey::Stream(id) => self.grant_part(id, memory.len, streams),
        };
        let Some(given) = given else { return false };
        self.grants.give(given, memory, control);
        true
    }

    /// Determines which part of `len` bytes of memory is granted to the stream, and which request
    /// the grant answers.
    fn grant_part(&mut self, id: StreamId, len: u32, streams: &mut Streams) -> Option<NewGrant> {
        let (key, stream) = streams.find(id)?;
        let want = self.want(stream)?;
        let begin = self.begin_of(stream);
        let len = len.checked_sub(begin).filter(|len| *len >= want.min)?.min(want.want);
        let request = stream.landing.take_request(len)?;
        self.unread.add(stream, len);
        if self.queue.front() == Some(&key) {
            // Let other streams have memory before the next piece of this stream.
            self.queue.rotate_left(1);
        }
        self.queue_for_naming(key, stream);
        Some(NewGrant { stream: id.0, begin, len, request, named: false })
    }

    /// Queues the stream, if it has requests.
    #[inline]
    pub(super) fn queue(&mut self, key: usize, stream: &mut Stream) {
        if std::mem::take(&mut stream.queues.parked) {
            self.parked.retain(|parked| *parked != key);
        }
        if !stream.queues.landing && !stream.landing.requests.is_empty() {
            stream.queues.landing = true;
            self.queue.push_back(key);
        }
        self.queue_for_naming(key, stream);
    }

    /// Removes a stream from its queues, and settles its accounts.
    #[inline]
    pub(super) fn remove(&mut self, key: usize, stream: &Stream) {
        self.unread.settle(stream, self.grants.granted(stream));
        if stream.queues.landing {
            self.queue.retain(|k| *k != key);
        }
        if stream.queues.parked {
            self.parked.retain(|k| *k != key);
        }
        if stream.queues.naming {
            self.named_queue.retain(|k| *k != key);
        }
    }

    /// Records that bytes of a stream have been read.
    pub(super) fn consume(&mut self, key: usize, stream: &mut Stream, len: u32) {
        self.unread.release(stream, len);
        self.queue(key, stream);
    }

    /// Handles REQUEST.
    ///
    /// # Errors
    /// The breach, if the request is invalid, or the stream has too many requests.
    pub(super) fn on_request(
        &mut self,
        key: usize,
        QueuedRequest { len, begin, field }: QueuedRequest,
        now: Instant,
        streams: &mut Streams,
        control: &mut Control,
    ) -> Result<(), Breach> {
        let modulus = self.modulus;
        let stream = &mut streams[key];
        let id = StreamId(stream.id);
        if len == 0 {
            return Err(Breach::EmptyRequest(id));
        }
        if begin >= modulus.get() {
            return Err(Breach::RequestBegin { stream: id, begin, modulus: modulus.get() });
        }
        if let Some(end) = field.map(Field::end).filter(|end| *end > len) {
            return Err(Breach::RequestField { stream: id, len, end });
        }
        if stream.recv.state.is_discarded() {
            return Ok(());
        }
        if stream.landing.requests.len() >= MAX_REQUESTS {
            return Err(Breach::TooManyRequests(id, MAX_REQUESTS));
        }
        if stream.landing.declined {
            // Ignore a REQUEST that crossed this side's DECLINE.
            return Ok(());
        }
        // Any length is valid, because each grant has its own limit. The end is computed modulo
        // 2^64.
        let end = modulus.rest(u64::from(begin).wrapping_add(len));
        let lands_apart = field.is_some() && (stream.recv.names || stream.recv.undecided);
        self.requests += 1;
        let request = RequestKey { number: self.requests, end, len, field };
        stream.landing.requests.push_back(PeerRequest { request, rest: len });
        self.queue(key, stream);
        if lands_apart {
            self.grants.record_bulk(now);
        } else {
            self.grants.record_transfer(begin, len, now);
            self.grants.replace_short_standing(streams, control);
        }
        Ok(())
    }

    /// Handles ABORT. Returns the driver's key of the memory.
    ///
    /// # Errors
    /// [`Breach::UnknownGrant`].
    pub(super) fn on_abort(&mut self, id: u32, streams: &mut Streams) -> Result<usize, Breach> {
        let grant = self.grants.get("ABORT", id)?;
        let Some((key, stream)) = streams.find(StreamId(grant.given.stream)) else {
            self.grants.remove(id, None);
            return Ok(grant.memory);
        };
        self.grants.remove(id, Some(stream));
        if !grant.given.named {
            self.unread.release(stream, grant.given.len);
        }
        if grant.recalled && stream.recv.state.is_read() {
            stream.landing.restore(grant.given.request, grant.given.len);
        }
        self.queue(key, stream);
        Ok(grant.memory)
    }

    /// Handles DONE for `len` bytes of a grant, starting at `begin`. `end` says whether the peer's
    /// half ends with it. Returns the event for the memory.
    ///
    /// # Errors
    /// The breach, if the stream has no such grant.
    pub(super) fn on_done(
        &mut self,
        key: usize,
        stream: &mut Stream,
        id: u32,
        (begin, len): (u32, u32),
        end: bool,
        now: Instant,
    ) -> Result<Event, Breach> {
        let grant = self.grants.get("DONE", id)?;
        let given = grant.given;
        // Only in a standing grant may a transfer begin after the first byte: a grant that answers
        // a request starts at the byte where the peer has to begin.
        let limit = if given.stream == 0 { self.modulus.get() - 1 } else { 0 };
        if begin > limit {
            return Err(Breach::DoneBegin { grant: GrantId(id), begin, limit });
        }
        if len == 0 || u64::from(begin) + u64::from(len) > given.len.into() {
            return Err(Breach::DoneLength { grant: GrantId(id), begin, len, granted: given.len });
        }
        if given.stream != 0 && given.stream != stream.id {
            return Err(Breach::DoneStream { grant: GrantId(id), stream: StreamId(stream.id) });
        }
        self.grants.remove(id, Some(stream));
        if given.stream == 0 {
            self.unread.add(stream, len);
            self.grants.record_transfer(begin, len.into(), now);
        } else {
            // The unwritten part of the grant no longer counts. Named memory never counted.
            if !given.named {
                self.unread.release(stream, given.len - len);
            }
            if grant.recalled && stream.recv.state.is_read() {
                stream.landing.restore(given.request, given.len - len);
            }
            self.grants.record_bulk(now);
            self.queue(key, stream);
        }
        let memory = grant.memory;
        if stream.recv.state.is_discarded() {
            if !given.named {
                self.unread.release(stream, len);
            }
            return Ok(Event::Returned { memory });
        }
        let flow = if given.named { Flow::Named } else { Flow::Bulk };
        let (begin, stream) = (given.begin + begin, StreamId(stream.id));
        Ok(Event::Landed { stream, memory, begin, len, flow, end })
    }

    /// Counts a tick of the clock, if one is due. Fails with the breach for the first overdue
    /// grant.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        streams: &Streams,
        handed_out: u64,
    ) -> Result<(), Breach> {
        if !self.clock.is_due(now) {
            return Ok(());
        }
        let (pending, overdue) = self.grants.tick(streams, handed_out);
        self.clock.ticked(now, pending);
        overdue.map_or(Ok(()), Err)
    }

    #[cfg(test)]
    pub(super) fn wants_nothing(&self) -> bool {
        self.queue.is_empty() && self.named_queue.is_empty()
    }
}
