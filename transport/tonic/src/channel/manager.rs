//! The task that keeps a channel on its fast path: it makes one attempt at a time, falls back to
//! TCP when the path fails, and tries again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic_rdma_proto::Side;

use crate::channel::attempt::{Fast, Plan};
use crate::channel::backoff::{self, Backoff};
use crate::channel::shared::{Shared, State};
use crate::connection::FastClient;
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::metrics;

/// Time limit of an attempt, which may continue after `connect` has returned.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);

/// Shared by all clones of a channel. Dropping it ends the manager.
#[derive(Debug)]
pub(crate) struct Handle {
    _stop: oneshot::Sender<()>,
}

pub(crate) struct Manager {
    shared: Arc<Shared>,
    plan: Plan,
    stop: oneshot::Receiver<()>,
    /// How long `connect` waits for the first attempt.
    fast_path_timeout: Duration,
    log: Log,
}

impl Manager {
    pub(crate) fn new(
        shared: Arc<Shared>,
        plan: Plan,
        fast_path_timeout: Duration,
    ) -> (Self, Handle) {
        let (stop_tx, stop) = oneshot::channel();
        let log = Log::new(plan.origin.uri.to_string());
        (Self { shared, plan, stop, fast_path_timeout, log }, Handle { _stop: stop_tx })
    }

    /// Makes this the manager of a further connection. Its state decides nothing, so it is logged
    /// at DEBUG only.
    pub(crate) fn secondary(mut self) -> Self {
        self.log.secondary = true;
        self
    }

    /// Runs until the last clone of the channel is dropped. The fast path then closes when the
    /// calls in flight have ended.
    pub(crate) async fn run(self) {
        let Self { shared, plan, mut stop, fast_path_timeout, mut log } = self;
        tokio::select! {
            _ = &mut stop => {}
            () = maintain(&shared, &plan, fast_path_timeout, &mut log) => {}
        }
        let reason = Reason::new(ReasonCode::LinkLost, "the channel is gone");
        if let State::Up(fast) = shared.state.send_replace(State::Down(reason)) {
            fast.client.shutdown();
        }
    }
}

async fn maintain(shared: &Shared, plan: &Plan, fast_path_timeout: Duration, log: &mut Log) {
    shared.begin.notified().await;
    let mut backoff = Backoff::default();
    let verbs = plan.context.paths(&plan.fabrics).contains(&Path::Verbs);
    let mut changes = plan.context.changes(if verbs { Path::Verbs } else { Path::Tcp });
    let mut rng = plan.context.rng();
    let mut since = Reason::new(ReasonCode::Pending, "the fast path is being set up");
    loop {
        shared.state.send_replace(State::Trying { since: since.clone() });
        changes.seen();
        shared.counters.attempts.add(1);
        let (reason, pause) = match attempt(shared, plan, fast_path_timeout, log).await {
            Ok(fast) => {
                let up = Instant::now();
                backoff.up();
                shared.counters.connections.add(1);
                log.up(&fast);
                let client = fast.client.clone();
                shared.state.send_replace(State::Up(fast));
                let reason = ended(client, shared).await;
                shared
                    .counters
                    .connections_lost
                    .add(u64::from(reason.code() == ReasonCode::LinkLost));
                log.lost();
                (reason, backoff.lost(up.elapsed(), &mut rng))
            }
            Err(reason) => {
                let pause = backoff.failed(reason.code(), &mut rng);
                (reason, pause)
            }
        };
        log.down(&reason);
        let unreachable = reason.code() == ReasonCode::PeerUnreachable;
        // The last clone of a connection that drains is dropped here, and its driver ends it.
        shared.state.send_replace(State::Down(reason.clone()));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A change on this host may have fixed the cause.
            () = changes.next() => {}
            // An answered call proves that the server is reachable again.
            () = shared.tcp.answered(), if unreachable => {
                tokio::time::sleep(backoff::spread(&mut rng).min(pause)).await;
            }
        }
        since = reason;
    }
}

/// Waits until a connection takes no more calls, and returns why.
async fn ended(client: FastClient, shared: &Shared) -> Reason {
    let closed = client.closed();
    let mut closed = std::pin::pin!(closed);
    loop {
        tokio::select! {
            biased;
            reason = &mut closed => return reason,
            () = shared.stale.notified() => {}
        }
        // The notification may concern the connection before this one.
        if let Some(reason) = client.ending() {
            return reason;
        }
    }
}

/// Makes one attempt. When it takes longer than `connect` waits, the state becomes Down and the
/// attempt continues.
async fn attempt(
    shared: &Shared,
    plan: &Plan,
    fast_path_timeout: Duration,
    log: &mut Log,
) -> Result<Fast, Reason> {
    let mut attempt = std::pin::pin!(plan.attempt(ATTEMPT_LIMIT.max(fast_path_timeout)));
    match tokio::time::timeout(fast_path_timeout, &mut attempt).await {
        Ok(result) => result,
        Err(_) => {
            let late = Reason::new(
                ReasonCode::HandshakeTimeout,
                format!("not up after {} ms; still trying", fast_path_timeout.as_millis()),
            );
            log.down(&late);
            shared.state.send_replace(State::Down(late));
            attempt.await
        }
    }
}

/// Counts each decision, and logs it once; repetitions are logged at DEBUG.
struct Log {
    origin: String,
    logged: Option<(ReasonCode, crate::path::reason::Side)>,
    was_up: bool,
    /// Of a further connection, not the first.
    secondary: bool,
}

impl Log {
    fn new(origin: String) -> Self {
        Self { origin, logged: None, was_up: false, secondary: false }
    }

    fn up(&mut self, fast: &Fast) {
        self.logged = None;
        let peer = fast.client.peer();
        if self.secondary {
            return tracing::debug!(origin = %self.origin, %peer, "another connection");
        }
        if std::mem::replace(&mut self.was_up, true) {
            metrics::reconnect(Path::of(peer));
        }
        tracing::info!(
            origin = %self.origin,
            path = peer.provider,
            device = %peer.device,
            local = %peer.local,
            remote = %peer.remote,
            "calls go over the fast path"
        );
    }

    fn lost(&mut self) {
        self.logged = None;
    }

    fn down(&mut self, reason: &Reason) {
        if self.secondary {
            return tracing::debug!(origin = %self.origin, %reason, "no other connection: its calls take the first");
        }
        metrics::fallback(Side::Client, reason);
        let this = Some((reason.code(), reason.side()));
        if self.logged == this {
            tracing::debug!(origin = %self.origin, %reason, "calls still go over TCP");
            return;
        }
        self.logged = this;
        tracing::warn!(
            origin = %self.origin,
            path = "tcp",
            code = reason.code().as_str(),
            %reason,
            cure = reason.cure(),
            "calls go over TCP"
        );
    }
}
