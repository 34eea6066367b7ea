//! Acts on the delays of landing memory: messages land in parts, or what nobody reads is copied.

use tonic_rdma_fabric::turn;
use tonic_rdma_proto::StreamId;

use crate::connection::receive::stall::Reading;
use crate::connection::state::ConnectionState;

impl ConnectionState {
    /// The connection's timer has expired. Has the driver run again if that concerns landing
    /// memory.
    pub(in crate::connection) fn landing_timeout(&mut self, now: tokio::time::Instant) {
        let delays = [&self.landing.wait.0, &self.landing.stall.0];
        if delays.iter().any(|delay| delay.deadline().is_some_and(|at| at <= now)) {
            self.landing.grace.begin();
            self.wake_driver();
        }
    }

    /// The driver's task runs.
    #[inline]
    pub(in crate::connection) fn grace_turn(&mut self) {
        if self.landing.grace.is_running() && self.landing.grace.turn() {
            let now = tokio::time::Instant::now();
            self.landing.wait.0.expire(now);
            self.relieve_stall(now);
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
        let want = self.conn.poll_landing().map_or(0, |want| want.want as usize);
        let suspects = self.suspect_readers();
        let mut copied = 0;
        for id in suspects {
            let Some(io) = self.streams.io.get_mut(&id) else { continue };
            io.reading = Reading::Lagging;
            copied += io.unread.copy_out();
            // A chunk that goes back has to be free as a whole.
            if copied >= want && self.landing.reclaim_delay.0.is_idle() {
                break;
            }
        }
        self.usage.copied.pressure += copied as u64;
        self.work += turn::copies(copied);
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
