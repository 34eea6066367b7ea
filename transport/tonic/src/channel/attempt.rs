//! One attempt at the fast path: local device, Offer over TCP, connection and hello.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Accept, Hello};

use crate::bootstrap::client::{OfferHook, offer};
use crate::channel::backoff;
use crate::channel::rails::{self, Left, Rail, Rails};
use crate::channel::shared::Fast;
use crate::codec::Methods;
use crate::connection::{FastClient, KeepAliveSettings, Origin};
use crate::context::Context;
use crate::path::policy::FabricKind;
use crate::path::reason::{Reason, ReasonCode, Side};
use crate::path::{Path, from_error};
use crate::tcp::connector::TcpChannel;
use crate::telemetry::metrics;
use crate::telemetry::stats::Counters;

/// Time without an answer after which a second request is sent. A server answers within a few
/// milliseconds. A server that is too busy to answer the first request within this time answers the
/// second request late as well.
const SILENCE: Duration = Duration::from_millis(300);

/// The inputs of an attempt at the fast path.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) tcp: TcpChannel,
    pub(crate) origin: Arc<Origin>,
    pub(crate) hook: Option<OfferHook>,
    pub(crate) context: Context,
    pub(crate) env_device: Option<String>,
    pub(crate) env_type_of_service: Option<u8>,
    /// The fabrics to try, in order of preference.
    pub(crate) fabrics: Vec<FabricKind>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) methods: Arc<Methods>,
    pub(crate) max_header_size: Option<u32>,
    pub(crate) keep_alive: KeepAliveSettings,
    pub(crate) copy_on_delivery: bool,
    pub(crate) rails: Arc<Rails>,
    /// The number of the connection within its channel, from 0.
    pub(crate) connection: usize,
}

impl Plan {
    /// Makes one attempt, which takes at most `limit`. If the obstacle is temporary, the attempt
    /// tries again until `patience`, because `connect` waits until `patience` in any case. If a
    /// repeated try has not ended by `patience`, the result is the previous try's reason.
    ///
    /// Cancel safe: an attempt that fails or is dropped undoes what it has begun.
    pub(crate) async fn attempt(&self, limit: Duration, patience: Instant) -> Result<Fast, Reason> {
        let began = Instant::now();
        let mut deadline = began + limit;
        let mut jitter = self.context.jitter();
        let mut known = None;
        let attempted = loop {
            let tried = Instant::now();
            let attempted = tokio::time::timeout_at(deadline, self.run(deadline)).await;
            let pause = backoff::again(&mut jitter);
            // Wait only if the next try can end within `patience`. Otherwise return the reason now.
            let then = Instant::now() + pause + 2 * tried.elapsed();
            match attempted {
                Ok(Err(reason)) if reason.passes() && then < patience => {
                    tracing::debug!(%reason, "the fast path is tried again at once");
                    tokio::time::sleep(pause).await;
                    deadline = deadline.min(patience);
                    known = Some(reason);
                }
                Ok(Err(reason)) if reason.code() == ReasonCode::HandshakeTimeout => {
                    break Err(known.unwrap_or(reason));
                }
                Ok(result) => break result,
                Err(_) => {
                    let detail = || format!("no fast path after {} ms", limit.as_millis());
                    let late = || Reason::new(ReasonCode::HandshakeTimeout, detail());
                    break Err(known.unwrap_or_else(late));
                }
            }
        };
        match &attempted {
            Ok(fast) => metrics::handshake(Path::of(fast.client.peer()), began.elapsed()),
            Err(_) => self.rails.left(self.connection, Left::Closed, self.context.rails()),
        }
        attempted
    }

