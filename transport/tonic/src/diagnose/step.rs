//! One step of a diagnosis.

use crate::path::reason::Reason;

/// A step of the diagnosis.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Step {
    /// What was tried.
    pub name: String,
    /// Duration in microseconds.
    pub micros: u64,
    /// Why it failed, with the code that the transport would give. `None` if it succeeded.
    pub reason: Option<Reason>,
    /// The result, if there is more to report than success.
    pub detail: String,
}

impl Step {
    /// Whether it succeeded.
    pub fn ok(&self) -> bool {
        self.reason.is_none()
    }
}
