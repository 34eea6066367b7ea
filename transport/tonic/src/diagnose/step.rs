//! One step of a diagnosis.

use std::time::Duration;

use crate::path::reason::{Reason, ReasonCode};

/// Time limit of each step towards a peer.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Does a step within the time limit.
pub(super) async fn limited<T>(work: impl Future<Output = Result<T, Reason>>) -> Result<T, Reason> {
    tokio::time::timeout(LIMIT, work).await.unwrap_or_else(|_| {
        let detail = format!("nothing after {} ms", LIMIT.as_millis());
        Err(Reason::new(ReasonCode::HandshakeTimeout, detail))
    })
}

/// A step of the diagnosis.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Step {
    /// The attempted step.
    pub name: String,
    /// Duration in microseconds.
    pub micros: u64,
    /// Why the step failed, with the code that the transport would give. `None` if it succeeded.
    pub reason: Option<Reason>,
    /// The result, if there is more to report than success.
    pub detail: String,
}

impl Step {
    /// Whether the step succeeded.
    pub fn ok(&self) -> bool {
        self.reason.is_none()
    }
}
