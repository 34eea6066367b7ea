//! Receiving by WRITE: requests for landing memory, grants to the peer, standing grants.

use std::time::Instant;

use super::alignment::Modulus;
use super::answer_clock::PendingAnswer;
use super::connection::Connection;
use super::grants::{Grant, MAX_REQUESTS};
use super::stream::{PeerRequest, RecvState, RequestKey, Section, SendState, Stream};
use super::types::{Event, Flow, GrantMemory, LandingWant, Side, WantKey};
use crate::error::Breach;
use crate::frame::{Field, Frame, MIN_GRANT};
use crate::ids::{GrantId, StreamId};

/// A grant to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewGrant {
    pub(super) stream: u32,
    pub(super) begin: u32,
    pub(super) len: u32,
    pub(super) request: RequestKey,
    pub(super) named: bool,
}

impl Connection {
    /// Returns the landing memory that is wanted now. The driver answers with
    /// [`Connection::provide_landing`]; if it has no memory, it calls this again when some comes
    /// free. The same want is returned until it is answered.
    ///
    /// `awaited` tells whether a reader waits for the stream. A stream is left out until one does
    /// ([`reader_waits`](Self::reader_waits)), or others have been read, if what it wants exceeds
    /// what all streams leave of [`unread_total`](crate::Config::unread_total).
    pub fn poll_landing(&mut self, awaited: impl Fn(StreamId) -> bool) -> Option<LandingWant> {
        if !self.is_live() {
            return None;
        }
        while self.unparks()
            && let Some(key) = self.parked.pop_front()
        {
            self.streams[key].queues.parked = false;
            self.queue_for_landing(key);
        }
        while let Some(&key) = self.landing_queue.front() {
            let want = self.stream_want(key);
            match want {
                Some(want) if self.may_land(key, want, &awaited) => {
                    return Some(self.with_begin(key, want));
                }
                _ => {
                    self.landing_queue.pop_front();
                    self.streams[key].queues.landing = false;
                }
            }
            if want.is_some() && !std::mem::replace(&mut self.streams[key].queues.parked, true) {
                self.parked.push_back(key);
            }
        }
        if !self.grants.wants_standing() {
            return None;
        }
        let want = self.grants.standing_len();
        (want > 0).then_some(LandingWant { key: WantKey::Standing, want, min: want })
    }

    /// Returns what the stream at `place` in the queue for landing memory wants, counting from 0.
    /// For when there is no memory for the first, because the want of another stream may be
    /// shorter. The outer `None` means that there is no such stream, the inner one that it no
    /// longer wants memory.
    pub fn landing_behind(&self, place: usize) -> Option<Option<LandingWant>> {
        let within = |key: &usize| {
            let want = self.stream_want(*key)?;
            self.is_within_total(*key, want).then(|| self.with_begin(*key, want))
        };
        self.landing_queue.get(place).map(within)
    }

