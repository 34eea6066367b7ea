//! Sending by WRITE: binds the peer's grants to transfers, and returns grants that are not needed
//! or are recalled.
//!
//! When the peer recalls a grant, this side ends the grant as soon as possible:
//!
//! | the grant is | on RECALL |
//! |---|---|
//! | standing, not bound | ABORT |
//! | for a request, nothing handed out as WRITE | ABORT |
//! | for a request, a part handed out | DONE for that part |
//! | standing and bound to a transfer, or for a request ahead of such a transfer | it is written before all others, and ends with DONE |
//! | written or ended | nothing: DONE or ABORT is on its way |
//!
//! Both sides know how many bytes a request loses this way, so the peer grants these bytes again
//! without another REQUEST. If a later transfer of the stream has a standing grant, the recalled
//! grant is written instead of aborted. Otherwise the later transfer would keep memory while the
//! earlier one waits for memory, and both might wait for each other.

use std::collections::{BTreeMap, BTreeSet};

use super::alignment::{self, Modulus};
use super::control::Control;
use super::grants::MAX_REQUESTS;
use super::output_queue::OutputQueue;
use super::send_half::{OutputItem, SendState};
use super::stream::Stream;
use super::streams::Streams;
use super::transfers::{Bulk, PeerGrant, PendingDone, QueuedRequest};
use super::types::Side;
use crate::error::Breach;
use crate::frame::{Frame, MIN_GRANT};
use crate::ids::GrantId;

/// Maximum number of standing grants that a peer may give.
const MAX_STANDING: usize = 64;
/// Maximum number of transfers of a stream for which memory is bound or requested at a time.
const MAX_PREPARED: usize = 4;

const _: () = assert!(MAX_PREPARED <= MAX_REQUESTS);

/// The peer's memory that this side may write to.
#[derive(Debug)]
pub(super) struct PeerGrants {
    side: Side,
    /// The modulus that determines at which addresses in the peer's memory messages begin.
    modulus: Modulus,
    /// Standing grants that are not bound to a transfer.
    standing: Vec<PeerGrant>,
    /// The ids of the grants that this side has not ended, with the ids of their streams. For a
    /// standing grant the stream is 0, also while the grant is bound, until it is recalled.
    open: BTreeMap<u32, u32>,
    /// Keys of memory that this side cannot write to.
    unwritable: BTreeSet<u32>,
    /// Whether the server has named memory for a request of this client.
    names_requests: bool,
}

impl PeerGrants {
    /// Creates the state without grants, for a peer that requires the alignment `align`.
    pub(super) fn new(side: Side, align: u16) -> Self {
        PeerGrants {
            side,
            modulus: Modulus::of(align),
            standing: Vec::new(),
            open: BTreeMap::new(),
            unwritable: BTreeSet::new(),
            names_requests: false,
        }
    }

    /// The number of grants that this side has not ended.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether the peer has named memory for a request of this client.
    pub(super) fn names_requests(&self) -> bool {
        self.names_requests
    }

    pub(super) fn set_unwritable(&mut self, rkey: u32) {
        self.unwritable.insert(rkey);
    }

    pub(super) fn forget_unwritable(&mut self, rkey: u32) {
        self.unwritable.remove(&rkey);
    }

