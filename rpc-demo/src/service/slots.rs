//! Limits on transfers at once.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

/// How long a transfer waits for its turn.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// Places for transfers of one kind. Each transfer holds a thread for the disk, and there is not
/// any number of those.
#[derive(Clone)]
pub(super) struct Slots {
    free: Arc<Semaphore>,
    flag: &'static str,
}

impl Slots {
    /// So many places; `flag` is what gives more.
    pub(super) fn new(count: u32, flag: &'static str) -> Slots {
        Slots { free: Arc::new(Semaphore::new(count as usize)), flag }
    }

    /// A place for the transfer of `name`, which is shown as it is, given back when it is dropped.
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
