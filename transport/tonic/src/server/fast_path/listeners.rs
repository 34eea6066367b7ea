//! The listeners of one path, and the tasks that accept connections.

use std::net::IpAddr;
use std::sync::Arc;

use tokio::task::{AbortHandle, JoinSet};
use tonic_rdma_fabric::{Fabric, Incoming, Listener};
use tonic_rdma_memory::Pool;

use crate::bootstrap::service::Listening;
use crate::path::reason::Reason;

/// The device and address that a listener listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListenerKey {
    device: String,
    addr: Option<IpAddr>,
}

impl ListenerKey {
    pub(super) fn of(fabric: &Fabric, addr: Option<IpAddr>) -> Self {
        Self { device: fabric.name().to_owned(), addr }
    }
}

struct ListenerEntry {
    key: ListenerKey,
    listening: Listening,
    state: ListenerState,
}

enum ListenerState {
    /// No task accepts connections yet. Requests wait in the listener's queue.
    Idle(Option<(Listener, Pool)>),
    /// A task accepts connections.
    Accepting(AbortHandle),
}

/// The listeners of one path. Dropping this struct closes the listeners.
#[derive(Default)]
pub(crate) struct Listeners {
    entries: Vec<ListenerEntry>,
    tasks: JoinSet<(ListenerKey, Reason)>,
}

impl Listeners {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Describes the listeners for the answers to Offers.
    pub(super) fn listening(&self) -> Arc<[Listening]> {
        self.entries.iter().map(|entry| entry.listening.clone()).collect()
    }

    pub(super) fn has(&self, key: &ListenerKey) -> bool {
        self.entries.iter().any(|entry| entry.key == *key)
    }

    pub(super) fn add(
        &mut self,
        key: ListenerKey,
        listening: Listening,
        listener: Listener,
        pool: Pool,
    ) {
        self.entries.push(ListenerEntry {
            key,
            listening,
            state: ListenerState::Idle(Some((listener, pool))),
        });
    }

    /// Closes all listeners except those at `keys`.
    pub(super) fn keep(&mut self, keys: &[ListenerKey]) {
        self.entries.retain(|entry| {
            let keep = keys.contains(&entry.key);
            if let (ListenerState::Accepting(task), false) = (&entry.state, keep) {
                task.abort();
            }
            keep
        });
    }

    /// Passes the connect requests of all listeners to `accept` until a listener ends, and returns
    /// the reason. Without a listener, never returns.
    ///
    /// Cancel safe: the tasks keep accepting.
    pub(super) async fn accept<F>(&mut self, accept: F) -> Reason
    where
        F: Fn(Incoming, Pool) + Clone + Send + 'static,
    {
        let Self { entries, tasks } = self;
        for entry in entries.iter_mut() {
            let ListenerState::Idle(idle) = &mut entry.state else { continue };
            let Some((mut listener, pool)) = idle.take() else { continue };
            let (accept, key) = (accept.clone(), entry.key.clone());
            entry.state = ListenerState::Accepting(tasks.spawn(async move {
                loop {
                    match listener.accept().await {
                        Ok(incoming) => accept(incoming, pool.clone()),
                        Err(error) => return (key, crate::path::from_error::fabric(error)),
                    }
                }
            }));
        }
        loop {
            match tasks.join_next().await {
                Some(Ok((key, reason))) => {
                    // Remove the listener that has ended. Keep an entry with the same key whose
                    // task still runs: that listener has replaced the ended one.
                    entries.retain(|entry| {
                        entry.key != key
                            || matches!(&entry.state, ListenerState::Accepting(task) if !task.is_finished())
                    });
                    return reason;
                }
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }
}