    async fn run(&self, deadline: Instant) -> Result<Fast, Reason> {
        let (mut paths, mut reasons, mut reached) = (Vec::new(), Vec::new(), Vec::new());
        let mut failed = Vec::new();
        for path in self.context.paths(&self.fabrics) {
            // A host without a device need not ask the server.
            match self.context.check(path, self.env_device.as_deref()).await {
                Ok(()) => paths.push(path),
                Err(reason) => reasons.push((path, reason)),
            }
        }
        // A ticket is valid for one connection. If one fabric has refused the ticket, the next
        // fabric needs another ticket.
        while !paths.is_empty() {
            let hook = self.hook.as_ref();
            let offered = offer(&self.tcp, self.origin.uri.clone(), hook, &paths).await?;
            reasons.extend(offered.refusals);
            let origin = self.origin.ending_with(offered.user_agent.as_ref());
            let device = self.env_device.as_deref();
            let rails = rails::find(&self.context, device, &offered.places, self.rails.turn).await;
            let rails = self.rails.order(self.connection, rails, self.context.rails());
            let mut left = rails.len() as u32;
            let mut spent = None;
            let mut ticket = Some(offered.ticket.0);
            for rail in rails {
                let (path, addr) = (rail.path, &rail.addr);
                // Divide the time, so that an address that does not answer leaves time for the next
                // addresses.
                let share = deadline.saturating_duration_since(Instant::now()) / left.max(1);
                left = left.saturating_sub(1);
                if spent.is_some_and(|spent| spent != path) {
                    break;
                }
                if !self.rails.tries(self.connection, &rail) {
                    continue;
                }
                let with = match ticket {
                    Some(ticket) => ticket,
                    None => offer(&self.tcp, self.origin.uri.clone(), hook, &paths).await?.ticket.0,
                };
                ticket = Some(with);
                let began = Instant::now();
                match self.connect(&rail, with, &origin, share).await {
                    Ok(fast) => {
                        failed.into_iter().for_each(|rail| self.context.rails().has_failed(rail));
                        self.rails.uses(self.connection, rail, &fast.client.peer().device);
                        return Ok(fast);
                    }
                    Err(reason) => {
                        tracing::debug!(%path, %addr, %reason, "no fast path over this address");
                        let was_silent = began.elapsed() >= SILENCE;
                        if is_of_the_rail(reason.code(), was_silent) {
                            failed.push(rail.key());
                        }
                        if was_silent || may_have_accepted(reason.code()) {
                            ticket = None;
                        }
                        // The server spends a ticket when it sees the ticket. A client that was
                        // refused because it runs as another user has not presented its ticket.
                        let refused = reason.code() == ReasonCode::OtherUser;
                        let seen = reason.side() == Side::Peer && !refused;
                        // A failed connect over shared memory does not count as reached, because
                        // the server may run on another host.
                        if seen || refused || path != Path::Shm {
                            reached.push(path);
                        }
                        tell(&mut reasons, path, reason);
                        // The host that refused may be another host, which has the same address in
                        // another network and does not know the ticket. So try the other addresses
                        // of this fabric before the next fabric.
                        if seen {
                            spent = Some(path);
                        }
                    }
                }
            }
            let Some(spent) = spent else { break };
            let tried = paths.iter().position(|path| *path == spent).unwrap_or(paths.len() - 1);
            paths.drain(..=tried);
        }
        let none = || match self.connection {
            0 => Reason::new(ReasonCode::Policy, "no fabric is allowed"),
            _ => Reason::new(
                ReasonCode::NoRoute,
                "this channel already has a connection on each rail",
            ),
        };
        Err(from_error::foremost(reasons, &reached).unwrap_or_else(none))
    }