    /// Whether streams want memory that nobody reads, and get none: then
    /// [`reader_waits`](Self::reader_waits) is to be called when a reader begins to wait.
    #[inline]
    pub fn waits_for_readers(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether the first of the streams that were left out may have memory by now.
    pub(super) fn unparks(&self) -> bool {
        self.parked.front().is_some_and(|&key| {
            self.stream_want(key).is_none_or(|want| self.is_within_total(key, want))
        })
    }

    /// A reader begins to wait for the stream.
    pub fn reader_waits(&mut self, id: StreamId) {
        let Some(key) = self.streams.key(id.0) else { return };
        if self.streams[key].queues.parked {
            self.queue_for_landing(key);
        }
    }

    fn modulus(&self) -> Modulus {
        Modulus::of(self.config.align)
    }

    /// Where, modulo the modulus, the first byte has to lie for which the stream wants memory.
    fn begin_of(&self, key: usize) -> u32 {
        self.streams[key].landing.requests.front().map_or(0, |want| want.begin(self.modulus()))
    }

    /// Adds to a want the bytes in front of the place where the sender has to begin.
    fn with_begin(&self, key: usize, want: LandingWant) -> LandingWant {
        let begin = self.begin_of(key);
        let LandingWant { want: most, min, .. } = want;
        LandingWant { want: most.saturating_add(begin), min: min.saturating_add(begin), ..want }
    }

    /// Whether all streams together leave so much of what may be unread. A message is not cut for
    /// it: one may exceed it if nothing else is unread, and a short one if its stream has nothing
    /// else.
    fn is_within_total(&self, key: usize, want: LandingWant) -> bool {
        let floor = self.streams[key].landing.held == 0 && want.want <= self.config.stream_window;
        floor || self.grants.held == 0 || u64::from(want.want) <= self.grants.unread_room()
    }

    /// Whether memory is granted to the stream now: within the total, or for the one message that
    /// its reader waits for.
    fn may_land(&self, key: usize, want: LandingWant, awaited: &impl Fn(StreamId) -> bool) -> bool {
        let stream = &self.streams[key];
        self.is_within_total(key, want)
            || (stream.landing.held == 0 && awaited(StreamId(stream.id)))
    }

    /// Adds bytes to those of the stream that are granted or unread.
    fn add_held(&mut self, key: usize, len: u32) {
        self.streams[key].landing.held += u64::from(len);
        self.grants.held += u64::from(len);
    }

    /// Removes bytes of the stream that have been read, or returned unwritten.
    pub(super) fn release_held(&mut self, key: usize, len: u32) {
        let stream = &mut self.streams[key];
        let len = stream.landing.held.min(len.into());
        stream.landing.held -= len;
        self.grants.held -= len;
    }

    /// Settles the accounts of a stream that is removed. Its unread bytes continue to count, unless
    /// the application has released the stream.
    pub(super) fn settle_removed(&mut self, stream: &Stream) {
        let granted = |(_, grant): (usize, &Grant)| {
            (grant.stream == stream.id && !grant.named).then_some(u64::from(grant.len))
        };
        let granted: u64 = match stream.landing.open_grants {
            0 => 0,
            _ => self.grants.out.iter().filter_map(granted).sum(),
        };
        let unread =
            if stream.recv.released { 0 } else { stream.landing.held.saturating_sub(granted) };
        self.grants.held -= stream.landing.held - unread;
        self.grants.windows -= u64::from(stream.recv.limit - self.config.stream_window);
        if unread > 0 {
            self.grants.ended.insert(stream.id, unread);
        }
    }

    /// Records that bytes of a stream that has ended have been read.
    pub(super) fn read_of_ended(&mut self, id: StreamId, len: u32) {
        let Some(unread) = self.grants.ended.get_mut(&id.0) else { return };
        let len = u64::from(len).min(*unread);
        *unread -= len;
        let all = *unread == 0;
        self.grants.held -= len;
        if all {
            self.grants.ended.remove(&id.0);
        }
    }

    /// Records that the application will not read what has been received on the stream.
    pub(super) fn released(&mut self, id: StreamId) {
        match self.streams.key(id.0) {
            Some(key) => self.streams[key].recv.released = true,
            None => self.grants.held -= self.grants.ended.remove(&id.0).unwrap_or(0),
        }
    }

    /// The bytes that all streams hold. Asserts that this is the sum of its parts, and within its
    /// limit.
    #[cfg(test)]
    pub(super) fn held(&self) -> u64 {
        let streams: u64 = self.streams.iter().map(|(_, stream)| stream.landing.held).sum();
        let ended: u64 = self.grants.ended.values().sum();
        assert_eq!(self.grants.held, streams + ended);
        let grown = |stream: &Stream| u64::from(stream.recv.limit - self.config.stream_window);
        assert_eq!(self.grants.windows, self.streams.iter().map(|(_, s)| grown(s)).sum::<u64>());
        self.grants.held
    }

    fn stream_want(&self, key: usize) -> Option<LandingWant> {
        let stream = &self.streams[key];
        let Section::Around { len: want } =
            stream.landing.requests.front()?.section(stream.recv.names)
        else {
            return None;
        };
        // A server that has sent its whole response does not need the rest of the request. For
        // recalled grants see `recall`.
        let answered = self.side == Side::Server && stream.send.state != SendState::Open;
        if answered || stream.recv.undecided || stream.landing.recalled > 0 {
            return None;
        }
        let mut window = u64::from(self.config.bulk_window);
        if stream.landing.held == 0 {
            window = window.max(self.config.whole.into());
        }
        let free = window.saturating_sub(stream.landing.held);
        // Large pieces are worth waiting for: reading frees the rest of the window, half of which
        // is more than MIN_GRANT.
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

    /// Grants memory of at least `min` bytes for a want of [`Connection::poll_landing`]. Memory
    /// that is too short, or no longer wanted, comes back as [`Event::Returned`].
    pub fn provide_landing(&mut self, key: WantKey, memory: GrantMemory) {
        let new_grant = match key {
            _ if !self.is_live() => None,
            WantKey::Standing => {
                let grant = NewGrant {
                    stream: 0,
                    begin: 0,
                    len: memory.len,
                    request: RequestKey::default(),
                    named: false,
                };
                (self.grants.wants_standing() && memory.len > 0).then_some(grant)
            }
            WantKey::Stream(id) => self.grant_part(id, memory.len),
        };
        match new_grant {
            Some(grant) => self.give(grant, memory),
            None => self.events.push_back(Event::Returned { memory: memory.key }),
        }
    }

    /// Gives a grant to the peer.
    pub(super) fn give(&mut self, grant: NewGrant, memory: GrantMemory) {
        let NewGrant { stream, begin, len, request, named } = grant;
        self.heartbeat.rouse();
        let asked = PendingAnswer::by(self.output.control.last_frame() + 1);
        let memory_key = memory.key;
        let recalled = false;
        let grant =
            Grant { stream, memory: memory_key, begin, len, request, named, recalled, asked };
        let id = self.grants.out.insert(grant) as u32;
        if stream == 0 {
            self.grants.standing.push(id);
        }
        self.stats.grants_given += 1;
        let (rkey, addr) = (memory.rkey, memory.addr + u64::from(begin));
        self.output.control.push(Frame::Grant { stream, id, rkey, len, addr });
    }

    /// Determines the part of `len` bytes that is granted to the stream, and the request that it
    /// answers.
    fn grant_part(&mut self, id: StreamId, len: u32) -> Option<NewGrant> {
        let key = self.streams.key(id.0)?;
        let want = self.stream_want(key)?;
        let begin = self.begin_of(key);
        let len = len.checked_sub(begin).filter(|len| *len >= want.min)?.min(want.want);
        let stream = &mut self.streams[key];
        let PeerRequest { request, rest } = stream.landing.requests.front_mut()?;
        let request = *request;
        *rest -= u64::from(len);
        if *rest == 0 {
            stream.landing.requests.pop_front();
        }
        stream.landing.open_grants += 1;
        self.add_held(key, len);
        if self.landing_queue.front() == Some(&key) {
            // Other streams come first, before the next piece of this one.
            self.landing_queue.rotate_left(1);
        }
        self.queue_for_naming(key);
        Some(NewGrant { stream: id.0, begin, len, request, named: false })
    }

    pub(super) fn queue_for_landing(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if std::mem::take(&mut stream.queues.parked) {
            self.parked.retain(|parked| *parked != key);
        }
        if !stream.queues.landing && !stream.landing.requests.is_empty() {
            stream.queues.landing = true;
            self.landing_queue.push_back(key);
        }
        self.queue_for_naming(key);
    }

    pub(super) fn on_request(
        &mut self,
        key: usize,
        len: u64,
        begin: u32,
        field: Option<Field>,
        now: Instant,
    ) -> Result<(), Breach> {
        let modulus = self.modulus();
        let stream = &mut self.streams[key];
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
        if stream.recv.state == RecvState::Discarding {
            return Ok(());
        }
        if stream.landing.requests.len() >= MAX_REQUESTS {
            return Err(Breach::TooManyRequests(id, MAX_REQUESTS));
        }
        if stream.landing.declined {
            // It crossed the DECLINE.
            return Ok(());
        }
        self.grants.requests += 1;
        // Any length is good: what is granted at a time has a limit. The end counts modulo 2^64.
        let end = modulus.rest(u64::from(begin).wrapping_add(len));
        let lands_apart = field.is_some() && (stream.recv.names || stream.recv.undecided);
        let request = RequestKey { number: self.grants.requests, end, len, field };
        stream.landing.requests.push_back(PeerRequest { request, rest: len });
        self.queue_for_landing(key);
        if lands_apart {
            self.grants.last_bulk = now;
        } else {
            self.grants.record_transfer(begin, len, now);
            self.replace_short_standing();
        }
        Ok(())
    }

    /// Recalls a standing grant that is too short, which is why the peer had to send a REQUEST.
    fn replace_short_standing(&mut self) {
        let want = self.grants.standing_len();
        let short = self.grants.standing.iter().copied().find(|id| {
            let grant = &self.grants.out[*id as usize];
            !grant.recalled && grant.len < want
        });
        if let Some(id) = short {
            self.recall(id);
        }
    }

    /// Recalls all standing grants, because the peer has long sent nothing or memory is short
    /// elsewhere. They are given again when the peer sends bulk.
    pub fn recall_standing(&mut self) {
        self.grants.active = false;
        self.grants.recent = [0; 8];
        for at in 0..self.grants.standing.len() {
            self.recall(self.grants.standing[at]);
        }
    }

    /// Whether the peer is given standing grants, because it sends bulk.
    pub fn gives_standing(&self) -> bool {
        self.grants.active
    }

    /// Limits the standing grants to be given from now on to `bytes` together, beside the limits of
    /// the [`Config`](crate::Config).
    pub fn limit_standing(&mut self, bytes: u64) {
        self.grants.standing_bytes = bytes;
    }

    /// Gives no further standing grants until the limit is set anew: there is no memory for them.
    pub fn pause_standing(&mut self) {
        self.grants.standing_bytes = 0;
    }

    /// Recalls the standing grants beyond the [limit](Self::limit_standing).
    pub fn recall_excess_standing(&mut self) {
        while let Some(id) = self.grants.excess_standing() {
            self.recall(id);
        }
    }

    fn grant(&self, frame: &'static str, id: u32) -> Result<Grant, Breach> {
        let grant = self.grants.out.get(id as usize);
        grant.copied().ok_or(Breach::UnknownGrant { frame, grant: GrantId(id) })
    }

    /// Removes a grant that the peer has ended.
    fn take_grant(&mut self, id: u32) {
        let grant = self.grants.out.remove(id as usize);
        if grant.stream == 0 {
            self.grants.standing.retain(|standing| *standing != id);
        } else if let Some(key) = self.streams.key(grant.stream) {
            let stream = &mut self.streams[key];
            stream.landing.open_grants -= 1;
            stream.landing.recalled -= u32::from(grant.recalled);
        }
    }

    pub(super) fn on_abort(&mut self, id: u32) -> Result<(), Breach> {
        let grant = self.grant("ABORT", id)?;
        self.take_grant(id);
        self.events.push_back(Event::Returned { memory: grant.memory });
        if let Some(key) = self.streams.key(grant.stream) {
            if !grant.named {
                self.release_held(key, grant.len);
            }
            if grant.recalled {
                self.restore_request(key, grant.request, grant.len);
            }
            self.queue_for_landing(key);
        }
        Ok(())
    }

    pub(super) fn on_done(
        &mut self,
        key: usize,
        id: u32,
        begin: u32,
        len: u32,
        end: bool,
        now: Instant,
    ) -> Result<(), Breach> {
        let grant = self.grant("DONE", id)?;
        let stream = &self.streams[key];
        let stream_id = StreamId(stream.id);
        // A grant that answers a request starts at the byte where the peer has to begin.
        let limit = if grant.stream == 0 { self.modulus().get() - 1 } else { 0 };
        if begin > limit {
            return Err(Breach::DoneBegin { grant: GrantId(id), begin, limit });
        }
        if len == 0 || u64::from(begin) + u64::from(len) > grant.len.into() {
            return Err(Breach::DoneLength { grant: GrantId(id), begin, len, granted: grant.len });
        }
        if grant.stream != 0 && grant.stream != stream.id {
            return Err(Breach::DoneStream { grant: GrantId(id), stream: stream_id });
        }
        self.take_grant(id);
        self.stats.write_received += u64::from(len);
        let flow = if grant.stream == 0 {
            self.add_held(key, len);
            self.grants.record_transfer(begin, len.into(), now);
            Flow::Bulk
        } else {
            // The rest of the grant is free again.
            if !grant.named {
                self.release_held(key, grant.len - len);
            }
            if grant.recalled {
                self.restore_request(key, grant.request, grant.len - len);
            }
            self.grants.last_bulk = now;
            self.queue_for_landing(key);
            if grant.named { Flow::Named } else { Flow::Bulk }
        };
        let (memory, begin) = (grant.memory, grant.begin + begin);
        if self.streams[key].recv.state == RecvState::Discarding {
            if flow == Flow::Bulk {
                self.release_held(key, len);
            }
            self.events.push_back(Event::Returned { memory });
        } else {
            self.events.push_back(Event::Landed {
                stream: stream_id,
                memory,
                begin,
                len,
                flow,
                end,
            });
        }
        Ok(())
    }
}
