//! Grants buffers that the application has named: a client for a reply, a server for a request.
//!
//! | the buffer | on | next |
//! |---|---|---|
//! | belongs to a call | the peer requests memory for the field | registering, on the landing thread if the device is slow |
//! | belongs to a call | the field is too long, or the peer would have to map a buffer that cannot be mapped | the message lands in landing memory |
//! | registering | the buffer is registered, and the peer need not map it | granted |
//! | registering | the buffer is registered, and the peer is asked to map it | mapping |
//! | mapping | the peer has mapped the buffer | granted |
//! | registering, mapping | the protocol returns the memory, because grants of the stream were recalled | belongs to a call |
//! | mapping | the peer cannot map the buffer | the message lands in landing memory |
//! | registering | the buffer could not be registered | the message lands in landing memory |
//! | registering, mapping | the call has ended | given up |

use std::sync::Arc;

use tonic_rdma_fabric::{Link, Shared};
use tonic_rdma_memory::RegionError;
use tonic_rdma_proto::{Connection, GrantMemory, NamedWant, Side, StreamId};

use crate::connection::call::streams::Streams;
use crate::connection::receive::grant::Granter;
use crate::connection::receive::{Granted, LandingMemory, Naming, NamingStep};
use crate::land_in::{Claimed, WhyCopied};

impl LandingMemory {
    /// Names a buffer for the data that is received on this newly opened stream.
    pub(crate) fn name_memory(
        &mut self,
        id: StreamId,
        named: &Arc<Claimed>,
        streams: &mut Streams,
        conn: &mut Connection,
    ) {
        let Some(io) = streams.io.get_mut(&id) else { return };
        io.named = Some(named.clone());
        if self.copy_on_delivery {
            named.will_be_copied(WhyCopied::CopyOnDelivery);
        } else if !self.account.can_name(&named.lease) {
            named.will_be_copied(WhyCopied::SharedMemory);
        } else {
            match conn.side() {
                Side::Client => conn.name_memory(id),
                Side::Server => conn.decide_naming(id, true),
            }
            return;
        }
        conn.decide_naming(id, false);
    }
}

impl Granter<'_> {
    /// Registers the buffers that the protocol wants, and grants the registered buffers. Returns
    /// true if a want was granted or refused, because the protocol may then want other memory.
    #[inline]
    pub(super) fn grant_named(&mut self) -> bool {
        let mut went_on = false;
        while let Some(want) = self.conn.poll_named() {
            went_on |= self.register(want);
        }
        if !self.landing.naming.is_empty() {
            went_on |= self.grant_registered();
        }
        went_on
    }

    /// Begins to register the buffer for a want, or refuses the want, for example because the field
    /// is too long. The decoder then fails the call, if the field belongs to the first message.
    /// Returns false if the buffer is being registered.
    fn register(&mut self, want: NamedWant) -> bool {
        let NamedWant { stream, field, offset } = want;
        let named = self.streams.io.get(&stream).and_then(|io| io.named.as_ref());
        let Some(named) = named.filter(|named| named.fits(field as usize)) else {
            self.conn.refuse_named(stream);
            return true;
        };
        let (lease, range) = (named.lease.clone(), offset as usize..field as usize);
        let registration = self.landing.account.register_named(lease, range);
        let step = NamingStep::Registering(registration);
        self.landing.naming.push(Naming { stream, step });
        false
    }

    fn grant_registered(&mut self) -> bool {
        let mut granted = false;
        let naming = std::mem::take(&mut self.landing.naming).into_iter();
        self.landing.naming = naming.filter_map(|it| self.advance(it, &mut granted)).collect();
        granted
    }

    /// Advances one buffer, and returns the buffer if it still waits. Sets `decided` once the
    /// stream's buffer is granted or given up.
    fn advance(&mut self, naming: Naming, decided: &mut bool) -> Option<Naming> {
        let Naming { stream, step } = naming;
        let buffer = match step {
            NamingStep::Mapping(buffer) => buffer,
            NamingStep::Registering(registration) => match registration.take_result() {
                Some(Ok(buffer)) => buffer,
                Some(Err(error)) => {
                    *decided = true;
                    self.not_registered(stream, &error);
                    return None;
                }
                // Keep waiting. If the call ends, `forget_naming` gives the buffer up.
                None => {
                    return Some(Naming { stream, step: NamingStep::Registering(registration) });
                }
            },
        };
        let shared = match self.link.get_mut() {
            Some(link) => link.share_named(buffer.rkey()),
            None => Ok(Shared::No),
        };
        match shared {
            Ok(Shared::Yes) => {
                let len = u32::try_from(buffer.capacity()).unwrap_or(u32::MAX);
                let (addr, rkey) = (buffer.addr(), buffer.rkey());
                let key = self.landing.granted.insert(Granted::Named(buffer));
                self.conn.provide_named(stream, GrantMemory { key, addr, rkey, len });
                self.tasks.work += 1;
            }
            Ok(Shared::Asked) => {
                return Some(Naming { stream, step: NamingStep::Mapping(buffer) });
            }
            Ok(Shared::No) => {
                if let Some(named) = self.streams.io.get(&stream).and_then(|io| io.named.as_ref()) {
                    named.will_be_copied(WhyCopied::SharedMemory);
                }
                self.conn.refuse_named(stream);
            }
            Err(error) => {
                self.tasks.fail(error);
            }
        }
        *decided = true;
        None
    }

    fn not_registered(&mut self, stream: StreamId, error: &RegionError) {
        tracing::debug!(%error, %stream, "a buffer to land in is not registered: the field is copied");
        if let Some(named) = self.streams.io.get(&stream).and_then(|io| io.named.as_ref()) {
            named.will_be_copied(WhyCopied::NotRegistered(error.to_string()));
        }
        self.conn.refuse_named(stream);
    }
}
