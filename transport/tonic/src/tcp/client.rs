//! State that a channel's calls over TCP share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

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
