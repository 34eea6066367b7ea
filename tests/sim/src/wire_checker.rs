//! Checks the traffic on the fabric against the protocol's rules, frame by frame, and records a
//! trace.
//!
//! | rule | checked |
//! |---|---|
//! | R1 | an end returns a credit only after it has posted the RECV again |
//! | R1 | a credit tells how long that RECV is |
//! | R2 | no more SENDs than credits; the last credit is for a message that returns some, or for CLOSE |
//! | R2 | a message is no longer than the RECV that it takes |
//! | R3 | the connecting side sends first |
//! | R4, R9 | DONE announces exactly the bytes that were written, and no WRITE follows it |
//! | R8 | over all connections of a device, no memory is in two grants at a time, and nothing is sent from granted memory |
//! | R9 | a WRITE lies in an open grant of its sender; granted memory stays registered |
//! | R8, R9 | a lease is announced once and returned once |
//! | R12 | a WRITE uses the key that its grant names |
//! | R14 | at rest, every stream that was opened has ended on both sides |

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::time::Instant;
use tonic_rdma_fabric::sim::{EndId, Event, Observer};
use tonic_rdma_proto::frame::{Frame, Reader};

#[derive(Debug, Clone, Copy)]
struct Grant {
    addr: u64,
    len: u64,
    rkey: u32,
    /// The stream that may use the grant. 0 for a standing grant, which any stream may use.
    stream: u32,
    /// Offset of the first WRITE.
    begin: u64,
    written: u64,
}

impl Grant {
    fn covers(&self, addr: u64, len: u64) -> bool {
        addr >= self.addr && addr.saturating_add(len) <= self.addr.saturating_add(self.len)
    }

    fn overlaps(&self, addr: u64, len: u64) -> bool {
        addr < self.addr.saturating_add(self.len) && self.addr < addr.saturating_add(len)
    }
}

/// SENDs without a completion that an idle connection may have: see `Link::queue`.
const MAX_UNREPORTED: usize = 16;

/// One end of a connection, as its traffic shows it.
#[derive(Debug, Default)]
struct End {
    device: String,
    recv_slots: u64,
    /// Bytes of each initial RECV.
    rest_bytes: u32,
    /// Bytes of each posted RECV, in the order of posting.
    posted: VecDeque<u32>,
    /// Bytes of each RECV that was posted since the start and not credited yet, in the order of
    /// posting.
    uncredited: VecDeque<u32>,
    peer: Option<EndId>,
    connecting: bool,
    /// The number of messages that have arrived.
    arrived: u64,
    /// The number of messages that the driver has received.
    received: u64,
    /// The number of RECVs that the driver has posted again.
    reposted: u64,
    /// The number of RECVs that the driver has retired or left out.
    retired: u64,
    /// RECVs posted in addition to the initial ones.
    grown: u64,
    /// The number of SENDs that this end has queued.
    sends: u64,
    /// Work requests without a completion: the id, and whether it is a WRITE.
    in_flight: VecDeque<(u64, bool)>,
    /// Credits that this end has returned to its peer.
    returned: u64,
    /// The grants of this end's memory that have been sent to the peer and have not ended.
    grants: BTreeMap<u32, Grant>,
    /// The leases that this end has given its peer.
    leases: BTreeSet<u32>,
    /// Halves of streams that have not ended: `true` for the client's half.
    open: BTreeSet<(u32, bool)>,
    last_opened: u32,
    dead: bool,
    destroyed: bool,
}

#[derive(Debug, Default)]
struct State {
    ends: BTreeMap<EndId, End>,
    wrong: Vec<String>,
    hash: DefaultHasher,
    events: u64,
    frames: BTreeMap<&'static str, u64>,
    trace: Option<Vec<String>>,
}

/// Observes a simulated network and checks its traffic. The module's documentation lists the rules.
#[derive(Debug)]
pub struct WireChecker {
    state: Mutex<State>,
    started: Instant,
}

impl Observer for WireChecker {
    fn event(&self, event: Event<'_>) {
        self.lock().event(event, self.started);
    }
}