    /// Binds memory to the transfers at the head of a stream's output, or requests it. Stops at a
    /// piece that may be lent. Also stops at eager data, unless the peer names memory, because
    /// eager data may wait for the window while other streams can use the memory. While a transfer
    /// waits for memory, later transfers get no standing grants. Otherwise they would hold memory
    /// that the first transfer may be waiting for.
    #[inline]
    pub(super) fn prepare(&mut self, key: usize, stream: &mut Stream, output: &mut OutputQueue) {
        let requests_all = stream.send.peer_names;
        let stops = |out: &OutputItem| {
            matches!(out, OutputItem::Lend(_))
                || (matches!(out, OutputItem::Eager { .. }) && !requests_all)
        };
        if stream.send.out.front().is_none_or(stops) || stream.send.sends_data {
            return;
        }
        let (mut asked, mut waiting) = (false, false);
        let bulks =
            stream.send.out.iter_mut().take_while(|out| !stops(out)).filter_map(|out| match out {
                OutputItem::Bulk(bulk) => Some(bulk),
                _ => None,
            });
        for bulk in bulks.take(MAX_PREPARED) {
            if !bulk.prepared {
                bulk.prepared = true;
                let standing = match waiting || requests_all {
                    true => None,
                    false => self.take_standing(bulk),
                };
                match standing {
                    Some(grant) => {
                        bulk.granted = bulk.len;
                        bulk.grants.push_back(grant);
                    }
                    None => {
                        let Bulk { len, begin, field, .. } = **bulk;
                        stream.transfers.requests.push_back(QueuedRequest { len, begin, field });
                        asked = true;
                    }
                }
            }
            waiting |= bulk.granted < bulk.len;
        }
        if asked {
            output.mark_send(key, stream);
        }
        output.mark_write(key, stream);
    }

    /// Takes the shortest standing grant that holds the whole transfer at an address where the
    /// transfer may begin. Returns the part of the grant from that address on.
    fn take_standing(&mut self, bulk: &Bulk) -> Option<PeerGrant> {
        let offset = |grant: &PeerGrant| alignment::offset(self.modulus, grant.addr, bulk.begin);
        let holds = |grant: &PeerGrant| bulk.len + u64::from(offset(grant)) <= grant.len.into();
        let (at, _) = self
            .standing
            .iter()
            .enumerate()
            .filter(|(_, grant)| holds(grant))
            .min_by_key(|(_, grant)| grant.len)?;
        let begin = offset(&self.standing[at]);
        let grant = self.standing.swap_remove(at);
        let (addr, len) = (grant.addr + u64::from(begin), grant.len - begin);
        Some(PeerGrant { addr, len, begin, ..grant })
    }

    /// Handles GRANT.
    ///
    /// # Errors
    /// [`Breach::BadGrant`], [`Breach::UnknownStream`].
    pub(super) fn on_grant(
        &mut self,
        stream: u32,
        grant: PeerGrant,
        streams: &mut Streams,
        output: &mut OutputQueue,
    ) -> Result<(), Breach> {
        let id = grant.id;
        let bad = |why| Err(Breach::BadGrant { grant: id, why });
        if grant.len == 0 {
            return bad("no bytes");
        }
        if grant.addr.checked_add(grant.len.into()).is_none() {
            return bad("reaches past the end of the address space");
        }
        if self.open.insert(id.0, stream).is_some() {
            return bad("its id is in use");
        }
        let writable = self.unwritable.is_empty() || !self.unwritable.contains(&grant.rkey);
        if stream == 0 {
            if !writable {
                self.refuse(id, &mut output.control);
            } else if self.standing.len() >= MAX_STANDING {
                return bad("too many standing grants");
            } else {
                self.standing.push(grant);
            }
            return Ok(());
        }
        let key = streams.known("GRANT", stream)?;
        let Some(key) = key.filter(|key| streams[*key].send.state != SendState::Reset) else {
            // Refuse a grant that crossed this side's RESET.
            self.refuse(id, &mut output.control);
            return Ok(());
        };
        let stream = &mut streams[key];
        if !writable {
            if !stream.send.sends_data && !stream.send.state.is_done() {
                output.control.push(Frame::Decline { stream: stream.id, own: true });
            }
            output.send_data_from_now_on(key, stream);
        }
        if stream.send.sends_data {
            // Refuse a grant that crossed a DECLINE, or whose memory this side cannot write to.
            self.refuse(id, &mut output.control);
            return Ok(());
        }
        match self.bind(stream, grant, output) {
            Ok(()) => output.mark_write(key, stream),
            Err(why) => return bad(why),
        }
        Ok(())
    }

