//! The RDMA devices of this host as they were found, kept until the kernel tells of a change.
//!
//! To look at a device is to open it, which takes milliseconds and locks in the kernel on real
//! adapters, and programs have many channels. A look is kept
//!
//! - while the kernel has told of no change since before it, and the device monitor has found none;
//! - if every device could be looked at: a device file that becomes accessible is told by nobody;
//! - for [`SETTLES`] after a change only if all devices can be used: the state of a port may follow
//!   what is told of it. Opening a device looks at its port again, so a port that goes down after
//!   the look is found.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tonic_rdma_fabric::{DeviceInfo, Fabric, FabricError, HostSnapshot, HostWatch};

/// How long the state of ports may take to follow what is told of it.
const SETTLES: Duration = Duration::from_secs(2);

pub(super) type Devices = Arc<[DeviceInfo]>;

/// The devices as they were found.
#[derive(Debug, Default)]
pub(super) struct Survey(Mutex<SurveyState>);

#[derive(Debug, Default)]
struct SurveyState {
    /// Made with the first look; none where the system refuses it.
    watch: Option<Option<HostWatch>>,
    /// The host as the device monitor last saw it.
    host: Option<Arc<HostSnapshot>>,
    /// The number of changes so far, and when the last of them was noticed.
    changes: u64,
    changed: Option<Instant>,
    /// The devices, whether they had settled, and the number of changes before.
    kept: Option<(Devices, bool, u64)>,
}

impl SurveyState {
    /// Whether the kernel has told of a change since this was asked last, as far as it tells.
    fn told(&mut self) -> Option<bool> {
        if self.watch.is_none() {
            // Without devices there is nothing to keep, nor to watch.
            if !Fabric::may_have_devices() {
                return None;
            }
            let watch = HostWatch::new().inspect_err(|error| {
                tracing::debug!(%error, "the kernel does not tell of changes: nothing is kept");
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

    /// All RDMA devices. `host` is what the device monitor has seen last. Blocks.
    pub(super) fn devices(&self, host: Arc<HostSnapshot>) -> Result<Devices, FabricError> {
        self.devices_by(host, Instant::now, SurveyState::told, Fabric::devices)
    }

    /// Has the watch also told of a device's own events.
    pub(super) fn watch(&self, fabric: &Fabric) {
        if let Some(Some(watch)) = &self.state().watch
            && let Err(error) = fabric.tell_removal(watch)
        {
            tracing::debug!(%error, device = fabric.name(), "its events are noticed late");
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
        let may_keep = |device: &DeviceInfo| match settled {
            true => !device.ports.is_empty(),
            false => device.is_usable(),
        };
        let mut state = self.state();
        if keeps && state.changes == before && devices.iter().all(may_keep) {
            state.kept = Some((devices.clone(), settled, before));
        }
        Ok(devices)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tonic_rdma_fabric::{LinkLayer, PortInfo, PortState, Transport};

    use super::*;

    /// A host whose kernel and clock are the test's, and its devices.
    struct Host {
        survey: Survey,
        seen: Arc<HostSnapshot>,
        now: Cell<Instant>,
        told: Cell<Option<bool>>,
        looks: Cell<u32>,
        state: Cell<PortState>,
        ports: Cell<usize>,
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
                ports: Cell::new(1),
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
                ports: vec![port.clone(); self.ports.get()],
                addresses: vec![[10, 0, 0, 1].into()],
            };
            Ok(vec![device("mlx5_0"), device("mlx5_1")])
        }

        /// An attempt, and the number of looks so far, each of which opens all devices.
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

    /// Before, each attempt looked twice.
    #[test]
    fn attempts_look_once_until_the_kernel_tells_of_a_change() {
        let host = Host::new();
        for _ in 0..100 {
            assert_eq!(host.attempt(), 1);
        }
        // Once more when what has just been told must have come about.
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
        // The devices cannot be opened, which a change of their files' modes would change.
        let host = Host::new();
        host.ports.set(0);
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [1, 2]);
        host.settle();
        assert_eq!([host.attempt(), host.attempt()], [3, 4]);
        // The kernel tells of nothing.
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
}
