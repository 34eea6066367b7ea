//! This host: its state, tests on its devices, and the transport's decision.

use std::net::IpAddr;
use std::path::Path as FilePath;
use std::time::Duration;

use tonic_rdma_fabric::{DeviceInfo, Fabric, FabricError, SelfTest, Verb, off_worker};
use tonic_rdma_memory::{Memlock, Pinning, PoolError, RegisterError};

use crate::context::Context;
use crate::diagnose::host::kernel::Loadable;
use crate::diagnose::host::sysfs::Interface;
use crate::diagnose::host::{SystemFiles, kernel, limits, loopback, sysfs};
use crate::diagnose::peer_report::Step;
use crate::diagnose::report::{
    Device, Diagnosis, Finding, HugePagesReport, Library, Limits, MemlockReport, PathSettings, Port,
};
use crate::diagnose::request::DiagnosisRequest;
use crate::path::policy::{FabricKind, Policy};
use crate::path::reason::{Reason, ReasonCode};
use crate::path::{Path, from_error};

/// Time limit for a device's answer.
const LIMIT: Duration = Duration::from_secs(10);

pub(in crate::diagnose) async fn run(request: &DiagnosisRequest) -> (Diagnosis, Facts) {
    let files = SystemFiles::real();
    // Read the limits before a pool raises the soft limit.
    let limits = Memlock::read().ok();
    let (mut diagnosis, mut facts) = read(&files, request);
    let listed = off_thread(Fabric::devices).await;
    diagnosis.library = library(&files, &listed);
    let infos = listed.unwrap_or_default();

    let mut pinning = Pinning::default();
    match request.context.simulated() {
        // A simulated device does not depend on rdma-core.
        Some(fabric) => diagnosis.devices = simulated(&fabric),
        None => {
            for device in &mut diagnosis.devices {
                let info = infos.iter().find(|info| info.name == device.name);
                fill_in(device, info, diagnosis.library.found);
            }
        }
    }
    for device in &mut diagnosis.devices {
        let found = try_out(device, &request.context).await;
        pinning.ignores_ipc_lock |= found.ignores_ipc_lock;
        pinning.queue_bytes = pinning.queue_bytes.max(found.queue_bytes);
    }
    let pool = request.context.pool_config(pinning.ignores_ipc_lock);
    let set_by = request.context.pool_size_set_by();
    diagnosis.memlock = limits.map(|limits| limits::memlock(&limits, &pool, set_by, pinning));
    diagnosis.reason = verdict(request, &diagnosis.devices).await.err();
    diagnosis.rdma = diagnosis.reason.is_none();
    facts.policy_from_env = request.env.policy.is_some() || request.env.fabrics.is_some();
    facts.device_from_env = request.env.device.is_some();
    (diagnosis, facts)
}

/// Reads the system's state. The only test is whether device files can be opened.
pub(in crate::diagnose) fn read(
    files: &SystemFiles,
    request: &DiagnosisRequest,
) -> (Diagnosis, Facts) {
    let interfaces = sysfs::interfaces(files);
    let diagnosis = Diagnosis {
        rdma: false,
        reason: None,
        findings: Vec::<Finding>::new(),
        hints: Vec::new(),
        settings: PathSettings {
            policy: request.policy(),
            fabrics: request.fabrics(),
            device: request.only(),
            verbs: cfg!(all(target_os = "linux", feature = "verbs")),
        },
        host: kernel::host(files),
        library: Library { found: false, version: None, paths: Vec::new(), error: None },
        modules: kernel::modules(files),
        files: kernel::files(files),
        devices: sysfs::devices(files, &interfaces),
        memlock: None::<MemlockReport>,
        huge_pages: HugePagesReport { ..limits::huge_pages(files) },
        descriptors: limits::descriptors(files),
        peer: None,
    };
    let facts = Facts {
        interfaces,
        families: kernel::families(files),
        loadable: kernel::loadable(files),
        parent: parent(),
        ..Facts::default()
    };
    (diagnosis, facts)
}

#[cfg(unix)]
fn parent() -> Option<u32> {
    // Process 1 is init, or a container's main process, but not a user's shell.
    Some(std::os::unix::process::parent_id()).filter(|pid| *pid > 1)
}

#[cfg(not(unix))]
fn parent() -> Option<u32> {
    None
}

/// Runs work that may block. The work gets a separate thread and a time limit.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FabricError> + Send + 'static,
) -> Result<T, FabricError> {
    let gave_up = |source: std::io::Error| FabricError::Verb {
        verb: Verb::Call("a call of rdma-core"),
        device: "this host".to_owned(),
        source: std::sync::Arc::new(source),
    };
    match tokio::time::timeout(LIMIT, off_worker(work)).await {
        Ok(done) => done.map_err(gave_up)?,
        Err(_) => Err(gave_up(std::io::ErrorKind::TimedOut.into())),
    }
}

