//! One attempt at the fast path: local device, Offer over TCP, connection, hello.

use crate::{
    bootstrap::client::{OfferHook, Offered, offer},
    cause,
    codec::Methods,
    context::Context,
    link::{FastClient, LinkOptions},
    reason::{Reason, ReasonCode},
    stats::Counters,
};
use http::Uri;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::time::Instant;
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Accept, Hello};

/// What an attempt needs.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) tcp: tonic::transport::Channel,
    pub(crate) origin: Uri,
    pub(crate) hook: Option<OfferHook>,
    pub(crate) context: Context,
    pub(crate) env_device: Option<String>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) methods: Arc<Methods>,
}

/// A fast path that is up.
#[derive(Debug, Clone)]
pub(crate) struct Fast {
    pub(crate) client: FastClient,
    pub(crate) pool: Pool,
}

impl Plan {
    /// Tries once, for `limit` at most. What it began is undone when it fails or is dropped.
    pub(crate) async fn attempt(&self, limit: Duration) -> Result<Fast, Reason> {
        let deadline = Instant::now() + limit;
        match tokio::time::timeout_at(deadline, self.run(deadline)).await {
            Ok(result) => result,
            Err(_) => Err(Reason::new(
                ReasonCode::HandshakeTimeout,
                format!("no fast path after {} ms", limit.as_millis()),
            )),
        }
    }

    async fn run(&self, deadline: Instant) -> Result<Fast, Reason> {
        // A host that has no device of its own need not trouble the server.
        self.context.check(self.env_device.as_deref()).await?;
        let path = self.context.path();
        let Offered { ticket, addresses } =
            offer(self.tcp.clone(), self.origin.clone(), self.hook.as_ref(), path).await?;
        let mut last = None;
        let mut left = addresses.len() as u32;
        for addr in addresses {
            // An address that does not answer must leave time for those behind it.
            let share = deadline.saturating_duration_since(Instant::now()) / left.max(1);
            left = left.saturating_sub(1);
            match self.connect(addr, ticket.0, share).await {
                Ok(fast) => return Ok(fast),
                Err(reason) => {
                    tracing::debug!(%addr, %reason, "no fast path by this address");
                    // The ticket is spent once the server has seen it.
                    let seen = reason.side() == crate::reason::Side::Peer;
                    last = Some(reason);
                    if seen {
                        break;
                    }
                }
            }
        }
        Err(last.unwrap_or_else(|| Reason::new(ReasonCode::NoRoute, "the server offers no address")))
    }

    async fn connect(&self, addr: SocketAddr, ticket: [u8; 16], limit: Duration) -> Result<Fast, Reason> {
        let started = Instant::now();
        let (fabric, pool) = self.context.toward(addr, self.env_device.as_deref(), limit).await?;
        let options = LinkOptions::for_pool(&pool);
        let hello = Hello::new(ticket, options.proto.settings()).encode();
        let left = limit.saturating_sub(started.elapsed());
        let connected =
            fabric.connect(&addr.into(), &options.link, &pool, &hello, left).await.map_err(cause::connect)?;
        let accept = Accept::decode(&connected.private_data).map_err(|error| {
            Reason::from_peer(ReasonCode::HandshakeRejected, format!("bad answer from {addr}: {error}"))
        })?;
        let client = FastClient::start(
            connected.link,
            pool.clone(),
            accept.settings,
            &options,
            self.counters.clone(),
            self.methods.clone(),
        );
        Ok(Fast { client, pool })
    }
}
