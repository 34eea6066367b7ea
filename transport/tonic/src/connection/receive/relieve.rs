//! Acts on the delays of landing memory: messages land in parts, or what nobody reads is copied.

use tonic_rdma_fabric::turn::{self, COPY_UNIT};
use tonic_rdma_proto::StreamId;

use crate::connection::receive::relief::Relief;
use crate::connection::receive::stall::Reading;
use crate::connection::state::ConnectionState;

/// The operations of a round of the driver after which it copies nothing more of what is unread:
/// the rest is copied in later turns (R20).
pub(super) const MAX_WORK: usize = 32;

impl ConnectionState {
    /// The connection's timer has expired. Has the driver run again if that concerns landing
    /// memory.
    pub(crate) fn landing_timeout(&mut self, now: tokio::time::Instant) {
        let delays = [&self.landing.wait.0, &self.landing.stall.0];
        if delays.iter().any(|delay| delay.deadline().is_some_and(|at| at <= now)) {
            self.landing.grace.begin();
            self.tasks.wake_driver();
        }
    }

    /// The driver's task runs.
    #[inline]
    pub(crate) fn grace_turn(&mut self) {
        if self.landing.grace.is_running() && self.landing.grace.turn() {
            let now = tokio::time::Instant::now();
            self.landing.wait.0.expire(now);
            self.relieve_stall(now);
            self.flush();
        } else if self.landing.relief.is_running() {
            self.relieve();
            self.flush();
        }
    }

    /// Makes room, if a stream has waited for a period.
    fn relieve_stall(&mut self, now: tokio::time::Instant) {
        if !self.landing.stall.0.expire(now) {
            return;
        }
        if self.landing.is_short {
            self.landing.account.waited(now.into_std());
        }
        let want = self.next_want().map_or(0, |want| want.want as usize);
        let streams = self.suspect_readers().into();
        self.landing.relief = Relief { streams, want, copied: 0, ends_stall: true };
        self.relieve();
    }

    /// Copies what nobody reads, as much as this turn has room for.
    fn relieve(&mut self) {
        while let Some(&id) = self.landing.relief.streams.front() {
            let room = MAX_WORK.saturating_sub(self.tasks.work) * COPY_UNIT;
            if room == 0 {
                return;
            }
            if let Some(io) = self.streams.io.get_mut(&id)
                && io.reading != Reading::UpToDate
            {
                io.reading = Reading::Lagging;
                let (copied, done) = io.unread.copy_out(room);
                self.landing.relief.copied += copied;
                self.usage.copied.pressure += copied as u64;
                self.tasks.work += 1 + turn::copies(copied);
                if !done {
                    continue;
                }
            }
            let relief = &mut self.landing.relief;
            relief.streams.pop_front();
            // A chunk that goes back has to be free as a whole.
            if relief.copied >= relief.want && self.landing.reclaim_delay.0.is_idle() {
                relief.streams.clear();
            }
        }
        let Relief { copied, ends_stall, .. } = std::mem::take(&mut self.landing.relief);
        if !ends_stall {
            return;
        }
        // What the peer is about to write, or is about to be read, comes free by itself.
        let moves = !self.landing.granted.is_empty()
            || self.streams.io.values().any(|io| io.unread.has_landed());
        if copied == 0 && !moves && self.landing.is_short && !self.landing.account.is_pending() {
            self.landing.account.starve();
        }
        self.landing.stall.end();
    }

    /// The streams that nobody has read since the last call although something was unread, in their
    /// order. Marks those that have something unread now.
    fn suspect_readers(&mut self) -> Vec<StreamId> {
        let mut suspects = Vec::new();
        for (id, io) in self.streams.io.iter_mut().filter(|(_, io)| io.unread.has_landed()) {
            match io.reading {
                Reading::UpToDate => io.reading = Reading::Suspected,
                Reading::Suspected | Reading::Lagging => suspects.push(*id),
            }
        }
        suspects.sort_unstable();
        suspects
    }
}
