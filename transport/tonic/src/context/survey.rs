//! The RDMA devices of this host, remembered until the kernel reports a change.
//!
//! A survey opens each device, which takes milliseconds and kernel locks on real adapters, so a
//! program with many channels should not repeat the survey for each channel. The result of a survey
//! is kept
//!
//! - as long as the kernel has reported no later change, and the device monitor has found none;
//! - only if every device could be opened, because nothing reports a device file that becomes
//!   accessible;
//! - for the first [`SETTLES`] after a change only if all devices are usable, because the kernel
//!   may report a change of a port before the port's state changes. Opening a device checks its
//!   port again, so a port that goes down after the survey is noticed.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tonic_rdma_fabric::{DeviceInfo, Fabric, FabricError, HostSnapshot, HostWatch, off_worker};

use crate::path::from_error;
use crate::path::reason::Reason;

/// How long after a report the state of ports may still change.
const SETTLES: Duration = Duration::from_secs(2);

pub(super) type Devices = Arc<[DeviceInfo]>;

/// The devices of the last survey.
#[derive(Debug, Default)]
pub(super) struct Survey(Mutex<SurveyState>);

#[derive(Debug, Default)]
struct SurveyState {
    /// The host watch, which is created with the first survey. `Some(None)` if the system does not
    /// allow a host watch.
    watch: Option<Option<HostWatch>>,
    /// The device monitor's last snapshot of the host.
    host: Option<Arc<HostSnapshot>>,
    /// The number of changes so far, and when the last change was noticed.
    changes: u64,
    changed: Option<Instant>,
    /// The result of the last survey: the devices, whether they had settled, and the number of
    /// changes before the survey.
    kept: Option<(Devices, bool, u64)>,
}

impl SurveyState {
    /// Whether the kernel has reported a change since the last call to this function. `None` if the
    /// kernel does not report changes, or has no RDMA devices.
    fn told(&mut self) -> Option<bool> {
        if self.watch.is_none() {
            // Without devices, no result needs to be remembered, and no device needs to be watched.
            if !Fabric::may_have_devices() {
                return None;
            }
            let watch = HostWatch::new().inspect_err(|error| {
                tracing::debug!(%error, "the kernel does not report changes: no survey is kept");
            });
            self.watch = Some(watch.ok());
            return Some(true);
        }
        let told = self.watch.as_ref()?.as_ref()?.has_changed();
        told.inspect_err(|_| self.watch = Some(None)).ok()
    }

    fn change(&mut self, now: Instant) {
        (self.changes, self.changed, self.kept) = (self.changes + 1, Some(now), None);
    }

    fn has_settled(&self, now: Instant) -> bool {
        self.changed.is_some_and(|at| now.saturating_duration_since(at) >= SETTLES)
    }
}

impl Survey {
    fn state(&self) -> MutexGuard<'_, SurveyState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All RDMA devices. `host` is the device monitor's last snapshot. Blocks.
    pub(super) fn devices(&self, host: Arc<HostSnapshot>) -> Result<Devices, FabricError> {
        self.devices_by(host, Instant::now, SurveyState::told, Fabric::devices)
    }

    /// Makes the watch report a device's own events as well.
    pub(super) fn watch(&self, fabric: &Fabric) {
        if let Some(Some(watch)) = &self.state().watch
            && let Err(error) = fabric.tell_removal(watch)
        {
            tracing::debug!(%error, device = fabric.name(), "device events will be noticed late");
        }
    }