/// Describes the libraries that were found. rdma-core's version is at the end of a library's file
/// name: `libibverbs.so.1.14.44.0` belongs to version 44.0.
fn library(files: &SystemFiles, listed: &Result<Vec<DeviceInfo>, FabricError>) -> Library {
    let missing = match listed {
        Err(
            error @ (FabricError::NoLibrary { .. }
            | FabricError::NoFunction { .. }
            | FabricError::Platform),
        ) => Some(error.to_string()),
        _ => None,
    };
    if let Some(error) = missing {
        return Library { found: false, version: None, paths: Vec::new(), error: Some(error) };
    }
    let maps = files.read("/proc/self/maps").unwrap_or_default();
    let mut paths: Vec<String> = Vec::new();
    for path in maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..))) {
        let name =
            FilePath::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let ours = ["libibverbs.so.", "librdmacm.so."].iter().any(|start| name.starts_with(start));
        if ours && !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    let version = paths.iter().find_map(|path| version_of(path));
    Library { found: true, version, paths, error: None }
}

fn version_of(path: &str) -> Option<String> {
    let (_, after) = path.rsplit_once(".so.")?;
    // Two numbers of the library itself precede rdma-core's version.
    let numbers: Vec<&str> = after.split('.').collect();
    match numbers.as_slice() {
        [_, _, major, minor, ..] => Some(format!("{major}.{minor}")),
        _ => None,
    }
}

/// Adds facts that rdma-core reports and the kernel's files do not contain.
fn fill_in(device: &mut Device, info: Option<&DeviceInfo>, library: bool) {
    if let Some(info) = info {
        device.addresses = info.addresses.clone();
        for port in &mut device.ports {
            let known = info.ports.iter().find(|known| u32::from(known.number) == port.number);
            port.mtu = known.map(|known| known.mtu).filter(|mtu| *mtu > 0);
        }
    } else if !library {
        // A RoCE GID contains the address.
        let gids = device.ports.iter().flat_map(|port| &port.gids);
        device.addresses =
            gids.filter_map(|gid| gid.gid.to_ipv4_mapped().map(IpAddr::V4)).collect();
        device.addresses.dedup();
    }
}

fn simulated(fabric: &Fabric) -> Vec<Device> {
    let Ok(info) = fabric.info() else { return Vec::new() };
    let ports = info.ports.iter().map(|port| Port {
        number: port.number.into(),
        state: port.state.to_string().to_uppercase(),
        physical_state: None,
        link_layer: "simulated".to_owned(),
        mtu: Some(port.mtu),
        rate: None,
        traffic_class: None,
        lid: None,
        gids: Vec::new(),
    });
    vec![Device {
        ports: ports.collect(),
        transport: info.transport.to_string(),
        driver: None,
        firmware: None,
        guid: None,
        interfaces: Vec::new(),
        interface_mtu: None,
        pcie: None,
        addresses: info.addresses,
        limits: None,
        steps: Vec::new(),
        usable: false,
        reason: None,
        name: info.name,
    }]
}

/// Creates on a device everything that a connection needs, and then a connection. Returns how many
/// bytes a connection's queues pin on the device, and whether the device applies the memlock limit
/// even to processes with CAP_IPC_LOCK.
async fn try_out(device: &mut Device, context: &Context) -> Pinning {
    let name = device.name.clone();
    let simulated = context.simulated();
    if simulated.is_none() {
        let tried = name.clone();
        match off_thread(move || Fabric::self_test(&tried)).await {
            Ok(trial) => {
                device.limits = trial.limits.map(|l| Limits {
                    max_qp: l.max_qp,
                    max_qp_wr: l.max_qp_wr,
                    max_cq: l.max_cq,
                    max_cqe: l.max_cqe,
                    max_mr: l.max_mr,
                    max_mr_size: l.max_mr_size,
                });
                device.steps = steps(&name, &trial);
            }
            // The kernel has the device, but rdma-core does not list it.
            Err(error) => {
                device.reason = Some(from_error::fabric(error));
                return Pinning::default();
            }
        }
    }
    let opened = match simulated {
        Some(fabric) => Ok(fabric),
        None => off_thread(move || Fabric::open(Some(&name))).await.map_err(from_error::fabric),
    };
    let fabric = match opened {
        Ok(fabric) => fabric,
        Err(reason) => {
            let tried = device.steps.iter().find_map(|step| step.reason.clone());
            device.reason = Some(better(tried, reason));
            return Pinning::default();
        }
    };
    let began = std::time::Instant::now();
    let pool = context.pool(&fabric).await;
    let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    let detail =
        pool.as_ref().map_or(String::new(), |pool| format!("{} bytes", pool.config().total));
    let reason = pool.as_ref().err().cloned();
    device.steps.push(Step { name: "pool of pinned memory".to_owned(), micros, reason, detail });
    match (pool, device.addresses.first()) {
        (Ok(pool), Some(ip)) => device.steps.extend(loopback::run(&fabric, &pool, *ip).await),
        (Err(reason), _) => device.reason = Some(reason),
        (Ok(_), None) => {}
    }
    if device.reason.is_none() {
        device.reason = device.steps.iter().find_map(|step| step.reason.clone());
    }
    device.usable = device.reason.is_none();
    Pinning::of(&*fabric.registrar())
}

