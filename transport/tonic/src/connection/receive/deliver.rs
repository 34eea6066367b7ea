//! Delivery of received payload to the streams.

use tonic_rdma_fabric::turn;
use tonic_rdma_proto::{Flow, StreamId};

use crate::codec::Part;
use crate::connection::receive::relieve::MAX_WORK;
use crate::connection::receive::stall::Reading;
use crate::connection::receive::unread::Place;
use crate::connection::state::ConnectionState;

impl ConnectionState {
    /// Adds `part` to what the stream's reader has not read.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        id: StreamId,
        part: Part,
        flow: Flow,
        place: Place,
        end: bool,
    ) {
        let Some(io) = self.streams.io.get_mut(&id) else { return };
        io.ended |= end;
        let place = match place {
            Place::Landing { .. } if io.reading == Reading::Lagging => {
                match self.tasks.work < MAX_WORK {
                    true => Place::Heap,
                    false => {
                        self.landing.relief.add(id);
                        place
                    }
                }
            }
            place => place,
        };
        let len = part.len() as u32;
        let discard = io.discard;
        if !discard && len > 0 {
            let copied = match place {
                Place::Heap => Some(&mut self.usage.copied.pressure),
                _ if !io.unread.joins(part.len(), place) => None,
                Place::Message => Some(&mut self.usage.copied.eager),
                Place::Landing { .. } | Place::Named | Place::Lent => {
                    Some(&mut self.usage.copied.joined)
                }
            };
            if let Some(copied) = copied {
                *copied += u64::from(len);
                self.tasks.work += turn::copies(len as usize);
            }
            io.unread.push(part, flow, place);
        }
        let waker = io.recv_waker.take();
        self.tasks.wake(waker);
        if discard {
            self.conn.consume(id, len, flow);
        }
    }

    /// A reader begins to wait for a stream, whose message may have been left where it is, as
    /// others read too little.
    #[inline]
    pub(crate) fn reader_waits(&mut self, id: StreamId) {
        if self.conn.waits_for_readers() {
            self.conn.reader_waits(id);
            self.flush_soon();
        }
    }

    /// Bytes have been read, or will not be.
    #[inline]
    pub(crate) fn consume(&mut self, id: StreamId, flows: [(u32, Flow); 2]) {
        for (len, flow) in flows {
            if len > 0 {
                self.conn.consume(id, len, flow);
            }
        }
    }
}
