//! Finds the RDMA libraries, devices, ports and addresses of this host.
//!
//! | module | what |
//! |---|---|
//! | `lib_probe` | loads libibverbs and librdmacm, or says what is missing |
//! | `device_list` | the device list of libibverbs |
//! | `attributes` | name, limits and ports of an open device |
//! | `enumerate` | all devices and their addresses |
//! | `routes` | the destinations that the kernel routes from an address |

pub(super) mod attributes;
pub(super) mod device_list;
pub(super) mod enumerate;
pub(super) mod lib_probe;
pub(super) mod routes;

use std::io::ErrorKind;
use std::path::Path;

/// The directory of the kernel's class of RDMA devices. Any RDMA driver creates it.
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