impl WireChecker {
    /// With `trace`, the checker records every event.
    pub fn new(trace: bool) -> Self {
        let state = State { trace: trace.then(Vec::new), ..State::default() };
        WireChecker { state: Mutex::new(state), started: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Breaches of the rules, each with its rule.
    pub fn wrong(&self) -> Vec<String> {
        self.lock().wrong.clone()
    }

    /// A hash of all events and their times.
    pub fn hash(&self) -> u64 {
        self.lock().hash.finish()
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.lock().events
    }

    /// Frames that have arrived, by name.
    pub fn frames(&self) -> BTreeMap<&'static str, u64> {
        self.lock().frames.clone()
    }

    /// The recorded events, if the checker has a trace.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.clone().unwrap_or_default()
    }

    /// Adds a line to the trace.
    pub fn note(&self, what: impl FnOnce() -> String) {
        let mut state = self.lock();
        let at = Instant::now().duration_since(self.started).as_millis();
        if let Some(trace) = &mut state.trace {
            trace.push(format!("{at:>8} ms  {}", what()));
        }
    }

    /// Returns the resources that are still in use on connections that should be at rest: open
    /// streams, RECVs that are not posted, grants. Standing grants count as well, so connections
    /// must have been idle for longer than standing grants last.
    pub fn quiet(&self) -> Vec<String> {
        let state = self.lock();
        let mut left = Vec::new();
        for (id, end) in state.ends.iter().filter(|(_, end)| !end.dead && !end.destroyed) {
            let seen_to = end.reposted + end.retired;
            if end.arrived != seen_to {
                left.push(format!("R1: {id}: {} RECVs not posted again", end.arrived - seen_to));
            }
            if !end.open.is_empty() {
                left.push(format!("R14: {id}: halves of streams left open: {:?}", end.open));
            }
            let writes = end.in_flight.iter().filter(|(_, write)| *write).count();
            if writes > 0 || end.in_flight.len() > MAX_UNREPORTED {
                let all = end.in_flight.len();
                left.push(format!(
                    "R10: {id}: {all} pieces of work in flight, {writes} of them WRITEs"
                ));
            }
            let peer = end.peer.and_then(|peer| state.ends.get(&peer));
            if let Some(peer) = peer.filter(|peer| !peer.dead && !peer.destroyed)
                && peer.arrived != end.sends
            {
                left.push(format!("R2: {id}: {} of {} SENDs arrived", peer.arrived, end.sends));
            }
            if !end.leases.is_empty() {
                left.push(format!("R9: {id}: leases are left: {:?}", end.leases));
            }
            for (grant, what) in &end.grants {
                left.push(format!("R9: {id}: grant {grant} is left: {what:?}"));
            }
        }
        left
    }

    /// The number of ends that have received something and are dead or destroyed.
    pub fn deaths(&self) -> usize {
        self.lock()
            .ends
            .values()
            .filter(|end| end.arrived > 0 && (end.dead || end.destroyed))
            .count()
    }

    /// The number of ends that have not been destroyed.
    pub fn living(&self) -> usize {
        self.lock().ends.values().filter(|end| !end.destroyed).count()
    }
}

impl State {
    fn wrong(&mut self, what: String) {
        if self.wrong.len() < 50 {
            self.wrong.push(what);
        }
    }

