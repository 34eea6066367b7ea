//! A connect request on its way to a listener, and the answer.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::sim::end::End;

/// A client's request to a listener.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) private_data: Vec<u8>,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) end: Arc<End>,
    /// If it is dropped without an answer, the request is rejected.
    pub(super) answer: oneshot::Sender<Answer>,
}

/// The answer of the accepting side.
#[derive(Debug)]
pub(super) enum Answer {
    Accepted { end: Arc<End>, private_data: Vec<u8>, established: oneshot::Sender<()> },
    Rejected { private_data: Vec<u8> },
}
