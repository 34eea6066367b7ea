//! Handles the link's completions and errors, and the end of a connection.

use std::task::{Context, Poll, Waker};

use tonic_rdma_fabric::{Link, LinkError};
use tonic_rdma_proto::{CloseCode, Side};

use crate::connection::driver::scratch;
use crate::connection::lifecycle::Life;
use crate::connection::state::ConnectionState;
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

/// Number of polls for the completion of the last message of a connection whose driver is dropped.
const GOODBYE_POLLS: usize = 1000;

impl ConnectionState {
    /// Takes and handles the link's completions. Returns true if the link has no more completions
    /// for now.
    pub(super) fn poll_link(&mut self, cx: &mut Context<'_>) -> bool {
        let mut error = self.tasks.driver.take_error();
        let mut idle = true;
        if let (Some(link), None) = (self.link.get_mut(), &error) {
            let mut completions = scratch::take_completions();
            match link.poll(cx, &mut completions) {
                Poll::Pending => {}
                Poll::Ready(result) => {
                    idle = false;
                    error = result.err();
                }
            }
            self.link.return_leases(cx, &mut self.conn);
            self.usage.polled(completions.len());
            self.tasks.work += completions.len();
            // Handle the completions even after an error, because the completions came before the
            // error.
            let result = self.complete(&completions);
            scratch::put_completions(completions);
            error = error.or(result.err());
        }
        if let Some(error) = error {
            let reason = self.end_reason_of(&error);
            tracing::debug!(%reason, "connection ended");
            self.end(Life::Dead(reason));
        }
        idle
    }

    /// Tells the peer that the connection ends, if the end fails none of the peer's calls: a client
    /// gives up its own calls, or a server has no calls. Any other end cuts calls off, so the peer
    /// should report a lost connection.
    pub(super) fn say_goodbye(&mut self) {
        let is_clean = self.conn.side() == Side::Client || self.conn.pending().streams == 0;
        if !self.lifecycle.is_open() || !is_clean {
            return;
        }
        let text = "the runtime has ended";
        self.conn.close(CloseCode::Ok, text);
        self.end(Life::Closing(Reason::new(ReasonCode::GoAway, text)));
        self.flush();
        // Poll here, because the driver no longer polls, and a device needs a moment to send. If
        // the message is not sent, the peer still notices the end.
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..GOODBYE_POLLS {
            // Flush again, because the message may have waited for a SEND slot.
            if self.conn.is_due() {
                self.flush();
            }
            if self.link.is_idle() || self.lifecycle.is_dead() {
                break;
            }
            std::thread::yield_now();
            self.poll_link(&mut cx);
        }
    }

    fn end_reason_of(&self, error: &LinkError) -> Reason {
        if let Some(reason) = self.lifecycle.end_reason() {
            return reason.clone();
        }
        match error {
            LinkError::Closed { .. }
                if self.conn.pending().streams == 0 || !self.conn.takes_streams() =>
            {
                Reason::from_peer(
                    ReasonCode::GoAway,
                    format!("disconnected ({})", self.lifecycle.peer),
                )
            }
            // Report an orderly end, because shared memory reports this error only when the peer's
            // process releases the memory. No call fails.
            LinkError::Disconnected { peer }
                if Path::of(peer) == Path::Shm
                    && self.conn.side() == Side::Server
                    && self.conn.pending().streams == 0 =>
            {
                Reason::from_peer(ReasonCode::GoAway, format!("{error}, with no call in flight"))
            }
            _ => self.lifecycle.lost(error),
        }
    }

    /// Deregisters memory that was not needed for a while (R12).
    pub(super) fn tidy(&mut self, now: std::time::Instant) {
        if self.conn.lands_nothing(now) {
            self.landing.trim();
        }
        self.link.pool.trim(now);
    }
}
