//! Memory granted to the peer: who wants some, what is out, standing grants.

use std::time::Instant;

use super::answer_clock::Owed;
use super::connection::Connection;
use super::grants::{Grant, MAX_REQUESTS};
use super::phase::Modulus;
use super::stream::{Asked, RecvHalf, SendHalf, Stream, Want};
use super::types::{Event, Flow, GrantMemory, LandingWant, Side, WantKey};
use crate::error::Breach;
use crate::frame::{Frame, MIN_GRANT};
use crate::ids::{GrantId, StreamId};

/// Streams that are looked at while the first wants more than `bulk_total` leaves.
const BEHIND: usize = 8;
/// Memory that is to be granted.
#[derive(Clone, Copy, Debug)]
struct Booked {
    stream: u32,
    begin: u32,
    len: u32,
    request: Asked,
}

impl Connection {
    /// Landing memory that is wanted now. Answer with [`Connection::provide_landing`]; if there is
    /// none, ask again when some comes free. The same want is returned until it is answered.
    pub fn poll_landing(&mut self) -> Option<LandingWant> {
        if !self.is_live() {
            return None;
        }
        while let Some(&key) = self.landing_queue.front() {
            let Some(want) = self.stream_want(key) else {
                self.landing_queue.pop_front();
                self.streams[key].in_landing_queue = false;
                continue;
            };
            let shorter = || (1..=BEHIND).find_map(|place| self.landing_behind(place)?);
            match self
                .within_connection(want)
                .map(|want| self.with_begin(key, want))
                .or_else(shorter)
            {
                Some(want) => return Some(want),
                // Standing grants count for no stream.
                None => break,
            }
        }
        if !self.grants.wants_standing() {
            return None;
        }
        let want = self.grants.standing_len();
        (want > 0).then_some(LandingWant { key: WantKey::Standing, want, min: want })
    }

    /// What the stream wants that has `place` others before it in the queue of those that want
    /// landing memory, for when there is none for the first: its want may be shorter. The inner
    /// None: nothing any more. The outer None: there is no such stream.
    pub fn landing_behind(&self, place: usize) -> Option<Option<LandingWant>> {
        let within = |key: &usize| {
            let want = self.stream_want(*key).and_then(|want| self.within_connection(want))?;
            Some(self.with_begin(*key, want))
        };
        self.landing_queue.get(place).map(within)
    }

    fn modulus(&self) -> Modulus {
        Modulus::of(self.config.align)
    }

    /// Where the first byte that the stream wants memory for is to lie.
    fn begin_of(&self, key: usize) -> u32 {
        self.streams[key].wants.front().map_or(0, |want| want.begin(self.modulus()))
    }

    /// The memory that holds what is wanted where it is to begin.
    fn with_begin(&self, key: usize, want: LandingWant) -> LandingWant {
        let begin = self.begin_of(key);
        let LandingWant { want: most, min, .. } = want;
        LandingWant { want: most.saturating_add(begin), min: min.saturating_add(begin), ..want }
    }

    /// As much of it as all streams together leave of `bulk_total`. None: as soon as a reader takes
    /// something, or a stream ends, the want may be met.
    fn within_connection(&self, want: LandingWant) -> Option<LandingWant> {
        let free = self.config.bulk_total.saturating_sub(self.grants.held);
        // As of a stream's window: large pieces are worth waiting for.
        let least = want.want.min(self.config.bulk_window / 2);
        let want =
            LandingWant { want: want.want.min(u32::try_from(free).unwrap_or(u32::MAX)), ..want };
        (want.want >= least).then_some(LandingWant { min: want.min.min(want.want), ..want })
    }

    /// The stream has so many bytes more that are granted or unread.
    fn hold(&mut self, key: usize, len: u32) {
        self.streams[key].held += u64::from(len);
        self.grants.held += u64::from(len);
    }

    /// So many bytes of the stream have been read, or came back.
    pub(super) fn let_go(&mut self, key: usize, len: u32) {
        let stream = &mut self.streams[key];
        let len = stream.held.min(len.into());
        stream.held -= len;
        self.grants.held -= len;
    }