/// Selects the better explanation. A registration over the limit explains more than an unusable
/// device. A queue pair that cannot be created explains more than a missing address, which would
/// not help.
fn better(tried: Option<Reason>, opened: Reason) -> Reason {
    let explains = |tried: &Reason| match tried.code() {
        ReasonCode::Memlock => true,
        ReasonCode::QueuePairRefused => opened.code() == ReasonCode::NotOnRdmaDevice,
        _ => false,
    };
    tried.filter(explains).unwrap_or(opened)
}

fn steps(device: &str, trial: &SelfTest) -> Vec<Step> {
    let words = |verb: &Verb| match verb {
        Verb::Call("ibv_open_device") => "open the device",
        Verb::Call("ibv_alloc_pd") => "protection domain",
        Verb::Call("ibv_reg_mr") => "memory registration",
        Verb::Call("ibv_create_comp_channel") => "completion channel",
        Verb::Call("ibv_create_cq") => "completion queue",
        Verb::Call("ibv_create_qp") => "queue pair",
        _ => "another call",
    };
    let one = |step: &tonic_rdma_fabric::SelfTestStep| Step {
        name: words(&step.verb).to_owned(),
        micros: u64::try_from(step.took.as_micros()).unwrap_or(u64::MAX),
        reason: step.error.as_ref().map(|error| {
            let copy = || match error.raw_os_error() {
                Some(code) => std::io::Error::from_raw_os_error(code),
                None => std::io::Error::other(error.to_string()),
            };
            match step.verb {
                Verb::Call("ibv_reg_mr") => {
                    from_error::pool(&PoolError::Register(RegisterError::new(4096, copy())))
                }
                verb => from_error::fabric(FabricError::QueuePairRefused {
                    device: device.to_owned(),
                    verb,
                    source: error.clone(),
                }),
            }
        }),
        detail: step.verb.to_string(),
    };
    trial.steps.iter().map(one).collect()
}

/// Decides whether the transport would use RDMA, from its own decisions as client and server and
/// from the tested connections.
async fn verdict(request: &DiagnosisRequest, devices: &[Device]) -> Result<(), Reason> {
    if request.policy() == Policy::Off {
        return Err(Reason::new(ReasonCode::Policy, request.off()));
    }
    if !request.fabrics().contains(&FabricKind::Verbs) {
        return Err(Reason::new(
            ReasonCode::Policy,
            "RDMA is not among the fabrics that are allowed",
        ));
    }
    let path = request.context.paths(&[FabricKind::Verbs]).first().copied().unwrap_or(Path::Verbs);
    let only = request.env.device.as_deref();
    request.context.check(path, only).await?;
    request.context.local(path, None, only).await?;
    let only = request.only();
    let allowed =
        || devices.iter().filter(|device| only.as_deref().is_none_or(|name| name == device.name));
    if allowed().any(|device| device.usable) {
        return Ok(());
    }
    match allowed().find_map(|device| device.reason.clone()) {
        Some(reason) => Err(reason),
        None => Ok(()),
    }
}

/// Facts that the cures need and the report does not contain.
#[derive(Debug, Clone, Default)]
pub(in crate::diagnose) struct Facts {
    pub(in crate::diagnose) interfaces: Vec<Interface>,
    /// The distribution, and the distributions that it is derived from.
    pub(in crate::diagnose) families: Vec<String>,
    /// The drivers that the kernel provides, loaded or not.
    pub(in crate::diagnose) loadable: Loadable,
    /// The process that started this process.
    pub(in crate::diagnose) parent: Option<u32>,
    /// Whether `TONIC_RDMA` is set.
    pub(in crate::diagnose) policy_from_env: bool,
    /// Whether `TONIC_RDMA_DEVICE` is set.
    pub(in crate::diagnose) device_from_env: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_that_is_refused_explains_more_than_a_missing_address() {
        let [refused, memlock, no_address, no_port] = [
            ReasonCode::QueuePairRefused,
            ReasonCode::Memlock,
            ReasonCode::NotOnRdmaDevice,
            ReasonCode::NoActivePort,
        ]
        .map(|code| Reason::new(code, "why"));
        let code = |tried: Option<&Reason>, opened: &Reason| {
            better(tried.cloned(), opened.clone()).code().as_str()
        };
        assert_eq!(code(Some(&refused), &no_address), "queue-pair-refused");
        assert_eq!(code(Some(&refused), &no_port), "no-active-port");
        assert_eq!(code(Some(&memlock), &no_port), "memlock");
        assert_eq!(code(Some(&no_port), &no_address), "not-on-rdma-device");
        assert_eq!(code(None, &no_address), "not-on-rdma-device");
    }

    #[test]
    fn the_version_is_in_the_files_name() {
        assert_eq!(
            version_of("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0").as_deref(),
            Some("44.0")
        );
        assert_eq!(version_of("/usr/lib64/librdmacm.so.1.3.50.2").as_deref(), Some("50.2"));
        for bad in ["/usr/lib/libibverbs.so.1", "/usr/lib/libibverbs.so", "", "/a.so.1.2.3"] {
            assert_eq!(version_of(bad), None, "{bad}");
        }
    }
}