    /// Hashes and records the parts of an event that are the same in every run. Addresses differ
    /// between runs, so they are left out.
    fn note(&mut self, event: &Event<'_>, started: Instant) {
        let at = Instant::now().duration_since(started).as_millis() as u64;
        let (kind, end, a, b) = match *event {
            Event::Made { end, recv_slots, .. } => ("made", end.0, recv_slots.into(), 0),
            Event::Joined { end, peer, connecting } => {
                ("joined", end.0, peer.0, u64::from(connecting))
            }
            Event::Queued { end, len, .. } => ("queued", end.0, len as u64, 0),
            Event::Sent { end, message, .. } => ("sent", end.0, message.len() as u64, 0),
            Event::Written { end, len, .. } => ("written", end.0, len as u64, 0),
            Event::Received { end, len } => ("received", end.0, len.into(), 0),
            Event::Reposted { end, bytes } => ("reposted", end.0, bytes.into(), 0),
            Event::Retired { end } => ("retired", end.0, 0, 0),
            Event::Grown { end, recv_slots, bytes } => {
                ("grown", end.0, recv_slots.into(), bytes.into())
            }
            Event::Completed { end, id } => ("completed", end.0, id, 0),
            Event::Died { end } => ("died", end.0, 0, 0),
            Event::Destroyed { end } => ("destroyed", end.0, 0, 0),
            Event::Registered { len, remote, .. } => {
                ("registered", 0, len as u64, u64::from(remote))
            }
            Event::Deregistered { len, .. } => ("deregistered", 0, len as u64, 0),
            _ => ("other", 0, 0, 0),
        };
        (at, kind, end, a, b).hash(&mut self.hash);
        self.events += 1;
        if let Some(trace) = &mut self.trace {
            let frames = match event {
                Event::Sent { message, .. } => frames_of(message),
                _ => String::new(),
            };
            trace.push(format!("{at:>8} ms  end {end:<3} {kind:<12} {a} {b} {frames}"));
        }
    }

    fn event(&mut self, event: Event<'_>, started: Instant) {
        self.note(&event, started);
        match event {
            Event::Made { end, device, recv_slots, bytes } => {
                let made = End {
                    device: device.to_owned(),
                    recv_slots: recv_slots.into(),
                    rest_bytes: bytes,
                    posted: vec![bytes; recv_slots as usize].into(),
                    ..End::default()
                };
                self.ends.insert(end, made);
            }
            Event::Joined { end, peer, connecting } => {
                if let Some(end) = self.ends.get_mut(&end) {
                    end.peer = Some(peer);
                    end.connecting = connecting;
                }
            }
            Event::Queued { end, id, write, addr, len } => {
                let at = self.at(end);
                at.sends += u64::from(!write);
                at.in_flight.push_back((id, write));
                self.queued(end, addr, len as u64);
            }
            Event::Sent { end, peer, message } => self.sent(end, peer, message),
            Event::Written { end, peer, addr, rkey, len } => {
                self.written(end, peer, addr, rkey, len as u64)
            }
            Event::Received { end, .. } => self.at(end).received += 1,
            Event::Reposted { end, bytes } => {
                let end = self.at(end);
                end.reposted += 1;
                end.posted.push_back(bytes);
                end.uncredited.push_back(bytes);
                if end.reposted + end.retired > end.received {
                    self.wrong("R1: a RECV was posted again that had nothing in it".into());
                }
            }
            Event::Retired { end } => {
                let at = self.at(end);
                at.retired += 1;
                if at.retired > at.grown {
                    self.wrong(format!("R1: {end} has fewer RECVs than at the start"));
                }
            }
            Event::Grown { end, recv_slots, bytes } => {
                let end = self.at(end);
                end.grown += u64::from(recv_slots);
                let recvs = std::iter::repeat_n(bytes, recv_slots as usize);
                end.posted.extend(recvs.clone());
                end.uncredited.extend(recvs);
            }
            Event::Completed { end, id } => {
                let in_flight = &mut self.at(end).in_flight;
                while in_flight.front().is_some_and(|(first, _)| *first <= id) {
                    in_flight.pop_front();
                }
            }
            Event::Died { end } => self.at(end).dead = true,
            Event::Destroyed { end } => {
                let end = self.at(end);
                end.destroyed = true;
                end.grants.clear();
            }
            Event::Deregistered { device, addr, len } => {
                let held = self.granted(device, addr, len as u64);
                if let Some((end, grant)) = held {
                    self.wrong(format!(
                        "R9: {end}: memory of {grant} was deregistered while it was granted"
                    ));
                }
            }
            _ => {}
        }
    }

    fn at(&mut self, end: EndId) -> &mut End {
        self.ends.entry(end).or_default()
    }

