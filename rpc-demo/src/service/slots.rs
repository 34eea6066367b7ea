//! Limits on parallel transfers.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

/// Maximum time that a transfer waits for a slot.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// Slots for transfers of one kind. Each transfer occupies a thread for the disk, and the number of
/// these threads is limited.
#[derive(Clone)]
pub(super) struct Slots {
    free: Arc<Semaphore>,
    flag: &'static str,
}

impl Slots {
    /// Creates `count` slots. The error message names `flag`, which increases their number.
    pub(super) fn new(count: u32, flag: &'static str) -> Slots {
        Slots { free: Arc::new(Semaphore::new(count as usize)), flag }
    }

    /// Waits for a slot for the transfer of `name`, which is printed unescaped. Dropping the permit
    /// frees the slot.
    pub(super) async fn take(&self, name: &impl Display) -> Result<OwnedSemaphorePermit, Status> {
        match tokio::time::timeout(QUEUE_TIMEOUT, self.free.clone().acquire_owned()).await {
            Ok(Ok(slot)) => Ok(slot),
            _ => Err(Status::resource_exhausted(format!(
                "{name} waited {} s for other transfers to end; try again later, or give the server a higher {}",
                QUEUE_TIMEOUT.as_secs(),
                self.flag
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn one_more_waits_until_a_place_is_free() {
        let slots = Slots::new(2, "--max-writes");
        let first = slots.take(&"a").await.unwrap();
        let _second = slots.take(&"b").await.unwrap();
        let mut third = std::pin::pin!(slots.take(&"c"));
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        drop(third.await.unwrap());
    }
}
