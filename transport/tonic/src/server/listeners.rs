//! The listeners of one path, all of which are accepted from at once.

use std::net::IpAddr;
use std::sync::Arc;

use tokio::task::{AbortHandle, JoinSet};
use tonic_rdma_fabric::{Fabric, Incoming, Listener};
use tonic_rdma_memory::Pool;

use crate::bootstrap::service::Listening;
use crate::path::reason::Reason;

/// What a listener listens on.
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

struct One {
    place: ListenerKey,
    listening: Listening,
    state: State,
}

enum State {
    /// Requests wait in its queue.
    Idle(Option<(Listener, Pool)>),
    /// By this task.
    Accepting(AbortHandle),
}

/// Listeners, which end when this is dropped.
#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<One>,
    tasks: JoinSet<(ListenerKey, Reason)>,
}

impl Listeners {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What clients are told of them.
    pub(super) fn listening(&self) -> Arc<[Listening]> {
        self.all.iter().map(|one| one.listening.clone()).collect()
    }

    pub(super) fn has(&self, place: &ListenerKey) -> bool {
        self.all.iter().any(|one| one.place == *place)
    }

    pub(super) fn add(
        &mut self,
        place: ListenerKey,
        listening: Listening,
        listener: Listener,
        pool: Pool,
    ) {
        self.all.push(One { place, listening, state: State::Idle(Some((listener, pool))) });
    }

    /// Ends all but those at `places`.
    pub(super) fn keep(&mut self, places: &[ListenerKey]) {
        self.all.retain(|one| {
            let keep = places.contains(&one.place);
            if let (State::Accepting(task), false) = (&one.state, keep) {
                task.abort();
            }
            keep
        });
    }

    /// Hands the connect requests of all listeners to `accept` until a listener ends, and returns
    /// why it did. Never returns while there is no listener.
    ///
    /// Cancel safe: accepting goes on meanwhile.
    pub(super) async fn accept<F>(&mut self, accept: F) -> Reason
    where
        F: Fn(Incoming, Pool) + Clone + Send + 'static,
    {
        let Self { all, tasks } = self;
        for one in all.iter_mut() {
            let State::Idle(idle) = &mut one.state else { continue };
            let Some((mut listener, pool)) = idle.take() else { continue };
            let (accept, place) = (accept.clone(), one.place.clone());
            one.state = State::Accepting(tasks.spawn(async move {
                loop {
                    match listener.accept().await {
                        Ok(incoming) => accept(incoming, pool.clone()),
                        Err(error) => return (place, crate::path::from_error::fabric(error)),
                    }
                }
            }));
        }
        loop {
            match tasks.join_next().await {
                Some(Ok((place, reason))) => {
                    // One that was ended meanwhile has been replaced, or is not wanted.
                    all.retain(|one| {
                        one.place != place
                            || matches!(&one.state, State::Accepting(task) if !task.is_finished())
                    });
                    return reason;
                }
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }
}
