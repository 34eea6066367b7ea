//! The task that keeps a channel on its fast path. The task makes one attempt at a time, falls back
//! to TCP when the path fails, and tries again.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic_rdma_memory::{LogThrottle, PerProcess, throttled};
use tonic_rdma_proto::Side;

use crate::channel::attempt::Plan;
use crate::channel::backoff::{self, Backoff};
use crate::channel::rails::Left;
use crate::channel::shared::{ChannelState, Fast, FastPathState};
use crate::connection::FastClient;
use crate::context::Changes;
use crate::executor::{SharedExec, boxed};
use crate::path::Path;
use crate::path::reason::{self, Reason, ReasonCode};
use crate::telemetry::metrics;

/// Time limit of an attempt, unless `connect` waits longer for the fast path. An attempt may
/// continue after `connect` has returned.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);

/// Pairs of origin and path for which this process has logged a line at INFO. Without this set, a
/// program that connects for each call would fill the log.
static TOLD: PerProcess<Mutex<HashSet<(String, &'static str)>>> = PerProcess::new(Mutex::default);
/// Number of pairs at which the set is cleared before another pair is added.
const MAX_TOLD: usize = 1024;

/// The handle to a manager, which all clones of a channel share. Dropping the handle ends the
/// manager.
#[derive(Debug)]
pub(crate) struct ManagerHandle {
    _stop: oneshot::Sender<()>,
}

pub(crate) struct Manager {
    shared: Arc<ChannelState>,
    plan: Plan,
    stop: oneshot::Receiver<()>,
    executor: SharedExec,
    /// How long `connect` waits for the first attempt.
    fast_path_timeout: Duration,
    log: Log,
}

impl Manager {
    pub(crate) fn new(
        shared: Arc<ChannelState>,
        plan: Plan,
        executor: SharedExec,
        fast_path_timeout: Duration,
    ) -> (Self, ManagerHandle) {
        let (stop_tx, stop) = oneshot::channel();
        let log = Log::new(plan.origin.uri.to_string(), plan.connection > 0);
        (
            Self { shared, plan, stop, executor, fast_path_timeout, log },
            ManagerHandle { _stop: stop_tx },
        )
    }

    /// Spawns the manager on its executor.
    pub(crate) fn start(self) {
        self.executor.clone().spawn(boxed(self.run()));
    }

    /// Runs until the last clone of the channel is dropped. Then the fast path closes once the
    /// calls in flight have ended.
    async fn run(self) {
        let Self { shared, plan, mut stop, executor, fast_path_timeout, mut log } = self;
        // The managers of the other connections end together with this manager.
        let mut further = Vec::new();
        let open = |connection| {
            let state = Arc::new(shared.further());
            let plan = Plan { connection, ..plan.clone() };
            let (manager, handle) =
                Manager::new(state.clone(), plan, executor.clone(), fast_path_timeout);
            manager.start();
            further.push(handle);
            state
        };
        tokio::select! {
            _ = &mut stop => {}
            () = maintain(&shared, &plan, fast_path_timeout, &mut log, open) => {}
        }
        let reason = Reason::new(ReasonCode::LinkLost, "the channel is gone");
        if let FastPathState::Up(fast) = shared.state.send_replace(FastPathState::Down(reason)) {
            fast.client.shutdown();
        }
    }
}

async fn maintain(
    shared: &ChannelState,
    plan: &Plan,
    fast_path_timeout: Duration,
    log: &mut Log,
    mut open: impl FnMut(usize) -> Arc<ChannelState>,
) {
    shared.start.wait().await;
    let mut backoff = Backoff::default();
    let verbs = plan.context.paths(&plan.fabrics).contains(&Path::Verbs);
    let mut changes = plan.context.changes(if verbs { Path::Verbs } else { Path::Tcp });
    let mut jitter = plan.context.jitter();
    let mut since = Reason::new(ReasonCode::Pending, "the fast path is being set up");
    loop {
        shared.state.send_replace(FastPathState::Trying { since: since.clone() });
        changes.seen();
        shared.counters.attempts.add(1);
        let attempted = attempt(shared, plan, fast_path_timeout, log).await;
        // Check the port, because a connection can come up although its port is down. Some devices
        // connect without a carrier, at least to themselves.
        let attempted = attempted.and_then(|fast| match changes.obstacle(fast.client.peer()) {
            Some(reason) if !shared.required => {
                plan.rails.left(plan.connection, Left::Blocked, plan.context.rails());
                Err(reason)
            }
            _ => Ok(fast),
        });
        let (reason, pause) = match attempted {
            Ok(mut fast) => {
                let up = Instant::now();
                let over_network = Path::of(fast.client.peer()).leaves_host();
                backoff.up();
                shared.counters.connections.add(1);
                let reason = loop {
                    log.up(&fast);
                    if plan.connection == 0 {
                        plan.rails.open_others(&mut open);
                    }
                    let client = fast.client.clone();
                    shared.state.send_replace(FastPathState::Up(fast));
                    let reason = ended(client, shared, plan, &mut changes).await;
                    let lost = reason.code() == ReasonCode::LinkLost;
                    shared.counters.connections_lost.add(u64::from(lost));
                    let why = Left::by(reason.code());
                    plan.rails.left(plan.connection, why, plan.context.rails());
                    log.lost();
                    // Let calls continue over another rail, if one is up.
                    let next = if plan.connection == 0 { plan.rails.promote() } else { None };
                    match next {
                        Some(next) => fast = next,
                        None => break reason,
                    }
                    log.continued(&reason);
                };
                let by_network = over_network && !shared.required;
                (reason, backoff.lost(up.elapsed(), by_network, &mut jitter))
            }
            Err(reason) => {
                let pause = backoff.failed(reason.code(), &mut jitter);
                (reason, pause)
            }
        };
        log.down(&reason);
        let unreachable = reason.code() == ReasonCode::PeerUnreachable;
        // Replacing the state drops the last client of a connection that drains. The connection's
        // driver then ends the connection.
        shared.state.send_replace(FastPathState::Down(reason.clone()));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Try again, because a change on this host may have removed the cause.
            () = changes.next() => {}
            // Try again, because an answered call proves that the server is reachable.
            () = shared.tcp.answered(), if unreachable => {
                tokio::time::sleep(backoff::spread(&mut jitter).min(pause)).await;
            }
        }
        // If this is not the first connection, wait until a call wants it, because no call waits
        // for it now.
        if plan.connection > 0 {
            shared.start.wait_again().await;
        }
        since = reason;
    }
}