    /// Connects over one rail. If no answer comes within [`SILENCE`], a second request with its own
    /// ticket is sent in parallel with the first. A new request replaces the second request after
    /// [`SILENCE`], then after twice that time, and so on, because the connection manager repeats a
    /// lost request only after four seconds. The first answer counts, however long the proof of the
    /// path then takes.
    async fn connect(
        &self,
        rail: &Rail,
        ticket: [u8; 16],
        origin: &Arc<Origin>,
        limit: Duration,
    ) -> Result<Fast, Reason> {
        let started = Instant::now();
        let (addr, device) = (&rail.addr, self.env_device.as_deref());
        let (fabric, pool) =
            self.context.toward(rail.path, addr, rail.source, device, limit).await?;
        pool.may_land().map_err(|error| from_error::pool(&error))?;
        // Lend this server only memory that no other process borrows.
        let pool = pool.for_peer();
        let (side, env_tos) = (tonic_rdma_proto::Side::Client, self.env_type_of_service);
        let mut options = self.context.configure(side, &pool, fabric.grows(), env_tos);
        options.headers(self.max_header_size);
        options.keep_alive(self.keep_alive);
        options.link.source = rail.source;
        options.copy_on_delivery(self.copy_on_delivery);
        let attempted = Attempted(Some(pool.clone()));
        let connected = {
            let request = async |ticket: [u8; 16], answered: &AtomicBool| {
                let hello = Hello::new(ticket, options.proto.settings()).encode();
                let left = limit.saturating_sub(started.elapsed());
                let link = &options.link;
                let connected =
                    fabric.connect_telling(addr, link, &pool, &hello, left, answered).await;
                connected.map_err(from_error::connect)
            };
            // Whether the first request was answered, and whether any later request was answered.
            let answered = [AtomicBool::new(false), AtomicBool::new(false)];
            // Keep this future on the heap, because few attempts need it.
            let again = || {
                Box::pin(async {
                    let (uri, paths) = (&self.origin.uri, &[rail.path]);
                    let mut silence = SILENCE;
                    loop {
                        let offered =
                            offer(&self.tcp, uri.clone(), self.hook.as_ref(), paths).await;
                        // Report the refusal of an Offer as a local reason, because the refusal
                        // says nothing about the request under way.
                        let offered = offered
                            .map_err(|reason| Reason::new(reason.code(), reason.detail()))?;
                        tracing::debug!(%addr, "no answer yet: a second request is sent");
                        let asked = pin!(request(offered.ticket.0, &answered[1]));
                        if let Some(ended) = unless_silent(asked, silence, &answered[1]).await {
                            return ended;
                        }
                        silence *= 2;
                    }
                })
            };
            match fabric.loses_requests() {
                false => request(ticket, &answered[0]).await?,
                true => {
                    let first = pin!(request(ticket, &answered[0]));
                    first_answer(first, &answered, again).await?
                }
            }
        };
        let accept = Accept::decode(&connected.private_data).map_err(|error| {
            Reason::from_peer(
                ReasonCode::HandshakeRejected,
                format!("bad answer from {addr}: {error}"),
            )
        })?;
        attempted.succeeded();
        let client = FastClient::start(
            connected.link,
            pool.clone(),
            accept.settings,
            &options,
            self.counters.clone(),
            self.methods.clone(),
            origin.clone(),
        );
        Ok(Fast { client, pool })
    }
}

/// Returns the first answer, to the first request or to one of the further requests that are made
/// after [`SILENCE`]. The first request sets `answered[0]`, and all later requests set
/// `answered[1]`. A request that fails on this host before the server answers does not count as
/// answered, and the other request continues. If no request is answered, the result is the first
/// request's error.
async fn first_answer<T, Others: Future<Output = Result<T, Reason>>>(
    mut first: Pin<&mut impl Future<Output = Result<T, Reason>>>,
    answered: &[AtomicBool; 2],
    others: impl FnOnce() -> Pin<Box<Others>>,
) -> Result<T, Reason> {
    let is_answer = |result: &Result<T, Reason>, answered: &AtomicBool| match result {
        Ok(_) => true,
        Err(reason) => reason.side() == Side::Peer || answered.load(Relaxed),
    };
    if let Some(ended) = unless_silent(first.as_mut(), SILENCE, &answered[0]).await {
        return ended;
    }
    let mut others = others();
    tokio::select! {
        ended = &mut first => {
            if is_answer(&ended, &answered[0]) {
                return ended;
            }
            let other = others.await;
            if is_answer(&other, &answered[1]) { other } else { ended }
        }
        ended = &mut others => {
            if is_answer(&ended, &answered[1]) { ended } else { first.await }
        }
    }
}

/// Waits for the end of a request. Returns `None` if the request has not been answered within
/// `silence`.
async fn unless_silent<T>(
    mut request: Pin<&mut impl Future<Output = T>>,
    silence: Duration,
    answered: &AtomicBool,
) -> Option<T> {
    match tokio::time::timeout(silence, request.as_mut()).await {
        Ok(ended) => Some(ended),
        Err(_) if answered.load(Relaxed) => Some(request.await),
        Err(_) => None,
    }
}

/// Whether a failure with this reason may lie in the rail, so that another rail may work. A
/// time-out before [`SILENCE`] is over says nothing about the rail, because only one request was
/// sent.
fn is_of_the_rail(code: ReasonCode, was_silent: bool) -> bool {
    if code == ReasonCode::HandshakeTimeout {
        return was_silent;
    }
    matches!(
        code,
        ReasonCode::LargePacketsLost
            | ReasonCode::LinkLost
            | ReasonCode::NoActivePort
            | ReasonCode::NoDevice
            | ReasonCode::NoRoute
            | ReasonCode::NotOnRdmaDevice
            | ReasonCode::PeerUnreachable
    )
}