    /// A stream is removed. What has landed for it and nobody has read counts on, unless the
    /// application has let go of the stream.
    pub(super) fn ends_with(&mut self, stream: &Stream) {
        let granted = |(_, grant): (usize, &Grant)| {
            (grant.stream == stream.id).then_some(u64::from(grant.len))
        };
        let granted: u64 = match stream.open_grants {
            0 => 0,
            _ => self.grants.out.iter().filter_map(granted).sum(),
        };
        let unread = if stream.released { 0 } else { stream.held.saturating_sub(granted) };
        self.grants.held -= stream.held - unread;
        if unread > 0 {
            self.grants.ended.insert(stream.id, unread);
        }
    }

    /// Bytes of a stream that has ended have been read.
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

    /// Nobody will read what came for the stream.
    pub(super) fn released(&mut self, id: StreamId) {
        match self.ids.get(&id.0) {
            Some(&key) => self.streams[key].released = true,
            None => self.grants.held -= self.grants.ended.remove(&id.0).unwrap_or(0),
        }
    }

    /// What all streams hold, which is the sum of its parts and no more than there may be.
    #[cfg(test)]
    pub(super) fn held(&self) -> u64 {
        let streams: u64 = self.streams.iter().map(|(_, stream)| stream.held).sum();
        let ended: u64 = self.grants.ended.values().sum();
        assert_eq!(self.grants.held, streams + ended);
        assert!(self.grants.held <= self.config.bulk_total);
        self.grants.held
    }

