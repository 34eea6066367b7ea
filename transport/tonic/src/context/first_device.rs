//! The RDMA device that a host uses if no device is named.

use std::sync::{Arc, OnceLock};

use tonic_rdma_fabric::{Fabric, FabricError, HostSnapshot, off_worker};

use crate::context::survey::Survey;
use crate::path::from_error;
use crate::path::reason::Reason;

/// Remembers why this host has no device, as long as the kernel has no device. The search needs a
/// thread, and programs that connect for each call would repeat the search each time.
#[derive(Default)]
pub(super) struct FirstDevice {
    missing: OnceLock<FabricError>,
    survey: Arc<Survey>,
}

impl FirstDevice {
    /// The known devices of this host.
    pub(super) fn survey(&self) -> &Arc<Survey> {
        &self.survey
    }

    /// Opens the first usable device, or the device of this name, and returns whether it is the
    /// only one. `host` is the device monitor's last snapshot.
    pub(super) async fn open(
        &self,
        only: Option<String>,
        host: Arc<HostSnapshot>,
    ) -> Result<(Fabric, bool), Reason> {
        if !Fabric::may_have_devices()
            && let Some(error) = self.missing.get()
        {
            return Err(from_error::fabric(error.clone()));
        }
        let survey = self.survey.clone();
        let open = move || -> Result<_, FabricError> {
            let devices = survey.devices(host)?;
            Ok((Fabric::open_listed(&devices, only.as_deref())?, devices.len() == 1))
        };
        off_worker(open).await.map_err(from_error::no_thread)?.map_err(|error| {
            if !Fabric::may_have_devices() {
                let _ = self.missing.set(error.clone());
            }
            from_error::fabric(error)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// If the kernel has no RDMA devices, the second answer needs no thread.
    #[tokio::test]
    async fn a_host_without_devices_answers_at_once() {
        let device = FirstDevice::default();
        let first = device.open(None, Arc::default()).await;
        let mut again = pin!(device.open(None, Arc::default()));
        let polled = again.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(polled.is_ready(), !Fabric::may_have_devices());
        let again = if polled.is_ready() { polled } else { Poll::Ready(again.await) };
        let reason = |result: Result<(Fabric, bool), Reason>| {
            result.map(|(_, alone)| alone).map_err(|reason| reason.to_string())
        };
        assert_eq!(again.map(reason), Poll::Ready(reason(first)));
    }
}
