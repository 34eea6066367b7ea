//! Handles the expired delays of landing memory: lets messages land in parts, and copies unread
//! data.

use tokio::time::Instant;
use tonic_rdma_fabric::turn::{self, COPY_UNIT};
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::call::streams::Streams;
use crate::connection::driver::handle::ReadyTasks;
use crate::connection::receive::LandingMemory;
use crate::connection::receive::delays::{MAX_WORK, Reading, Relief};
use crate::telemetry::stats::Copied;

impl LandingMemory {
    /// Starts the grace turns if the stall delay, or the wait for memory in one piece, is over by
    /// `now`. Returns true if one of them is over. The driver then has to run again.
    pub(crate) fn timed_out(&mut self, now: Instant) -> bool {
        let delays = [&self.wait.0, &self.stall.0];
        let over = delays.iter().any(|delay| delay.deadline().is_some_and(|at| at <= now));
        if over {
            self.grace.begin();
        }
        over
    }

    /// Counts one run of the driver's task as a grace turn. Handles expired delays after the last
    /// turn, and otherwise continues to copy unread data. Returns true if messages may be ready to
    /// send.
    #[inline]
    pub(crate) fn grace_turn(
        &mut self,
        conn: &mut Connection,
        streams: &mut Streams,
        copied: &mut Copied,
        tasks: &mut ReadyTasks,
    ) -> bool {
        if self.grace.is_running() && self.grace.turn() {
            let now = Instant::now();
            self.wait.0.expire(now);
            self.relieve_stall(now, conn, streams, copied, tasks);
        } else if self.relief.is_running() {
            self.relieve(streams, copied, tasks);
        } else {
            return false;
        }
        true
    }

    /// Starts to copy unread data to the heap, if the stall delay has expired.
    fn relieve_stall(
        &mut self,
        now: Instant,
        conn: &mut Connection,
        streams: &mut Streams,
        copied: &mut Copied,
        tasks: &mut ReadyTasks,
    ) {
        if !self.stall.0.expire(now) {
            return;
        }
        if self.is_short {
            self.account.waited(now.into_std());
        }
        let want =
            conn.poll_landing(|id| streams.is_awaited(id)).map_or(0, |want| want.want as usize);
        let suspects = suspect_readers(streams).into();
        self.relief = Relief { streams: suspects, want, copied: 0, ends_stall: true };
        self.relieve(streams, copied, tasks);
    }

    /// Copies unread data, up to this turn's limit.
    fn relieve(&mut self, streams: &mut Streams, copied: &mut Copied, tasks: &mut ReadyTasks) {
        while let Some(&id) = self.relief.streams.front() {
            let room = MAX_WORK.saturating_sub(tasks.work) * COPY_UNIT;
            if room == 0 {
                return;
            }
            if let Some(io) = streams.io.get_mut(&id)
                && io.reading != Reading::UpToDate
            {
                io.reading = Reading::Lagging;
                let (moved, done) = io.unread.copy_out(room);
                self.relief.copied += moved;
                copied.pressure += moved as u64;
                tasks.work += 1 + turn::copies(moved);
                if !done {
                    continue;
                }
            }
            let relief = &mut self.relief;
            relief.streams.pop_front();
            // While chunks are to be reclaimed, copy everything, because a chunk can be returned
            // only when the whole chunk is free.
            if relief.copied >= relief.want && self.reclaim_delay.0.is_idle() {
                relief.streams.clear();
            }
        }
        let Relief { copied, ends_stall, .. } = std::mem::take(&mut self.relief);
        if !ends_stall {
            return;
        }
        // Do not let the account starve while memory may still become free: after the peer's WRITE,
        // or when a reader reads data.
        let moves =
            !self.granted.is_empty() || streams.io.values().any(|io| io.unread.has_landed());
        if copied == 0 && !moves && self.is_short && !self.account.is_pending() {
            self.account.starve();
        }
        self.stall.end();
    }
}

/// Returns the streams that had unread data when this function last ran and have not been read
/// since, sorted by id. Marks the other streams that have unread data now as suspected.
fn suspect_readers(streams: &mut Streams) -> Vec<StreamId> {
    let mut suspects = Vec::new();
    for (id, io) in streams.io.iter_mut().filter(|(_, io)| io.unread.has_landed()) {
        match io.reading {
            Reading::UpToDate => io.reading = Reading::Suspected,
            Reading::Suspected | Reading::Lagging => suspects.push(*id),
        }
    }
    suspects.sort_unstable();
    suspects
}