    fn stream_want(&self, key: usize) -> Option<LandingWant> {
        let stream = &self.streams[key];
        let want = stream.wants.front()?.rest;
        // Of a server that has said all the rest of the request is not wanted; see `recall` for the
        // other.
        let answered = self.side == Side::Server && stream.send != SendHalf::Open;
        if answered || stream.recalled > 0 {
            return None;
        }
        let mut window = u64::from(self.config.bulk_window);
        if stream.held == 0 {
            window = window.max(self.config.whole.into());
        }
        let free = window.saturating_sub(stream.held);
        // Large pieces are worth waiting for: the reader frees the rest of the window, of which the
        // half is more than MIN_GRANT.
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

    /// Grants memory for what [`Connection::poll_landing`] wanted: at least `min` bytes of it.
    /// Memory that is too short, or turns out not to be wanted any more, comes back as
    /// [`Event::Returned`].
    pub fn provide_landing(&mut self, key: WantKey, memory: GrantMemory) {
        let booked = match key {
            _ if !self.is_live() => None,
            WantKey::Standing => {
                let grant =
                    Booked { stream: 0, begin: 0, len: memory.len, request: Asked::default() };
                (self.grants.wants_standing() && memory.len > 0).then_some(grant)
            }
            WantKey::Stream(id) => self.book_grant(id, memory.len),
        };
        let Some(Booked { stream, begin, len, request }) = booked else {
            self.events.push_back(Event::Returned { memory: memory.key });
            return;
        };
        let asked = Owed::by(self.last_frame() + 1);
        let grant =
            Grant { stream, memory: memory.key, begin, len, request, recalled: false, asked };
        let id = self.grants.out.insert(grant) as u32;
        if stream == 0 {
            self.grants.standing.push(id);
        }
        self.stats.grants_given += 1;
        let (rkey, addr) = (memory.rkey, memory.addr + u64::from(begin));
        self.push_control(Frame::Grant { stream, id, rkey, len, addr });
    }

    /// What of `len` bytes is granted to the stream, and for which of its requests.
    fn book_grant(&mut self, id: StreamId, len: u32) -> Option<Booked> {
        let &key = self.ids.get(&id.0)?;
        let want = self.stream_want(key).and_then(|want| self.within_connection(want))?;
        let begin = self.begin_of(key);
        let len = len.checked_sub(begin).filter(|len| *len >= want.min)?.min(want.want);
        let stream = &mut self.streams[key];
        let Want { request, rest } = stream.wants.front_mut()?;
        let request = *request;
        *rest -= u64::from(len);
        if *rest == 0 {
            stream.wants.pop_front();
        }
        stream.open_grants += 1;
        self.hold(key, len);
        if self.landing_queue.front() == Some(&key) {
            // Others first, before this one's next piece.
            self.landing_queue.rotate_left(1);
        }
        Some(Booked { stream: id.0, begin, len, request })
    }

    pub(super) fn queue_for_landing(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.in_landing_queue && !stream.wants.is_empty() {
            stream.in_landing_queue = true;
            self.landing_queue.push_back(key);
        }
    }

    pub(super) fn on_request(
        &mut self,
        key: usize,
        len: u64,
        begin: u32,
        now: Instant,
    ) -> Result<(), Breach> {
        let (limit, modulus) = (self.config.max_message, self.modulus());
        let stream = &mut self.streams[key];
        let id = StreamId(stream.id);
        if len == 0 || len > limit {
            return Err(Breach::RequestLength { stream: id, len, limit });
        }
        if begin >= modulus.get() {
            return Err(Breach::RequestBegin { stream: id, begin, modulus: modulus.get() });
        }
        if stream.recv == RecvHalf::Discarding {
            return Ok(());
        }
        if stream.wants.len() >= MAX_REQUESTS {
            return Err(Breach::TooManyRequests(id, MAX_REQUESTS));
        }
        self.grants.requests += 1;
        let end = modulus.rest(u64::from(begin) + len);
        let request = Asked { number: self.grants.requests, end };
        stream.wants.push_back(Want { request, rest: len });
        self.queue_for_landing(key);
        self.grants.learn(begin, len, now);
        self.replace_short_standing();
        Ok(())
    }

    /// The peer had to ask though it holds standing grants: they are too short. One is exchanged.
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

    /// Asks for all standing grants back, because nothing has come for long or memory is short
    /// elsewhere. They are kept again when bulk comes.
    pub fn recall_standing(&mut self) {
        self.grants.active = false;
        self.grants.recent = [0; 8];
        for at in 0..self.grants.standing.len() {
            self.recall(self.grants.standing[at]);
        }
    }

    fn grant(&self, frame: &'static str, id: u32) -> Result<Grant, Breach> {
        let grant = self.grants.out.get(id as usize);
        grant.copied().ok_or(Breach::UnknownGrant { frame, grant: GrantId(id) })
    }

    /// The peer has ended a grant.
    fn take_grant(&mut self, id: u32) {
        let grant = self.grants.out.remove(id as usize);
        if grant.stream == 0 {
            self.grants.standing.retain(|standing| *standing != id);
        } else if let Some(&key) = self.ids.get(&grant.stream) {
            let stream = &mut self.streams[key];
            stream.open_grants -= 1;
            stream.recalled -= u32::from(grant.recalled);
        }
    }

    pub(super) fn on_abort(&mut self, id: u32) -> Result<(), Breach> {
        let grant = self.grant("ABORT", id)?;
        self.take_grant(id);
        self.events.push_back(Event::Returned { memory: grant.memory });
        if let Some(&key) = self.ids.get(&grant.stream) {
            self.let_go(key, grant.len);
            if grant.recalled {
                self.want_again(key, grant.request, grant.len);
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
        // What answers a request has been granted from where it begins on.
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
        if grant.stream == 0 && len > stream.recv_window {
            return Err(Breach::Window { stream: stream_id, len, window: stream.recv_window });
        }
        self.take_grant(id);
        self.stats.write_received += u64::from(len);
        let flow = if grant.stream == 0 {
            self.streams[key].recv_window -= len;
            self.grants.learn(begin, len.into(), now);
            Flow::Window
        } else {
            // What the peer left of its grant is free again.
            self.let_go(key, grant.len - len);
            if grant.recalled {
                self.want_again(key, grant.request, grant.len - len);
            }
            self.grants.last_bulk = now;
            self.queue_for_landing(key);
            Flow::Bulk
        };
        let (memory, begin) = (grant.memory, grant.begin + begin);
        if self.streams[key].recv == RecvHalf::Discarding {
            if flow == Flow::Bulk {
                self.let_go(key, len);
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
