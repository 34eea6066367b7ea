//! The device list of libibverbs.

use std::ffi::CStr;
use std::io;
use std::ptr::NonNull;

use crate::error::FabricError;

/// The device list of libibverbs, freed on drop.
pub(crate) struct List {
    list: *mut *mut rdma_sys::ibv_device,
    len: usize,
}

impl List {
    pub(crate) fn new() -> io::Result<List> {
        let mut len = 0;
        // SAFETY: gives a list and its length, or null.
        let list = unsafe { rdma_sys::ibv_get_device_list(&mut len) };
        match list.is_null() {
            true => Err(io::Error::last_os_error()),
            false => Ok(List { list, len: len.max(0) as usize }),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = NonNull<rdma_sys::ibv_device>> + '_ {
        // SAFETY: the list has `len` entries and lives as long as self.
        (0..self.len).filter_map(|i| NonNull::new(unsafe { *self.list.add(i) }))
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list came from ibv_get_device_list; devices that are open stay valid.
        unsafe { rdma_sys::ibv_free_device_list(self.list) };
    }
}

/// # Safety
/// The device is in a live list.
pub(crate) unsafe fn device_name(device: NonNull<rdma_sys::ibv_device>) -> String {
    // SAFETY: the caller's promise; the name is a string inside the device.
    unsafe {
        let name = rdma_sys::ibv_get_device_name(device.as_ptr());
        if name.is_null() {
            String::new()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }
}

/// The names of all devices. The list is empty if the devices cannot be listed.
fn names() -> Vec<String> {
    // SAFETY: the list is alive.
    List::new()
        .map(|list| list.iter().map(|d| unsafe { device_name(d) }).collect())
        .unwrap_or_default()
}

/// Returns the reason why no event channel could be made.
pub(crate) fn no_channel(source: io::Error) -> FabricError {
    match source.raw_os_error() {
        // librdmacm has found no device.
        Some(libc::ENODEV) if names().is_empty() => FabricError::NoDevice,
        _ => FabricError::NoConnectionManager { source: source.into() },
    }
}