/// Whether the server may have accepted the connection, and spent the ticket, although the client's
/// attempt failed. A device may be removed after the server has answered.
fn may_have_accepted(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::HandshakeTimeout
            | ReasonCode::LargePacketsLost
            | ReasonCode::LinkLost
            | ReasonCode::NoDevice
    )
}

/// Guards the pool of an attempt. An attempt that fails or is dropped returns the pool's memory at
/// once, because there may be no other connection that would return it.
struct Attempted(Option<Pool>);

impl Attempted {
    fn succeeded(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempted {
    fn drop(&mut self) {
        if let Some(pool) = &self.0 {
            pool.trim_now();
        }
    }
}

/// Records the newest reason for a path, unless the recorded reason is more specific.
fn tell(reasons: &mut Vec<(Path, Reason)>, path: Path, reason: Reason) {
    let says = |reason: &Reason| match (reason.side(), reason.code()) {
        (Side::Local, _) => 0,
        // Usually the server does not know the ticket, because the ticket was spent before or
        // another server issued it.
        (Side::Peer, ReasonCode::HandshakeRejected) => 1,
        (Side::Peer, _) => 2,
    };
    match reasons.iter_mut().find(|(known, _)| *known == path) {
        Some((_, known)) if says(known) > says(&reason) => {}
        Some((_, known)) => *known = reason,
        None => reasons.push((path, reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn after(ms: u64, result: Result<u8, Reason>) -> Result<u8, Reason> {
        tokio::time::sleep(Duration::from_millis(ms)).await;
        result
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_answer_counts_and_an_error_of_this_host_is_none() {
        let silent = || Err(Reason::new(ReasonCode::HandshakeTimeout, "no answer"));
        let local = || Err(Reason::new(ReasonCode::LimitReached, "no other ticket"));
        let refused = || Err(Reason::from_peer(ReasonCode::HandshakeRejected, "refused"));
        let code = |result: Result<u8, Reason>| result.map_err(|reason| reason.code());
        for (first, others, expected) in [
            (after(200, silent()), after(0, Ok(2)), Err(ReasonCode::HandshakeTimeout)),
            (after(900, Ok(1)), after(0, local()), Ok(1)),
            (after(900, Ok(1)), after(100, Ok(2)), Ok(2)),
            (after(900, Ok(1)), after(100, refused()), Err(ReasonCode::HandshakeRejected)),
            (after(400, silent()), after(900, Ok(2)), Ok(2)),
            (after(400, silent()), after(900, local()), Err(ReasonCode::HandshakeTimeout)),
        ] {
            let answered = Default::default();
            let ended = first_answer(pin!(first), &answered, || Box::pin(others)).await;
            assert_eq!(code(ended), expected);
        }
    }

    #[test]
    fn a_ticket_that_the_server_may_have_accepted_is_not_presented_again() {
        for code in [ReasonCode::HandshakeTimeout, ReasonCode::LinkLost, ReasonCode::NoDevice] {
            assert!(may_have_accepted(code), "{code}");
        }
        assert!(!may_have_accepted(ReasonCode::NoRoute));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_was_answered_is_not_joined_by_another() {
        let lost = || Err(Reason::new(ReasonCode::LargePacketsLost, "the proof was lost"));
        let proving = async |ms, answered: &[AtomicBool; 2]| {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            answered[0].store(true, Relaxed);
            after(5000, lost()).await
        };
        let answered = Default::default();
        let none = || -> Pin<Box<std::future::Pending<Result<u8, Reason>>>> {
            unreachable!("a request that was answered was joined by another")
        };
        let ended = first_answer(pin!(proving(200, &answered)), &answered, none).await;
        assert_eq!(ended.unwrap_err().code(), ReasonCode::LargePacketsLost);
        // The answer comes after the second request, which gets none.
        let answered = Default::default();
        let waits = || Box::pin(std::future::pending());
        let ended = first_answer(pin!(proving(400, &answered)), &answered, waits).await;
        assert_eq!(ended.unwrap_err().code(), ReasonCode::LargePacketsLost);
        // The second request was answered, so the end of the first request says nothing.
        let answered = [AtomicBool::new(false), AtomicBool::new(true)];
        let silent = Err(Reason::new(ReasonCode::HandshakeTimeout, "no answer"));
        let proven = || Box::pin(after(900, Ok(2)));
        let ended = first_answer(pin!(after(400, silent)), &answered, proven).await;
        assert_eq!(ended.unwrap(), 2);
    }
}
