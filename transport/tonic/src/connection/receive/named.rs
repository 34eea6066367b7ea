//! Grants of buffers that callers have named for their replies.
//!
//! | the buffer | on | next |
//! |---|---|---|
//! | belongs to a call | the server requests memory for the field of the reply | registering, on the landing thread where the device is slow |
//! | belongs to a call | the field is too long, or what the device has cannot be named | the message lands in landing memory |
//! | registering | it is registered | granted |
//! | registering | it could not be | the message lands in landing memory |
//! | registering | the call has ended | given up |

use std::sync::Arc;

use tonic_rdma_memory::RegionError;
use tonic_rdma_proto::{GrantMemory, NamedWant, ResetCode, Side, StreamId};

use crate::connection::receive::landing::{Granted, Naming};
use crate::connection::state::ConnectionState;
use crate::land_in::Claimed;
use crate::land_in::WhyCopied;

impl ConnectionState {
    /// What is received on this stream, which has just been opened, is to land in a buffer.
    pub(in crate::connection) fn name_memory(&mut self, id: StreamId, named: &Arc<Claimed>) {
        let Some(io) = self.streams.io.get_mut(&id) else { return };
        io.named = Some(named.clone());
        if self.landing.copy_on_delivery {
            named.will_be_copied(WhyCopied::CopyOnDelivery);
        } else if !self.landing.account.can_name() {
            named.will_be_copied(WhyCopied::SharedMemory);
        } else {
            match self.conn.side() {
                Side::Client => self.conn.name_memory(id),
                Side::Server => self.conn.decide_naming(id, true),
            }
            return;
        }
        self.conn.decide_naming(id, false);
    }

    /// Registers the buffers that the protocol wants, and grants those that are registered. True
    /// when the protocol may want more.
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

    /// False: the buffer is being registered.
    fn register(&mut self, want: NamedWant) -> bool {
        let NamedWant { stream, field, offset } = want;
        let named = self.streams.io.get(&stream).and_then(|io| io.named.clone());
        let fits = named.as_ref().map_or(Ok(false), |named| named.fits(field as usize));
        match (named, fits) {
            (Some(named), Ok(true)) => {
                let (lease, range) = (named.lease.clone(), offset as usize..field as usize);
                let registration = self.landing.account.register_named(lease, range);
                self.landing.naming.push(Naming { stream, registration });
                return false;
            }
            (_, Err(status)) => {
                self.conn.reset(stream, ResetCode::CANCEL);
                self.fail_stream(stream, status);
            }
            _ => self.conn.refuse_named(stream),
        }
        true
    }

    fn grant_registered(&mut self) -> bool {
        let mut granted = false;
        let mut naming = std::mem::take(&mut self.landing.naming);
        naming.retain(|Naming { stream, registration }| {
            let Some(result) = registration.take_result() else {
                // The end of the call gives it up.
                return self.streams.io.contains_key(stream);
            };
            granted = true;
            match result {
                Ok(buffer) => {
                    let len = u32::try_from(buffer.capacity()).unwrap_or(u32::MAX);
                    let (addr, rkey) = (buffer.addr(), buffer.rkey());
                    let key = self.landing.granted.insert(Granted::Named(buffer));
                    self.conn.provide_named(*stream, GrantMemory { key, addr, rkey, len });
                }
                Err(error) => self.not_registered(*stream, &error),
            }
            false
        });
        self.landing.naming = naming;
        granted
    }

    fn not_registered(&mut self, stream: StreamId, error: &RegionError) {
        tracing::debug!(%error, %stream, "a buffer to land in is not registered: the field is copied");
        if let Some(named) = self.streams.io.get(&stream).and_then(|io| io.named.as_ref()) {
            named.will_be_copied(WhyCopied::NotRegistered(error.to_string()));
        }
        self.conn.refuse_named(stream);
    }
}