/// Waits until a connection takes no more calls, cannot reach its peer for now, or was handed over
/// to the first connection's manager, and returns the reason. Calls in flight continue, because the
/// obstacle may go away before the connection is lost. New calls also continue to use the
/// connection if no other path could carry them.
async fn ended(
    client: FastClient,
    shared: &ChannelState,
    plan: &Plan,
    changes: &mut Changes,
) -> Reason {
    let closed = client.closed();
    let mut closed = std::pin::pin!(closed);
    loop {
        tokio::select! {
            biased;
            reason = &mut closed => return reason,
            () = shared.stale.notified() => {}
            () = changes.next() => match changes.obstacle(client.peer()) {
                Some(reason) if !shared.required || plan.rails.has_another() => {
                    client.shutdown();
                    return reason;
                }
                _ => continue,
            },
        }
        // Check the state, because the notification may be about the previous connection.
        if let Some(reason) = client.ending().or_else(|| shared.is_handed_over()) {
            return reason;
        }
    }
}

/// Makes one attempt. If `connect` stops waiting before the attempt ends, the state becomes Down
/// and the attempt continues.
async fn attempt(
    shared: &ChannelState,
    plan: &Plan,
    fast_path_timeout: Duration,
    log: &mut Log,
) -> Result<Fast, Reason> {
    let patience = tokio::time::Instant::now() + fast_path_timeout;
    let limit = ATTEMPT_LIMIT.max(fast_path_timeout);
    let mut attempt = std::pin::pin!(plan.attempt(limit, patience));
    match tokio::time::timeout_at(patience, &mut attempt).await {
        Ok(result) => result,
        Err(_) => {
            let late = Reason::new(
                ReasonCode::HandshakeTimeout,
                format!("not up after {} ms; still trying", fast_path_timeout.as_millis()),
            );
            log.down(&late);
            shared.state.send_replace(FastPathState::Down(late));
            attempt.await
        }
    }
}

