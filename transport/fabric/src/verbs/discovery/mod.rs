//! Which RDMA libraries, devices, ports and addresses this host has.
//!
//! | module | what |
//! |---|---|
//! | `lib_probe` | loads libibverbs and librdmacm, or says what is missing |
//! | `device_list` | the device list of libibverbs |
//! | `attributes` | name, limits and ports of an open device |
//! | `enumerate` | all devices, and the addresses that lie on them |

pub(super) mod attributes;
pub(super) mod device_list;
pub(super) mod enumerate;
pub(super) mod lib_probe;

use std::io::ErrorKind;
use std::path::Path;

/// The kernel's class of RDMA devices, which the modules of any driver make.
const CLASS: &str = "/sys/class/infiniband_verbs";

/// Whether the kernel shows this process a network interface of a device's own: an InfiniBand
/// device has one by IPoIB. True where sysfs does not tell.
pub(crate) fn has_interface(device: &str) -> bool {
    let class = Path::new("/sys/class/infiniband").join(device).join("device");
    match std::fs::read_dir(class.join("net")) {
        Ok(mut interfaces) => interfaces.next().is_some(),
        Err(error) => error.kind() != ErrorKind::NotFound || !class.exists(),
    }
}

/// Whether the kernel may have RDMA devices: false if it surely has none.
pub(crate) fn may_have_devices() -> bool {
    match std::fs::read_dir(CLASS) {
        Ok(entries) => {
            entries.flatten().any(|at| at.file_name().as_encoded_bytes().starts_with(b"uverbs"))
        }
        // Where sysfs is hidden, devices may still be there.
        Err(error) => error.kind() != ErrorKind::NotFound || !Path::new("/sys/class/net").exists(),
    }
}
