//! A connect request to a listener, and the answer.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::sim::end::SimEnd;

/// A client's request to a listener.
#[derive(Debug)]
pub(super) struct SimConnectRequest {
    pub(super) private_data: Vec<u8>,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) end: Arc<SimEnd>,
    /// Sends the answer. If this sender is dropped, the request counts as rejected.
    pub(super) answer: oneshot::Sender<Answer>,
}

/// The answer of the accepting side.
#[derive(Debug)]
pub(super) enum Answer {
    Accepted { end: Arc<SimEnd>, private_data: Vec<u8>, established: oneshot::Sender<()> },
    Rejected { private_data: Vec<u8> },
}