/// Counts each decision and logs it once. Repetitions are logged at DEBUG.
struct Log {
    origin: String,
    logged: Option<(ReasonCode, crate::path::reason::Side)>,
    was_up: bool,
    /// True for every connection except the channel's first connection. Only the first connection
    /// decides the path, so other connections log only at DEBUG.
    further: bool,
    throttle: LogThrottle,
}

impl Log {
    fn new(origin: String, further: bool) -> Self {
        Self { origin, logged: None, was_up: false, further, throttle: LogThrottle::new() }
    }

    fn up(&mut self, fast: &Fast) {
        let tcp_was_told = self.logged.take().is_some();
        let peer = fast.client.peer();
        if self.further {
            return tracing::debug!(origin = %self.origin, %peer, "a connection over another rail");
        }
        let again = std::mem::replace(&mut self.was_up, true);
        if again {
            metrics::reconnect(Path::of(peer));
        }
        let is_news = self.is_first(peer.provider) || again || tcp_was_told;
        if !is_news {
            return tracing::debug!(origin = %self.origin, %peer, "another channel over the fast path");
        }
        throttled!(
            in self.throttle,
            info,
            origin = %self.origin,
            path = peer.provider,
            device = %peer.device,
            local = %peer.local,
            remote = %peer.remote,
            "calls go over the fast path"
        );
    }

    /// Whether the process has not yet reported that calls to the origin take this path.
    fn is_first(&self, path: &'static str) -> bool {
        let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() >= MAX_TOLD {
            told.clear();
        }
        told.insert((self.origin.clone(), path))
    }

    /// Reports that the connection is lost and another rail has replaced it.
    fn continued(&self, reason: &Reason) {
        throttled!(in self.throttle, info, origin = %self.origin, %reason, "another rail takes over");
    }

    fn lost(&mut self) {
        self.logged = None;
    }

    fn down(&mut self, reason: &Reason) {
        if self.further {
            return tracing::debug!(origin = %self.origin, %reason, "no other connection: its calls take the first");
        }
        // Log only at DEBUG, because the runtime is shutting down, and another of its threads has
        // already ended the connection.
        if (reason.code(), reason.side()) == (ReasonCode::GoAway, reason::Side::Local) {
            return tracing::debug!(origin = %self.origin, %reason, "this end has closed the connection");
        }
        metrics::fallback(Side::Client, reason);
        let this = Some((reason.code(), reason.side()));
        if self.logged == this {
            tracing::debug!(origin = %self.origin, %reason, "calls still go over TCP");
            return;
        }
        self.logged = this;
        throttled!(
            in self.throttle,
            warn,
            origin = %self.origin,
            path = "tcp",
            code = reason.code().as_str(),
            %reason,
            cure = reason.cure(),
            "calls go over TCP"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::logs::Logs;

    #[test]
    fn the_end_of_the_runtime_is_no_fallback() {
        let logs = Logs::capture();
        let mut log = Log::new("http://h".to_owned(), false);
        log.down(&Reason::new(ReasonCode::GoAway, "the runtime has ended"));
        assert!(logs.lines_with("calls go over TCP").is_empty());
        log.down(&Reason::from_peer(ReasonCode::GoAway, "closed in good order"));
        assert_eq!(logs.lines_with("calls go over TCP").len(), 1);
    }
}
