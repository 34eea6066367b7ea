//! Calls over TCP, through tonic's own transport, and the state that a channel's calls share.
//!
//! | file | what |
//! |---|---|
//! | `connector` | the TCP connection, and its local address |
//! | `body` | bodies of calls over TCP, for the zero-copy codec and the counters |
//! | `named` | messages that fill an [application buffer](crate::LandIn) |
//! | `retry` | sends calls again that the server never saw |
//! | `reused_tasks` | the tasks of the HTTP/2 connection |

pub(crate) mod body;
pub(crate) mod connector;
pub(crate) mod named;
pub(crate) mod retry;
pub(crate) mod reused_tasks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http_body::Body as HttpBody;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::sync::Notify;
use tonic::Status;
use tonic::body::Body;

use crate::codec::Methods;
use crate::telemetry::stats::Counters;

/// A channel's TCP connection, and the state that its calls need.
#[derive(Debug)]
pub(crate) struct TcpClient {
    pub(crate) channel: tonic::transport::Channel,
    pub(crate) counters: Arc<Counters>,
    pub(crate) methods: Arc<Methods>,
    /// Whether a task waits for the server to answer a call.
    awaiting_answer: AtomicBool,
    answered: Notify,
}

impl TcpClient {
    pub(crate) fn new(
        channel: tonic::transport::Channel,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> Self {
        Self {
            channel,
            counters,
            methods,
            awaiting_answer: AtomicBool::new(false),
            answered: Notify::new(),
        }
    }

    /// Records that the server has answered a call.
    pub(crate) fn saw_answer(&self) {
        let awaiting = &self.awaiting_answer;
        if awaiting.load(Ordering::Relaxed) && awaiting.swap(false, Ordering::Relaxed) {
            self.answered.notify_one();
        }
    }

    /// Waits until the server answers a call.
    ///
    /// Cancel safe.
    pub(crate) async fn answered(&self) {
        self.awaiting_answer.store(true, Ordering::Relaxed);
        self.answered.notified().await;
    }
}

/// Boxes `body` in tonic's type. tonic takes an `UnsyncBoxBody` unchanged, and wraps any other body
/// in a layer that converts errors.
pub(crate) fn boxed(body: impl HttpBody<Data = Bytes, Error = Status> + Send + 'static) -> Body {
    Body::new(UnsyncBoxBody::new(body))
}