    /// Adds a grant to the stream's first transfer that waits for memory.
    ///
    /// # Errors
    /// The reason why no transfer waits for such a grant.
    fn bind(
        &mut self,
        stream: &mut Stream,
        grant: PeerGrant,
        output: &OutputQueue,
    ) -> Result<(), &'static str> {
        let waiting = stream.send.out.iter_mut().find_map(|out| match out {
            OutputItem::Bulk(bulk) if bulk.prepared && bulk.granted < bulk.len => Some(bulk),
            _ => None,
        });
        let Some(bulk) = waiting else { return Err("nothing was asked for") };
        let rest = bulk.len - bulk.granted;
        if u64::from(grant.len) > rest {
            return Err("more than was asked for");
        }
        let end = bulk.granted + u64::from(grant.len);
        let ends_section =
            bulk.field.is_some_and(|field| end == u64::from(field.at) || end == field.end());
        if u64::from(grant.len) < rest.min(MIN_GRANT.into()) && !ends_section {
            return Err("too short a part of what was asked for");
        }
        if bulk.grants.is_empty()
            && let Some(finish) = &mut bulk.finish
        {
            // The transfer has waited for memory, not for its turn, so this part is queued like
            // transfers that begin now.
            *finish = output.finish(grant.len.into()).max(*finish);
        }
        // Landing memory is never granted in parts this short, so the peer has named memory for the
        // field.
        let names =
            grant.len < MIN_GRANT && bulk.field.is_some_and(|field| end == u64::from(field.at));
        bulk.granted += u64::from(grant.len);
        bulk.grants.push_back(grant);
        self.names_requests |= names && self.side == Side::Client;
        Ok(())
    }

    /// Records that a grant has ended with DONE.
    pub(super) fn done(&mut self, id: GrantId) {
        self.open.remove(&id.0);
    }

    /// Ends a grant that this side does not need.
    pub(super) fn abort(&mut self, id: GrantId, control: &mut Control) {
        self.open.remove(&id.0);
        control.push(Frame::Abort { id: id.0 });
    }

    /// Ends a grant that this side cannot use, in answer to a frame from the peer.
    fn refuse(&mut self, id: GrantId, control: &mut Control) {
        self.open.remove(&id.0);
        control.answer(Frame::Abort { id: id.0 });
    }

    /// Handles RECALL. An unknown grant has ended already: its DONE or ABORT crossed the RECALL.
    pub(super) fn on_recall(&mut self, id: u32, streams: &mut Streams, output: &mut OutputQueue) {
        let Some(&stream) = self.open.get(&id) else { return };
        if let Some(at) = self.standing.iter().position(|grant| grant.id.0 == id) {
            let grant = self.standing.swap_remove(at);
            return self.refuse(grant.id, &mut output.control);
        }
        let bound = match streams.key(stream) {
            Some(key) => streams[key].find_grant(id).map(|place| (key, place)),
            None => streams.iter().find_map(|(key, s)| s.find_grant(id).map(|place| (key, place))),
        };
        // If the grant is not bound, its DONE is already queued.
        let Some((key, (place, at))) = bound else { return };
        let stream = &mut streams[key];
        // Record the stream, so that a bound standing grant need not be searched for again.
        self.open.insert(id, stream.id);
        let in_front = stream.send.out.iter().skip(place).any(|out| match out {
            OutputItem::Bulk(bulk) => bulk.grants.front().is_some_and(|grant| grant.standing),
            OutputItem::Headers { .. } | OutputItem::Eager { .. } | OutputItem::Lend(_) => false,
        });
        let Some(OutputItem::Bulk(bulk)) = stream.send.out.get_mut(place) else { return };
        let Some(grant) = bulk.grants.get_mut(at) else { return };
        if in_front {
            if !std::mem::replace(&mut grant.recalled, true) {
                stream.transfers.urgent += 1;
                output.write_first(key, stream);
            }
            return;
        }
        let (len, used) = (grant.len, grant.used);
        bulk.grants.remove(at);
        bulk.granted -= u64::from(len - used);
        if used > 0 {
            let done = PendingDone { grant: GrantId(id), len: used, begin: 0, end: false };
            stream.transfers.dones.push_back(done);
            output.mark_send(key, stream);
        } else {
            self.refuse(GrantId(id), &mut output.control);
            if stream.send.sends_data {
                output.mark_send(key, stream);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.open.keys().copied()
    }

    #[cfg(test)]
    pub(super) fn standing(&self) -> usize {
        self.standing.len()
    }
}
