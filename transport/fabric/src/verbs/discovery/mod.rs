//! Finds the RDMA libraries, devices, ports and addresses of this host.
//!
//! | module | what |
//! |---|---|
//! | `device_list` | the device list of libibverbs |
//! | `attributes` | name, limits and ports of an open device |
//! | `enumerate` | all devices and their addresses |
//! | `routes` | the destinations that the kernel routes from an address |
//!
//! rdma-core's libraries are loaded when RDMA is first used. No function of these libraries is
//! called before [`probe`] has loaded them.

pub(super) mod attributes;
pub(super) mod device_list;
pub(super) mod enumerate;
pub(super) mod routes;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::OnceLock;

use rdma_sys::LoadError;
use tonic_rdma_memory::PerProcess;

use crate::error::FabricError;

/// The directory of the kernel's class of RDMA devices. Loading any RDMA driver creates this
/// directory.
const CLASS: &str = "/sys/class/infiniband_verbs";

/// Whether the device has a network interface that this process can see. IPoIB gives an InfiniBand
/// device an interface. True if sysfs does not show the interfaces.
pub(crate) fn has_interface(device: &str) -> bool {
    let class = Path::new("/sys/class/infiniband").join(device).join("device");
    match std::fs::read_dir(class.join("net")) {
        Ok(mut interfaces) => interfaces.next().is_some(),
        Err(error) => error.kind() != ErrorKind::NotFound || !class.exists(),
    }
}

/// Whether the kernel may have RDMA devices. False only if the kernel certainly has no devices.
pub(crate) fn may_have_devices() -> bool {
    match std::fs::read_dir(CLASS) {
        Ok(entries) => {
            entries.flatten().any(|at| at.file_name().as_encoded_bytes().starts_with(b"uverbs"))
        }
        // If sysfs is hidden, devices may still exist.
        Err(error) => error.kind() != ErrorKind::NotFound || !Path::new("/sys/class/net").exists(),
    }
}

/// The result of loading the libraries.
static ANSWER: PerProcess<OnceLock<Result<(), FabricError>>> = PerProcess::new(OnceLock::new);

/// Whether a parent of this process has loaded the libraries, or has tried to load them. The
/// objects of the libraries and of this provider then belong to the parent, and a child destroys
/// none of these objects (R23).
pub(crate) fn is_inherited() -> bool {
    ANSWER.inherited().is_some()
}

/// Succeeds if both libraries are loaded. The answer is kept, so only new processes use libraries
/// that are installed later.
///
/// # Errors
/// An error that names the missing part, or [`FabricError::Forked`] in a child of a process that
/// has loaded the libraries.
pub(crate) fn probe() -> Result<(), FabricError> {
    match ANSWER.inherited().map(OnceLock::get) {
        Some(Some(Err(error))) => return Err(error.clone()),
        Some(_) => return Err(FabricError::Forked),
        None => {}
    }
    ANSWER
        .get_or_init(|| {
            rdma_sys::load().map_err(reason)?;
            // This call lets the application fork. Since Linux 5.12 the kernel copies pinned pages
            // for a child, and the call does nothing. On older kernels the call keeps registered
            // memory out of children. SAFETY: both libraries are loaded; called once, before
            // anything is registered.
            match unsafe { rdma_sys::ibv_fork_init() } {
                0 => {}
                errno => {
                    tracing::debug!(errno, "ibv_fork_init failed: do not fork while RDMA is in use")
                }
            }
            Ok(())
        })
        .clone()
}

fn reason(error: LoadError) -> FabricError {
    match error {
        LoadError::Library { library, dlerror } => {
            FabricError::NoLibrary { name: library, dlerror }
        }
        LoadError::Symbol { library, symbol, dlerror } => {
            FabricError::NoFunction { library, function: symbol, dlerror }
        }
        _ => FabricError::Platform,
    }
}
