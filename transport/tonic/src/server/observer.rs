//! Shows a server's connections to an operator.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tonic_rdma_memory::Owned;

use crate::bootstrap::gateways::Gateways;
use crate::connection::View;
use crate::connection::usage::ConnectionInfo;
use crate::telemetry::stats::{ServerStats, TransportStats};

/// The connections of the servers made from one builder.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// Fast-path connections, by number.
    fast: Mutex<BTreeMap<u64, View>>,
    /// TCP connections, by server.
    tcp: Mutex<Vec<Weak<Gateways>>>,
}

impl Registry {
    /// Lists a fast-path connection until the guard is dropped.
    pub(crate) fn add(self: &Arc<Self>, connection: View) -> Listed {
        let id = connection.id();
        lock(&self.fast).insert(id, connection);
        Listed { registry: self.clone(), id }
    }

    /// Lists a server's TCP connections until the server ends.
    pub(crate) fn add_server(&self, gateways: &Arc<Gateways>) {
        let mut tcp = lock(&self.tcp);
        tcp.retain(|server| server.strong_count() > 0);
        tcp.push(Arc::downgrade(gateways));
    }

    fn connections(&self, after: u64, most: usize) -> Vec<ConnectionInfo> {
        let fast: Vec<_> = {
            let all = lock(&self.fast);
            let later = all.range((Excluded(after), Unbounded));
            later.map(|(_, connection)| connection.clone()).take(most).collect()
        };
        let servers: Vec<_> = lock(&self.tcp).iter().filter_map(Weak::upgrade).collect();
        let mut tcp: Vec<_> =
            servers.iter().flat_map(|server| server.connections(after, most)).collect();
        tcp.sort_unstable_by_key(|info| info.id);
        // Lock only the connections that are returned.
        let (mut fast, mut tcp) = (fast.iter().peekable(), tcp.into_iter().peekable());
        let mut found = Vec::new();
        while found.len() < most {
            let is_fast = match (fast.peek(), tcp.peek()) {
                (Some(fast), Some(tcp)) => fast.id() < tcp.id,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => break,
            };
            match is_fast {
                true => found.extend(fast.next().and_then(|connection| connection.info())),
                false => found.extend(tcp.next()),
            }
        }
        found
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Ignore poison, because each change leaves the list consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a connection in the list until dropped.
#[derive(Debug)]
pub(crate) struct Listed {
    registry: Arc<Registry>,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        // Drop the connection after the lock is released.
        let _connection = lock(&self.registry.fast).remove(&self.id);
    }
}

/// Shows the servers made from a builder and its clones, and their connections.
/// [`Server::observer`](crate::Server::observer) returns it.
///
/// An observer keeps neither a server nor a connection alive. Once the builder is dropped and its
/// servers have ended, all methods return `None`, as they do in a child of fork(2).
///
/// ```
/// use tonic_rdma::Server;
///
/// let server = Server::builder();
/// let observer = server.observer();
/// // server.add_service(...).serve(...)
/// for connection in observer.connections(0, 100).unwrap_or_default() {
///     println!("{} for {:?}: {:?}", connection.path, connection.age, connection.remote_addr);
/// }
/// ```
#[derive(Debug, Clone)]
pub struct ServerObserver(Owned<Observed>);

#[derive(Debug, Clone)]
struct Observed {
    registry: Weak<Registry>,
    stats: ServerStats,
}

impl ServerObserver {
    pub(crate) fn new(registry: &Arc<Registry>, stats: ServerStats) -> Self {
        Self(Owned::new(Observed { registry: Arc::downgrade(registry), stats }))
    }

    fn registry(&self) -> Option<Arc<Registry>> {
        if self.0.is_own() { self.0.registry.upgrade() } else { None }
    }

    /// The counters, as [`Server::stats`](crate::Server::stats) returns them.
    pub fn stats(&self) -> Option<TransportStats> {
        self.registry().map(|_| self.0.stats.get())
    }

    /// At most `most` open connections whose [numbers](ConnectionInfo::id) are above `after`, in
    /// the order of their numbers. `after` is 0 at first, and then the last number received. If the
    /// result has fewer than `most` connections, no more follow.
    ///
    /// TCP connections are listed if their peers have IP addresses.
    ///
    /// # Blocking
    ///
    /// Locks one returned fast-path connection at a time to read its numbers. A connection's calls
    /// hold the same lock while they post their messages. The time to find the TCP connections
    /// grows with their number, so ask for few pages with many entries, for example ten pages of
    /// 1,000 for 10,000 connections.
    pub fn connections(&self, after: u64, most: usize) -> Option<Vec<ConnectionInfo>> {
        self.registry().map(|registry| registry.connections(after, most))
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::TcpConnectInfo;

    use super::*;
    use crate::bootstrap::connection::OfferConnection;

    #[tokio::test]
    async fn many_connections_of_several_servers_are_listed_in_pages() {
        let registry = Arc::<Registry>::default();
        let servers: [Arc<Gateways>; 2] = Default::default();
        servers.iter().for_each(|server| registry.add_server(server));
        let accept = |n: u32| {
            let peer = ([10, 0, (n >> 8) as u8, n as u8], 7).into();
            let info = TcpConnectInfo { local_addr: None, remote_addr: Some(peer) };
            servers[n as usize % 2].accepted(&OfferConnection::of(info)).unwrap()
        };
        let mut live: Vec<_> = (0..10_000).map(accept).collect();
        let observer = ServerObserver::new(&registry, ServerStats::default());
        let list = |most: usize| {
            let (mut ids, mut calls) = (vec![0], 0);
            loop {
                let page = observer.connections(ids[ids.len() - 1], most).unwrap();
                calls += 1;
                ids.extend(page.iter().map(|info| info.id));
                if page.len() < most {
                    return (ids.len() - 1, ids.is_sorted_by(|a, b| a < b), calls);
                }
            }
        };
        assert_eq!(list(999), (10_000, true, 11));
        live.truncate(10);
        assert_eq!(list(999), (10, true, 1));
        // A server that has ended is forgotten.
        drop((live, servers));
        assert_eq!(list(999), (0, true, 1));
        registry.add_server(&Arc::default());
        assert_eq!(lock(&registry.tcp).len(), 1);
    }
}