    fn devices_by(
        &self,
        host: Arc<HostSnapshot>,
        now: impl Fn() -> Instant,
        told: impl FnOnce(&mut SurveyState) -> Option<bool>,
        look: impl FnOnce() -> Result<Vec<DeviceInfo>, FabricError>,
    ) -> Result<Devices, FabricError> {
        let (before, settled, keeps) = {
            let (mut state, now) = (self.state(), now());
            let told = told(&mut state);
            let is_same = state.host.as_ref().is_some_and(|known| Arc::ptr_eq(known, &host));
            if told != Some(false) || !is_same {
                state.host = Some(host);
                state.change(now);
            }
            let settled = state.has_settled(now);
            if let Some((devices, had_settled, _)) = &state.kept
                && (*had_settled || !settled)
            {
                return Ok(devices.clone());
            }
            (state.changes, settled, told.is_some())
        };
        let devices: Devices = look()?.into();
        let may_keep =
            |device: &DeviceInfo| device.unopened.is_none() && (settled || device.is_usable());
        let mut state = self.state();
        if keeps && state.changes == before && devices.iter().all(may_keep) {
            state.kept = Some((devices.clone(), settled, before));
        }
        Ok(devices)
    }
}

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

    /// Opens the device named `only`, or the first usable device if `only` is `None`. Returns the
    /// device, and whether the host has no other device. `host` is the device monitor's last
    /// snapshot.
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
    use std::cell::Cell;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use tonic_rdma_fabric::{LinkLayer, PortInfo, PortState, Transport};

    use super::*;

    /// A host whose kernel and clock the test controls, and its devices.
    struct Host {
        survey: Survey,
        seen: Arc<HostSnapshot>,
        now: Cell<Instant>,
        told: Cell<Option<bool>>,
        looks: Cell<u32>,
        state: Cell<PortState>,
        unopened: Cell<Option<i32>>,
    }

    impl Host {
        fn new() -> Host {
            let host = Host {
                survey: Survey::default(),
                seen: Arc::default(),
                now: Cell::new(Instant::now()),
                told: Cell::new(Some(false)),
                looks: Cell::new(0),
                state: Cell::new(PortState::Active),
                unopened: Cell::new(None),
            };
            host.told.set(Some(true));
            host
        }

        fn look(&self) -> Result<Vec<DeviceInfo>, FabricError> {
            self.looks.set(self.looks.get() + 1);
            let port = PortInfo {
                number: 1,
                state: self.state.get(),
                link_layer: LinkLayer::Ethernet,
                mtu: 4096,
                max_msg: 1 << 30,
                gids: Vec::new(),
            };
            let device = |name: &str| DeviceInfo {
                name: name.to_owned(),
                transport: Transport::RoCE,
                ports: vec![port.clone()],
                addresses: vec![[10, 0, 0, 1].into()],
                unopened: self.unopened.get(),
            };
            Ok(vec![device("mlx5_0"), device("mlx5_1")])
        }

        /// Makes an attempt, and returns the number of surveys so far. Each survey opens all
        /// devices.
        fn attempt(&self) -> u32 {
            let told = |_: &mut SurveyState| {
                let told = self.told.get();
                self.told.set(told.map(|_| false));
                told
            };
            let now = || self.now.get();
            let devices = self.survey.devices_by(self.seen.clone(), now, told, || self.look());
            assert_eq!(devices.unwrap().len(), 2);
            self.looks.get()
        }

        fn settle(&self) {
            self.now.set(self.now.get() + SETTLES);
        }
    }

    /// An earlier version surveyed twice for each attempt.
    #[test]
    fn attempts_look_once_until_the_kernel_tells_of_a_change() {
        let host = Host::new();
        for _ in 0..100 {
            assert_eq!(host.attempt(), 1);
        }
        // One more survey is made once the reported change must have taken effect.
        host.settle();
        for _ in 0..100 {
            assert_eq!(host.attempt(), 2);
        }
        host.told.set(Some(true));
        assert_eq!([host.attempt(), host.attempt()], [3, 3]);
    }

    #[test]
    fn what_the_device_monitor_finds_is_a_change() {
        let mut host = Host::new();
        assert_eq!(host.attempt(), 1);
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [2, 2]);
        host.seen = Arc::default();
        assert_eq!([host.attempt(), host.attempt()], [3, 3]);
    }

    #[test]
    fn a_port_that_may_come_up_is_looked_at_until_it_has_settled() {
        let host = Host::new();
        host.state.set(PortState::Down);
        assert_eq!([host.attempt(), host.attempt()], [1, 2]);
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [3, 3]);
    }

    #[test]
    fn what_nobody_tells_of_is_not_kept() {
        // The error is EACCES. A change of the device files' modes would end the error, and nothing
        // reports such a change.
        let host = Host::new();
        host.unopened.set(Some(13));
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [1, 2]);
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [3, 4]);
        // The kernel reports nothing.
        let host = Host::new();
        host.told.set(None);
        assert_eq!([host.attempt(), host.attempt()], [1, 2]);
    }

    #[test]
    fn a_look_that_a_change_has_overtaken_is_not_kept() {
        let host = Host::new();
        let look = || {
            // Another attempt notices a change at the same time.
            host.survey.state().change(host.now.get());
            host.look()
        };
        let seen = host.seen.clone();
        host.survey.devices_by(seen, || host.now.get(), |_| Some(true), look).unwrap();
        host.told.set(Some(false));
        assert_eq!([host.attempt(), host.attempt()], [2, 2]);
    }

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
