//! The streams of a connection, and the delivery of received payload to them.

use std::collections::VecDeque;

use bytes::Bytes;
use tonic::Status;
use tonic_rdma_fabric::turn;
use tonic_rdma_proto::{Connection, StreamId, StreamMap};

use crate::connection::call::stream_io::{Fault, StreamIo};
use crate::connection::driver::handle::ReadyTasks;
use crate::connection::receive::delays::{MAX_WORK, Reading, Relief};
use crate::connection::receive::unread::{Arrival, PayloadPlace};
use crate::telemetry::stats::Copied;

/// Maximum number of streams for which a connection at rest keeps memory.
const MAX_AT_REST: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) io: StreamMap<StreamIo>,
    /// Streams that the peer has opened and no task serves yet, with their header blocks.
    pub(crate) opened: VecDeque<(StreamId, Bytes)>,
    /// Whether a log line has already reported that calls wait until the peer allows more streams.
    pub(crate) limit_told: bool,
}

impl Streams {
    /// Adds a stream that the peer has opened. `ended` says that the peer's half has already ended.
    pub(crate) fn open(&mut self, id: StreamId, block: Bytes, ended: bool) {
        // Insert the stream now, because pieces of the body may follow in the same message.
        self.io.insert(id, StreamIo::opened(ended));
        self.opened.push_back((id, block));
    }

    /// Frees the memory that only many streams need.
    pub(crate) fn shrink(&mut self) {
        if self.io.capacity() > MAX_AT_REST {
            self.io.shrink_to_fit();
            self.opened.shrink_to_fit();
        }
    }

    /// Whether a reader waits for the peer's next data on this stream, or all further data is
    /// dropped.
    pub(crate) fn is_awaited(&self, id: StreamId) -> bool {
        self.io.get(&id).is_some_and(StreamIo::is_awaited)
    }

    /// Changes a stream's state and wakes its reader and its writer.
    pub(crate) fn change(
        &mut self,
        id: StreamId,
        tasks: &mut ReadyTasks,
        change: impl FnOnce(&mut StreamIo),
    ) {
        if let Some(io) = self.io.get_mut(&id) {
            change(io);
            tasks.wake(io.recv_waker.take());
            tasks.wake(io.send_waker.take());
        }
    }

    /// Fails a stream with `status`, for a reason on this side.
    pub(crate) fn fail(&mut self, id: StreamId, status: Status, tasks: &mut ReadyTasks) {
        self.change(id, tasks, |io| {
            io.fault.get_or_insert(Fault::Local(status));
        });
    }

    /// Wakes the readers and writers of all streams.
    pub(crate) fn wake_all(&mut self, tasks: &mut ReadyTasks) {
        // Sort the streams by id, so that a simulated run can be repeated.
        let mut streams: Vec<_> = self.io.iter_mut().collect();
        streams.sort_unstable_by_key(|(id, _)| **id);
        for (_, io) in streams {
            tasks.wake(io.recv_waker.take());
            tasks.wake(io.send_waker.take());
        }
    }

    /// Adds a piece to the unread data of a stream. If the stream lags and the piece is not copied
    /// here, the stream is added to `relief`. `copied` counts a piece that is copied here.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        id: StreamId,
        arrival: Arrival,
        conn: &mut Connection,
        relief: &mut Relief,
        copied: &mut Copied,
        tasks: &mut ReadyTasks,
    ) {
        let Arrival { part, flow, place, end } = arrival;
        let Some(io) = self.io.get_mut(&id) else { return };
        io.ended |= end;
        let place = match place {
            PayloadPlace::Landing { .. } if io.reading == Reading::Lagging => {
                match tasks.work < MAX_WORK {
                    true => PayloadPlace::Heap,
                    false => {
                        relief.add(id);
                        place
                    }
                }
            }
            place => place,
        };
        let len = part.len() as u32;
        let discard = io.discard;
        if !discard && len > 0 {
            let count = match place {
                PayloadPlace::Heap => Some(&mut copied.pressure),
                _ if !io.unread.joins(part.len(), place) => None,
                PayloadPlace::Message => Some(&mut copied.eager),
                PayloadPlace::Landing { .. } | PayloadPlace::Named | PayloadPlace::Lent => {
                    Some(&mut copied.joined)
                }
            };
            if let Some(count) = count {
                *count += u64::from(len);
                tasks.work += turn::copies(len as usize);
            }
            io.unread.push(part, flow, place);
        }
        let waker = io.recv_waker.take();
        tasks.wake(waker);
        if discard {
            conn.consume(id, len, flow);
        }
    }
}