    /// A grant of a device that overlaps with a range of memory.
    fn granted(&self, device: &str, addr: u64, len: u64) -> Option<(EndId, String)> {
        let mine = self.ends.iter().filter(|(_, end)| end.device == device && !end.destroyed);
        mine.flat_map(|(id, end)| end.grants.iter().map(move |(grant, what)| (id, grant, what)))
            .find(|(_, _, what)| what.overlaps(addr, len))
            .map(|(id, grant, what)| (*id, format!("grant {grant} ({what:?})")))
    }

    fn queued(&mut self, end: EndId, addr: u64, len: u64) {
        let device = self.at(end).device.clone();
        if len > 0
            && let Some((other, grant)) = self.granted(&device, addr, len)
        {
            self.wrong(format!("R8: {end} sends from memory that is {grant} of {other}"));
        }
    }

    fn sent(&mut self, from: EndId, to: EndId, message: &[u8]) {
        let mut reader = match Reader::new(Bytes::copy_from_slice(message)) {
            Ok(reader) => reader,
            Err(breach) => return self.wrong(format!("R15: {from}: {breach}")),
        };
        let mut frames = Vec::new();
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(breach) => return self.wrong(format!("R15: {from}: {breach}")),
            }
        }
        let recv = self.at(to).posted.pop_front();
        if recv.is_some_and(|bytes| message.len() > bytes as usize) {
            self.wrong(format!("R2: {from} sends {} bytes to a RECV of {recv:?}", message.len()));
        }
        self.credits(from, to, reader.credits.into(), &frames);
        self.credit_sizes(from, reader.credits.into(), reader.full);
        for frame in frames {
            *self.frames.entry(frame.name()).or_default() += 1;
            self.frame(from, to, frame);
        }
    }

    fn credits(&mut self, from: EndId, to: EndId, returned: u64, frames: &[Frame]) {
        if !self.at(from).connecting && self.at(from).arrived == 0 {
            self.wrong(format!("R3: {from} accepted the connection and sends first"));
        }
        let given = self.at(to).recv_slots + self.at(to).returned;
        self.at(to).arrived += 1;
        let spent = self.at(to).arrived;
        let sends = self.at(from).sends;
        if spent > sends {
            self.wrong(format!(
                "R2: {spent} messages have arrived of the {sends} that {from} has sent"
            ));
        }
        if spent > given {
            self.wrong(format!("R2: {from} has sent {spent} messages on {given} credits"));
        }
        let closes = frames.iter().any(|f| matches!(f, Frame::Close { .. }));
        if spent == given && returned == 0 && !closes {
            self.wrong(format!("R2: {from} spends its last credit and returns none"));
        }
        let end = self.at(from);
        end.returned += returned;
        let (returned, posted) = (end.returned, end.reposted + end.grown);
        if returned > posted {
            self.wrong(format!(
                "R1: {from} has returned {returned} credits for {posted} RECVs posted since the start"
            ));
        }
    }

    /// Checks that the credits are for the RECVs that were posted first, and that `full` matches
    /// the lengths of these RECVs.
    fn credit_sizes(&mut self, from: EndId, returned: usize, full: bool) {
        let end = self.at(from);
        let returned = returned.min(end.uncredited.len());
        let rest = end.rest_bytes;
        if end.uncredited.drain(..returned).any(|bytes| (bytes > rest) != full) {
            self.wrong(format!("R1: {from} returns credits for RECVs of another length"));
        }
    }

    fn frame(&mut self, from: EndId, to: EndId, frame: Frame) {
        let connecting = self.at(from).connecting;
        let end_half = |state: &mut State, stream: u32| {
            state.at(from).open.remove(&(stream, connecting));
            state.at(to).open.remove(&(stream, connecting));
        };
        match frame {
            Frame::Headers { stream, end, .. } => {
                if connecting && stream > self.at(from).last_opened {
                    self.at(from).last_opened = stream;
                    for half in [true, false] {
                        self.at(from).open.insert((stream, half));
                        self.at(to).open.insert((stream, half));
                    }
                }
                if end {
                    end_half(self, stream);
                }
            }
            Frame::Data { stream, end: true, .. } => end_half(self, stream),
            Frame::Reset { stream, .. } => end_half(self, stream),
            Frame::Grant { stream, id, rkey, len, addr } => {
                let device = self.at(from).device.clone();
                if let Some((other, grant)) = self.granted(&device, addr, len.into()) {
                    self.wrong(format!(
                        "R8: {from} grants memory that is {grant} of {other} already"
                    ));
                }
                let grant = Grant { addr, len: len.into(), rkey, stream, begin: 0, written: 0 };
                if self.at(from).grants.insert(id, grant).is_some() {
                    self.wrong(format!("R8: {from}: grant {id} is given twice"));
                }
            }
            Frame::Done { stream, end, id, len, begin } => {
                match self.at(to).grants.remove(&id) {
                    None => {
                        self.wrong(format!("R9: {from} ends grant {id}, which it does not hold"))
                    }
                    Some(grant) if (grant.begin, grant.written) != (begin.into(), len.into()) => {
                        self.wrong(format!(
                            "R4: {from} announces {len} bytes from {begin} on of {grant:?}"
                        ));
                    }
                    Some(grant) if grant.stream != 0 && grant.stream != stream => {
                        self.wrong(format!("R9: {from} uses {grant:?} for stream {stream}"));
                    }
                    Some(_) => {}
                }
                if end {
                    end_half(self, stream);
                }
            }
            Frame::Lent { stream, end, lent } => {
                let lease = lent.place.lease;
                if !self.at(from).leases.insert(lease) {
                    self.wrong(format!("R8: {from}: lease {lease} is given twice"));
                }
                if end {
                    end_half(self, stream);
                }
            }
            Frame::Return { lease } => {
                let had = self.at(to).leases.remove(&lease);
                if !had {
                    self.wrong(format!("R9: {from} returns lease {lease}, which it has not"));
                }
            }
            Frame::Abort { id } => {
                let held = self.at(to).grants.remove(&id);
                if held.is_none() {
                    self.wrong(format!("R9: {from} aborts grant {id}, which it does not hold"));
                }
            }
            _ => {}
        }
    }

    fn written(&mut self, from: EndId, to: EndId, addr: u64, rkey: u32, len: u64) {
        let grant = self.at(to).grants.values_mut().find(|grant| grant.covers(addr, len));
        let wrong = match grant {
            None => format!("R9: {from} writes {len} bytes outside of any grant"),
            Some(grant) if grant.rkey != rkey => {
                format!("R12: {from} writes with another key than granted")
            }
            // In a standing grant, any offset of the first WRITE is accepted here, because DONE has
            // to state it.
            Some(grant) if grant.stream == 0 && grant.written == 0 => {
                (grant.begin, grant.written) = (addr - grant.addr, len);
                return;
            }
            Some(grant) if addr - grant.addr != grant.begin + grant.written => {
                format!(
                    "R9: {from} writes with a gap, or again: {len} bytes at {} of {grant:?}",
                    addr - grant.addr
                )
            }
            Some(grant) => {
                grant.written += len;
                return;
            }
        };
        self.wrong(wrong);
    }
}

/// The credits of a message, and the names and streams of its frames.
fn frames_of(message: &[u8]) -> String {
    let Ok(mut reader) = Reader::new(Bytes::copy_from_slice(message)) else { return "?".into() };
    let mut names = format!("+{}{}", reader.credits, if reader.full { "F" } else { "" });
    while let Ok(Some(frame)) = reader.next_frame() {
        let stream = match &frame {
            Frame::Headers { stream, .. }
            | Frame::Data { stream, .. }
            | Frame::Window { stream, .. }
            | Frame::Reset { stream, .. }
            | Frame::Request { stream, .. }
            | Frame::Grant { stream, .. }
            | Frame::Lent { stream, .. }
            | Frame::Done { stream, .. } => *stream,
            _ => 0,
        };
        names.push_str(&format!(" {}:{stream}", frame.name()));
    }
    names
}
