//! The result of a test that creates the objects of a connection one by one, for diagnosis.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Verb;

/// The result of [`Fabric::self_test`](crate::Fabric::self_test) for one device. All objects that
/// the test made have been freed.
#[derive(Debug, Clone)]
pub struct SelfTest {
    /// The limits that the device reports. `None` if the device could not be opened or queried.
    pub limits: Option<DeviceLimits>,
    /// The steps in the order in which they were tried. A step that depends on a failed step is
    /// left out.
    pub steps: Vec<SelfTestStep>,
}

/// An attempt to create an object.
#[derive(Debug, Clone)]
pub struct SelfTestStep {
    /// The call that creates the object.
    pub verb: Verb,
    /// How long the call took.
    pub took: Duration,
    /// The cause, if the call failed.
    pub error: Option<Arc<io::Error>>,
}

/// Limits from `ibv_query_device` that matter to connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Maximum number of queue pairs.
    pub max_qp: u64,
    /// Maximum number of work requests in one queue.
    pub max_qp_wr: u64,
    /// Maximum number of completion queues.
    pub max_cq: u64,
    /// Maximum number of entries of one completion queue.
    pub max_cqe: u64,
    /// Maximum number of memory regions.
    pub max_mr: u64,
    /// Maximum size of one memory region in bytes.
    pub max_mr_size: u64,
}
