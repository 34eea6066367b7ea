//! Constructors of channels over several endpoints.

use std::future::Future;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use hyper::rt::Executor;
use tokio::sync::mpsc;
use tonic_rdma_memory::Owned;
use tonic_rdma_proto::Side;
use tower::balance::p2c::Balance;
use tower::buffer::Buffer;
use tower::discover::Change as TowerChange;
use tower::load::{CompleteOnResponse, PendingRequests};
use tower::util::BoxService;

use crate::channel::balanced::{Balanced, Members, Membership};
use crate::channel::health::{Group, Watched};
use crate::channel::{Change, Channel, ChannelKind};
use crate::endpoint::Endpoint;
use crate::error::BoxError;
use crate::telemetry::stats::Counters;

/// Capacity, in calls, of the queue in front of a balancer. The same as tonic's default.
const BUFFER_SIZE: usize = 1024;

impl Channel {
    /// Balance calls over a list of endpoints, each of which finds its own fast path.
    ///
    /// The endpoints connect as with [`Endpoint::connect_lazy`]. Each call draws two endpoints at
    /// random and takes the endpoint with fewer calls in flight. An endpoint that cannot be
    /// connected to is left out for 10 ms after its first failure, and later for up to 1.28 s,
    /// unless all endpoints would be left out.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn balance_list(list: impl Iterator<Item = Endpoint>) -> Self {
        let list: Vec<Endpoint> = list.collect();
        let (channel, tx) = Self::balance_channel(list.len().max(1));
        for (key, endpoint) in list.into_iter().enumerate() {
            // The send cannot fail, because the queue has room for each endpoint and the receiver
            // is alive.
            let _ = tx.try_send(Change::Insert(key, endpoint));
        }
        channel
    }

    /// Balance calls over a set of endpoints that the returned sender changes. `capacity` is the
    /// number of changes that the queue holds.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, or if `capacity` is 0.
    pub fn balance_channel<K>(capacity: usize) -> (Self, mpsc::Sender<Change<K, Endpoint>>)
    where
        K: Hash + Eq + Send + Clone + 'static,
    {
        Self::balance_channel_with_executor(capacity, crate::executor::SharedExec::default())
    }

    /// Like [`balance_channel`](Channel::balance_channel), but runs the balancer's task on
    /// `executor`.
    ///
    /// # Panics
    ///
    /// If `capacity` is 0.
    pub fn balance_channel_with_executor<K, E>(
        capacity: usize,
        executor: E,
    ) -> (Self, mpsc::Sender<Change<K, Endpoint>>)
    where
        K: Hash + Eq + Send + Clone + 'static,
        E: Executor<Pin<Box<dyn Future<Output = ()> + Send>>> + Send + Sync + 'static,
    {
        let (tx, changes) = mpsc::channel(capacity);
        let counters = Arc::new(Counters::of(Side::Client));
        let members = Arc::<Members>::default();
        let balance = Balance::new(Endpoints {
            changes,
            counters: counters.clone(),
            group: Arc::default(),
            members: members.clone(),
        });
        let (queue, worker) = Buffer::pair(BoxService::new(balance), BUFFER_SIZE);
        executor.execute(Box::pin(worker));
        (Channel(Owned::new(ChannelKind::Balanced(Balanced::new(queue, counters, members)))), tx)
    }
}

/// Turns changes in the set of endpoints into changes in the balancer's set of channels.
struct Endpoints<K> {
    changes: mpsc::Receiver<Change<K, Endpoint>>,
    counters: Arc<Counters>,
    group: Arc<Group>,
    members: Arc<Members>,
}

impl<K> Endpoints<K> {
    fn member(&self, channel: &Channel) -> Option<Membership> {
        match &*channel.0 {
            ChannelKind::One(one) => {
                Some(self.members.join(&one.shared, one.rails.clone(), one.context.clone()))
            }
            ChannelKind::Balanced(_) => None,
        }
    }
}

impl<K> Unpin for Endpoints<K> {}

impl<K: Hash + Eq + Clone> Stream for Endpoints<K> {
    type Item = Result<TowerChange<K, PendingRequests<Watched>>, BoxError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let change = match self.changes.poll_recv(cx) {
            Poll::Ready(Some(change)) => change,
            // Without a sender, the set of endpoints does not change any more.
            Poll::Ready(None) | Poll::Pending => return Poll::Pending,
        };
        Poll::Ready(Some(Ok(match change {
            Change::Insert(key, mut endpoint) => {
                endpoint.shared.counters = Some(self.counters.clone());
                let channel = endpoint.connect_lazy();
                let member = self.member(&channel);
                let watched = Watched::new(channel, self.group.clone(), member);
                TowerChange::Insert(
                    key,
                    PendingRequests::new(watched, CompleteOnResponse::default()),
                )
            }
            Change::Remove(key) => TowerChange::Remove(key),
        })))
    }
}
