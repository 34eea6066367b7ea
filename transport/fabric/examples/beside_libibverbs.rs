//! Finds the RDMA devices of this host, in a program that itself also calls libibverbs.
//!
//! `tests/rdma-core` links this program to the libibverbs that programs load, for which it needs no
//! headers. If it is built in another way, it does not call libibverbs itself.

use tonic_rdma_fabric::Fabric;

/// The libibverbs that this program itself has linked.
#[cfg(links_libibverbs)]
mod linked {
    use std::ffi::{c_int, c_void};
    use std::ptr;

    #[link(name = "libibverbs.so.1", kind = "dylib", modifiers = "+verbatim")]
    unsafe extern "C" {
        fn ibv_rate_to_mbps(rate: c_int) -> c_int;
        fn ibv_get_device_list(count: *mut c_int) -> *mut *mut c_void;
        fn ibv_free_device_list(list: *mut *mut c_void);
    }

    /// The number of devices, or 0 if the kernel has no RDMA.
    pub(crate) fn devices() -> usize {
        const IBV_RATE_10_GBPS: c_int = 3;
        // SAFETY: the function takes any number (R17).
        let rate = unsafe { ibv_rate_to_mbps(IBV_RATE_10_GBPS) };
        assert_eq!(rate, 10_000, "Mbit/s");
        let mut count = 0;
        // SAFETY: the count is writable, and the list is freed once, unread (R17).
        unsafe {
            let list = ibv_get_device_list(ptr::from_mut(&mut count));
            if !list.is_null() {
                ibv_free_device_list(list);
            }
        }
        usize::try_from(count).unwrap_or_default()
    }
}

fn main() {
    let devices = Fabric::devices();
    #[cfg(links_libibverbs)]
    match &devices {
        Ok(found) => assert_eq!(found.len(), linked::devices(), "both find the same devices"),
        Err(tonic_rdma_fabric::FabricError::NoLibrary { .. }) => {
            panic!("libibverbs is linked and librdmacm is not there: {devices:?}")
        }
        // The connection manager is missing or cannot be used.
        Err(_) => drop(linked::devices()),
    }
    match devices {
        Ok(devices) => println!("{} RDMA devices", devices.len()),
        Err(error) => println!("no RDMA devices: {error}"),
    }
}
