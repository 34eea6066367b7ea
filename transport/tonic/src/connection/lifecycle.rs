//! The life of a connection: whether the connection takes calls, and otherwise why not.

use tokio::sync::watch;
use tonic::Status;
use tonic_rdma_fabric::{LinkError, PeerInfo};
use tonic_rdma_memory::Forked;
use tonic_rdma_proto::{CloseCode, Connection};

use crate::connection::driver::handle::ReadyTasks;
use crate::path::reason::{Reason, ReasonCode};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Life {
    Open,
    /// This side ends the connection, after an error or in good order. The link may not have sent
    /// the CLOSE frame yet.
    Closing(Reason),
    /// The connection has ended. The driver destroys the queue pair next.
    Dead(Reason),
}

/// The life of one connection, and the reports about it to the channel.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    pub(crate) peer: PeerInfo,
    life: Life,
    /// Why new calls take another path while the calls in flight continue on this connection.
    leaving: Option<Reason>,
    /// Reports `leaving` to the channel. The driver's teardown reports the end of the connection
    /// through a clone of this sender.
    closed: watch::Sender<Option<Reason>>,
}

impl Lifecycle {
    pub(crate) fn new(peer: PeerInfo, closed: watch::Sender<Option<Reason>>) -> Self {
        Lifecycle { peer, life: Life::Open, leaving: None, closed }
    }

    #[inline]
    pub(crate) fn life(&self) -> &Life {
        &self.life
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.life, Life::Dead(_))
    }

    #[inline]
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Why calls cannot continue. `None` while calls can continue.
    #[inline]
    pub(crate) fn end_reason(&self) -> Option<&Reason> {
        match &self.life {
            Life::Open => None,
            Life::Closing(reason) | Life::Dead(reason) => Some(reason),
        }
    }

    /// The status of a call whose connection has ended (R7).
    #[inline]
    pub(crate) fn end_status(&self) -> Option<Status> {
        self.end_reason().map(ended)
    }

    /// Makes new calls take another path, for this reason: a client tells its channel, and a server
    /// sends GOAWAY to the client. Calls that wait until the server allows them also take another
    /// path. Calls in flight continue on this connection. Later reasons are ignored.
    pub(crate) fn leave(&mut self, reason: Reason, conn: &mut Connection, tasks: &mut ReadyTasks) {
        if self.leaving.is_some() || !self.is_open() {
            return;
        }
        conn.go_away(CloseCode::Resources, &reason.to_string());
        conn.refuse_waiting();
        self.closed.send_replace(Some(reason.clone()));
        self.leaving = Some(reason);
        tasks.wake_driver();
    }

    /// Why the connection takes no new calls.
    pub(crate) fn why_no_calls(&self) -> Reason {
        let going = "the server takes no new calls on this connection";
        let leaving = self.leaving.clone();
        leaving.unwrap_or_else(|| Reason::from_peer(ReasonCode::GoAway, going))
    }

    /// Begins or advances the end of the connection. Returns false if `life` is not later than the
    /// current state.
    pub(crate) fn end(&mut self, life: Life) -> bool {
        if self.is_dead() || (!self.is_open() && matches!(life, Life::Closing(_))) {
            return false;
        }
        // Report to the channel the reason for leaving, and not the orderly end that follows.
        self.life = match (life, &self.leaving) {
            (Life::Closing(reason), Some(why)) if reason.code() == ReasonCode::GoAway => {
                Life::Closing(why.clone())
            }
            (Life::Dead(reason), Some(why)) if reason.code() == ReasonCode::GoAway => {
                Life::Dead(why.clone())
            }
            (life, _) => life,
        };
        true
    }

    pub(crate) fn lost(&self, error: &LinkError) -> Reason {
        Reason::new(ReasonCode::LinkLost, format!("{error} ({})", self.peer))
    }
}

/// The status of a call whose connection has ended for this reason (R7).
pub(crate) fn ended(reason: &Reason) -> Status {
    let how = match reason.code() {
        ReasonCode::GoAway => "closed",
        _ => "lost",
    };
    Status::unavailable(format!("connection {how}: {reason}"))
}

/// The status of a call whose connection belongs to a parent process.
#[cold]
pub(crate) fn inherited() -> Status {
    Status::unavailable(Forked("the connection").to_string())
}
