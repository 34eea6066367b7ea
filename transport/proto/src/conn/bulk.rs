//! Sending by WRITE: binds memory that the peer has granted to transfers, and returns what is not
//! needed.

use super::alignment::{self, Modulus};
use super::connection::Connection;
use super::grants::MAX_REQUESTS;
use super::stream::{Bulk, OutputItem, PeerGrant, QueuedRequest, SendState};
use super::types::Side;
use crate::error::Breach;
use crate::frame::{Frame, MIN_GRANT};
use crate::ids::GrantId;

/// Maximum number of standing grants that a peer may give.
const MAX_STANDING: usize = 64;
/// Transfers of a stream for which memory is bound or requested at a time.
const MAX_PREPARED: usize = 4;

const _: () = assert!(MAX_PREPARED <= MAX_REQUESTS);

impl Connection {
    /// Binds memory to the transfers at the head of the queue, or requests it. Stops at eager data,
    /// which may wait for the window while others can use the memory.
    /// While a transfer waits for memory, those behind it get no standing grants, because they
    /// would hold memory that the one in front may be waiting for.
    pub(super) fn prepare_bulk(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        let requests_all = stream.send.peer_names;
        let stops = |out: &OutputItem| {
            matches!(out, OutputItem::Lend(_))
                || (matches!(out, OutputItem::Eager { .. }) && !requests_all)
        };
        if stream.send.out.front().is_none_or(stops) || stream.send.sends_data {
            return;
        }
        let (mut asked, mut waiting) = (false, false);
        let modulus = Modulus::of(self.peer.align);
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
                    false => take_standing(&mut self.standing, bulk, modulus),
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
            self.mark_send(key);
        }
        self.mark_write(key);
    }

    pub(super) fn on_grant(&mut self, stream: u32, grant: PeerGrant) -> Result<(), Breach> {
        let id = grant.id;
        let bad = |why| Err(Breach::BadGrant { grant: id, why });
        if grant.len == 0 {
            return bad("no bytes");
        }
        if grant.addr.checked_add(grant.len.into()).is_none() {
            return bad("reaches past the end of the address space");
        }
        if self.peer_grants.insert(id.0, stream).is_some() {
            return bad("its id is in use");
        }
        if stream == 0 {
            if self.unwritable.contains(&grant.rkey) {
                self.refuse_grant(id);
                return Ok(());
            }
            if self.standing.len() >= MAX_STANDING {
                return bad("too many standing grants");
            }
            self.standing.push(grant);
            return Ok(());
        }
        let key = self.streams.known("GRANT", stream)?;
        let Some(key) = key.filter(|key| self.streams[*key].send.state != SendState::Reset) else {
            // The grant crossed this side's RESET.
            self.refuse_grant(id);
            return Ok(());
        };
        if !self.unwritable.is_empty() && self.unwritable.contains(&grant.rkey) {
            self.decline_grants(key);
        }
        let entry = &mut self.streams[key];
        if entry.send.sends_data {
            // The grant crossed a DECLINE, or this side cannot write to it.
            self.refuse_grant(id);
            return Ok(());
        }
        let waiting = entry.send.out.iter_mut().find_map(|out| match out {
            OutputItem::Bulk(bulk) if bulk.prepared && bulk.granted < bulk.len => Some(bulk),
            _ => None,
        });
        match waiting {
            Some(bulk) => {
                let rest = bulk.len - bulk.granted;
                if u64::from(grant.len) > rest {
                    return bad("more than was asked for");
                }
                let end = bulk.granted + u64::from(grant.len);
                let ends_section = bulk
                    .field
                    .is_some_and(|field| end == u64::from(field.at) || end == field.end());
                if u64::from(grant.len) < rest.min(MIN_GRANT.into()) && !ends_section {
                    return bad("too short a part of what was asked for");
                }
                if bulk.grants.is_empty()
                    && let Some(finish) = &mut bulk.finish
                {
                    // It has waited for memory, not for its turn: this part is queued like others
                    // that begin now.
                    *finish = self.write_ready.finish(grant.len.into()).max(*finish);
                }
                // No landing memory is that short: the peer has memory of its own for the field.
                let names = grant.len < MIN_GRANT
                    && bulk.field.is_some_and(|field| end == u64::from(field.at));
                bulk.granted += u64::from(grant.len);
                bulk.grants.push_back(grant);
                self.peer_names_requests |= names && self.side == Side::Client;
            }
            None => return bad("nothing was asked for"),
        }
        self.mark_write(key);
        Ok(())
    }

    /// Ends a grant of the peer, as the answer to one of its frames.
    pub(super) fn refuse_grant(&mut self, id: GrantId) {
        self.peer_grants.remove(&id.0);
        self.control.answer(Frame::Abort { id: id.0 });
    }

    pub(super) fn abort_grant(&mut self, id: GrantId) {
        self.peer_grants.remove(&id.0);
        self.control.push(Frame::Abort { id: id.0 });
    }
}

/// Takes the shortest standing grant that holds the whole transfer from the address on at which it
/// has to begin. Returns the part from that address on.
fn take_standing(
    standing: &mut Vec<PeerGrant>,
    bulk: &Bulk,
    modulus: Modulus,
) -> Option<PeerGrant> {
    let offset = |grant: &PeerGrant| alignment::offset(modulus, grant.addr, bulk.begin);
    let holds = |grant: &PeerGrant| bulk.len + u64::from(offset(grant)) <= u64::from(grant.len);
    let (at, _) = standing
        .iter()
        .enumerate()
        .filter(|(_, grant)| holds(grant))
        .min_by_key(|(_, grant)| grant.len)?;
    let grant = standing.swap_remove(at);
    let begin = offset(&grant);
    Some(PeerGrant { addr: grant.addr + u64::from(begin), len: grant.len - begin, begin, ..grant })
}
