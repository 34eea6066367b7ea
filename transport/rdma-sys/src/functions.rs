//! The functions of both libraries, and the table of their addresses.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libc::sockaddr;

use crate::cm::*;
use crate::device::*;
use crate::error::LoadError;
use crate::library::Library;
use crate::objects::*;
use crate::port::*;
use crate::queue::*;
use crate::work::*;

static TABLE: OnceLock<Result<Table, LoadError>> = OnceLock::new();

/// Whether the declarations have been compared with the headers for this processor.
const IS_DECLARED: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Loads the libraries at the first call. Later calls return the same result.
///
/// # Errors
/// A library is missing, is refused by the dynamic linker, or lacks a function.
/// [`LoadError::Platform`] if this crate has no declarations for this processor.
pub fn load() -> Result<(), LoadError> {
    let load = || match IS_DECLARED {
        true => Table::load(&Files::installed()),
        false => Err(LoadError::Platform),
    };
    TABLE.get_or_init(load).as_ref().map(|_| ()).map_err(Clone::clone)
}

/// The functions, if they are loaded.
#[inline]
fn table() -> Option<&'static Table> {
    TABLE.get()?.as_ref().ok()
}

/// The return type of a function that the libraries may lack.
trait Failure {
    /// The value that reports failure.
    fn failure() -> Self;
}

impl Failure for () {
    fn failure() {}
}

impl Failure for c_int {
    fn failure() -> c_int {
        libc::EOPNOTSUPP
    }
}

impl<T> Failure for *mut T {
    fn failure() -> *mut T {
        std::ptr::null_mut()
    }
}

impl<T> Failure for *const T {
    fn failure() -> *const T {
        std::ptr::null()
    }
}

/// Replaces a function that a library lacks, or that is called before the libraries are loaded.
/// This function reports failure in the same way as the libraries' functions.
#[cold]
fn absent<T: Failure>() -> T {
    // SAFETY: the C library's errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::EOPNOTSUPP };
    T::failure()
}

/// A function of the table, as declared in Rust.
#[cfg(test)]
pub(crate) struct Declared {
    pub(crate) library: &'static str,
    pub(crate) version: &'static str,
    pub(crate) is_optional: bool,
    pub(crate) name: &'static str,
    pub(crate) arguments: &'static [&'static str],
    pub(crate) returned: &'static str,
}

/// Declares the table, the look-up of its functions, and for each entry a function that calls it.
macro_rules! functions {
    ($(
        $library:ident = $file:literal {
            required { $(
                $(#[$doc:meta])*
                $version:literal fn $name:ident($($arg:ident: $type:ty),*) -> $returned:ty;
            )* }
            optional { $(
                $(#[$opt_doc:meta])*
                $opt_version:literal fn $opt_name:ident($($opt_arg:ident: $opt_type:ty),*)
                    -> $opt_returned:ty;
            )* }
        }
    )*) => {
        /// The addresses of the functions. Functions that a library may lack are optional.
        pub(crate) struct Table {$(
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> $returned,)*
            $(pub(crate) $opt_name: Option<unsafe extern "C" fn($($opt_type),*) -> $opt_returned>,)*
        )*}

        /// The file names of the libraries.
        pub(crate) struct Files<'a> {$(
            pub(crate) $library: &'a CStr,
        )*}

        impl Files<'static> {
            /// The names that the dynamic linker searches for.
            pub(crate) fn installed() -> Files<'static> {
                Files {$(
                    $library: const {
                        match CStr::from_bytes_with_nul(concat!($file, "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("a name has a zero"),
                        }
                    },
                )*}
            }
        }

        impl Table {
            /// Opens the libraries and looks up their functions.
            ///
            /// # Errors
            /// A library cannot be opened, or lacks a function.
            pub(crate) fn load(files: &Files<'_>) -> Result<Table, LoadError> {
                $(let $library = Library::open($file, files.$library)?;)*
                Ok(Table {$(
                    $($name: {
                        let found = $library.find(stringify!($name), $version)?;
                        // SAFETY: the symbol of this version is a function of this type in the
                        // headers, with which `scripts/check-bindings` compares the declarations.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<c_void>,
                                unsafe extern "C" fn($($type),*) -> $returned,
                            >(found)
                        }
                    },)*
                    $($opt_name: {
                        let found = $library.find(stringify!($opt_name), $opt_version);
                        // SAFETY: as above.
                        found.ok().map(|found| unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<c_void>,
                                unsafe extern "C" fn($($opt_type),*) -> $opt_returned,
                            >(found)
                        })
                    },)*
                )*})
            }
        }

        $($(
            $(#[$doc])*
            ///
            /// # Safety
            /// The arguments must be as the manual page requires.
            pub unsafe fn $name($($arg: $type),*) -> $returned {
                match table() {
                    // SAFETY: the caller's promise.
                    Some(table) => unsafe { (table.$name)($($arg),*) },
                    None => absent(),
                }
            }
        )*
        $(
            $(#[$opt_doc])*
            ///
            /// # Safety
            /// The arguments must be as the manual page requires.
            pub unsafe fn $opt_name($($opt_arg: $opt_type),*) -> $opt_returned {
                match table().and_then(|table| table.$opt_name) {
                    // SAFETY: the caller's promise.
                    Some(function) => unsafe { function($($opt_arg),*) },
                    None => absent(),
                }
            }
        )*)*

        /// Whether the loaded libraries have a function that older versions lack. False before the
        /// libraries are loaded.
        pub mod has {
            $($(
                #[doc = concat!("Whether [`", stringify!($opt_name), "`](super::", stringify!($opt_name), ") is there.")]
                pub fn $opt_name() -> bool {
                    super::table().is_some_and(|table| table.$opt_name.is_some())
                }
            )*)*
        }

        /// All functions, as declared in Rust.
        #[cfg(test)]
        pub(crate) const DECLARED: &[Declared] = &[$(
            $(Declared {
                library: $file,
                version: $version,
                is_optional: false,
                name: stringify!($name),
                arguments: &[$(stringify!($type)),*],
                returned: stringify!($returned),
            },)*
            $(Declared {
                library: $file,
                version: $opt_version,
                is_optional: true,
                name: stringify!($opt_name),
                arguments: &[$(stringify!($opt_type)),*],
                returned: stringify!($opt_returned),
            },)*
        )*];
    };
}

functions! {
    verbs = "libibverbs.so.1" {
        required {
            /// Lists the devices of this host. Returns null and sets errno on failure.
            "IBVERBS_1.1" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device;
            /// Frees the array that `ibv_get_device_list` returned.
            "IBVERBS_1.1" fn ibv_free_device_list(list: *mut *mut ibv_device) -> ();
            /// Returns the device's name, such as `mlx5_0`.
            "IBVERBS_1.1" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
            /// Opens a device. Returns null and sets errno on failure.
            "IBVERBS_1.1" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
            /// Closes the context that `ibv_open_device` returned.
            "IBVERBS_1.1" fn ibv_close_device(context: *mut ibv_context) -> c_int;
            /// Writes the attributes of a device.
            "IBVERBS_1.1" fn ibv_query_device(
                context: *mut ibv_context, device_attr: *mut ibv_device_attr
            ) -> c_int;
            /// Writes the port attributes that the first versions of libibverbs had.
            #[allow(unreachable_pub, reason = "the inline function of this name calls it")]
            "IBVERBS_1.1" fn ibv_query_port(
                context: *mut ibv_context, port_num: u8, port_attr: *mut _compat_ibv_port_attr
            ) -> c_int;
            /// Writes an address of a port.
            "IBVERBS_1.1" fn ibv_query_gid(
                context: *mut ibv_context, port_num: u8, index: c_int, gid: *mut ibv_gid
            ) -> c_int;
            /// Makes a protection domain. Returns null and sets errno on failure.
            "IBVERBS_1.1" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
            /// Frees a protection domain.
            "IBVERBS_1.1" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
            /// Registers memory at its own address. Returns null and sets errno on failure. In
            /// verbs.h, the macro `ibv_reg_mr` calls [`ibv_reg_mr_iova2`] if `access` may have
            /// optional flags. This function does not.
            "IBVERBS_1.1" fn ibv_reg_mr(
                pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int
            ) -> *mut ibv_mr;
            /// Ends a registration.
            "IBVERBS_1.1" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
            /// Makes a completion channel. Returns null and sets errno on failure.
            "IBVERBS_1.0" fn ibv_create_comp_channel(
                context: *mut ibv_context
            ) -> *mut ibv_comp_channel;
            /// Destroys a completion channel.
            "IBVERBS_1.0" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
            /// Makes a completion queue. Returns null and sets errno on failure.
            "IBVERBS_1.1" fn ibv_create_cq(
                context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut
                ibv_comp_channel, comp_vector: c_int
            ) -> *mut ibv_cq;
            /// Destroys a completion queue, once all its events are acknowledged.
            "IBVERBS_1.1" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
            /// Takes an event of a completion channel. On failure, the result is not 0 and errno
            /// is set.
            "IBVERBS_1.1" fn ibv_get_cq_event(
                channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void
            ) -> c_int;
            /// Acknowledges events of a completion queue.
            "IBVERBS_1.1" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) -> ();
            /// Makes a queue pair. Returns null and sets errno on failure.
            "IBVERBS_1.1" fn ibv_create_qp(
                pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr
            ) -> *mut ibv_qp;
            /// Modifies those attributes of a queue pair that the mask names.
            "IBVERBS_1.1" fn ibv_modify_qp(
                qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int
            ) -> c_int;
            /// Destroys a queue pair.
            "IBVERBS_1.1" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
            /// Takes an asynchronous event of a device. On failure, the result is not 0 and
            /// errno is set.
            "IBVERBS_1.1" fn ibv_get_async_event(
                context: *mut ibv_context, event: *mut ibv_async_event
            ) -> c_int;
            /// Acknowledges an asynchronous event.
            "IBVERBS_1.1" fn ibv_ack_async_event(event: *mut ibv_async_event) -> ();
            /// Returns the description of a status.
            "IBVERBS_1.1" fn ibv_wc_status_str(status: ibv_wc_status::Type) -> *const c_char;
            /// Keeps registered memory out of forked children, on kernels that need this.
            "IBVERBS_1.1" fn ibv_fork_init() -> c_int;
        }
        optional {
            /// Registers memory at an address that the caller chooses. Available since
            /// rdma-core 25. Without this function, memory can be registered only at its own
            /// address.
            "IBVERBS_1.7" fn ibv_reg_mr_iova(
                pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int
            ) -> *mut ibv_mr;
            /// Registers memory with optional access flags, such as relaxed ordering. Available
            /// since rdma-core 28. Without this function, no access flag is optional, and relaxed
            /// ordering is not available.
            "IBVERBS_1.8" fn ibv_reg_mr_iova2(
                pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint
            ) -> *mut ibv_mr;
            /// Registers memory of another device, given by the descriptor of its dma-buf.
            /// Available since rdma-core 34. Without this function, such memory cannot be
            /// registered.
            "IBVERBS_1.12" fn ibv_reg_dmabuf_mr(
                pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int
            ) -> *mut ibv_mr;
        }
    }
    cm = "librdmacm.so.1" {
        required {
            /// Makes an event channel. Returns null and sets errno on failure.
            "RDMACM_1.0" fn rdma_create_event_channel() -> *mut rdma_event_channel;
            /// Closes the channel's descriptor and frees the channel, once all its ids are
            /// destroyed.
            "RDMACM_1.0" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> ();
            /// Allocates an identifier, the connection manager's counterpart of a socket.
            "RDMACM_1.0" fn rdma_create_id(
                channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void,
                ps: rdma_port_space::Type
            ) -> c_int;
            /// Destroys an id, once all its events are acknowledged.
            "RDMACM_1.0" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
            /// Binds an id to an address of this host.
            "RDMACM_1.0" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
            /// Resolves the peer's IP address to its RDMA address, and binds the id to a local
            /// device.
            "RDMACM_1.0" fn rdma_resolve_addr(
                id: *mut rdma_cm_id, src_addr: *mut sockaddr, dst_addr: *mut sockaddr, timeout_ms:
                c_int
            ) -> c_int;
            /// Resolves the route to the peer.
            "RDMACM_1.0" fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
            /// Makes the queue pair of an id.
            "RDMACM_1.0" fn rdma_create_qp(
                id: *mut rdma_cm_id, pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr
            ) -> c_int;
            /// Sends a connect request.
            "RDMACM_1.0" fn rdma_connect(
                id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param
            ) -> c_int;
            /// Listens for connect requests.
            "RDMACM_1.0" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
            /// Accepts a connect request.
            "RDMACM_1.0" fn rdma_accept(
                id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param
            ) -> c_int;
            /// Rejects a connect request.
            "RDMACM_1.0" fn rdma_reject(
                id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8
            ) -> c_int;
            /// Ends a connection.
            "RDMACM_1.0" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
            /// Takes an event of a channel.
            "RDMACM_1.0" fn rdma_get_cm_event(
                channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event
            ) -> c_int;
            /// Acknowledges an event.
            "RDMACM_1.0" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
            /// Returns the description of a kind of event.
            "RDMACM_1.0" fn rdma_event_str(event: rdma_cm_event_type::Type) -> *const c_char;
            /// Sets an option of an id.
            "RDMACM_1.0" fn rdma_set_option(
                id: *mut rdma_cm_id, level: c_int, optname: c_int, optval: *mut c_void, optlen:
                usize
            ) -> c_int;
            /// Moves an id to another channel.
            "RDMACM_1.0" fn rdma_migrate_id(
                id: *mut rdma_cm_id, channel: *mut rdma_event_channel
            ) -> c_int;
            /// Opens all devices, which the library keeps open. Returns null and sets errno on
            /// failure.
            "RDMACM_1.0" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context;
            /// Frees the list of open devices.
            "RDMACM_1.0" fn rdma_free_devices(list: *mut *mut ibv_context) -> ();
        }
        optional {
            /// Completes a connection on the side that connects, if the library did not make the
            /// queue pair. Available since rdma-core 23. Without this function, the library has to
            /// make the queue pair.
            "RDMACM_1.2" fn rdma_establish(id: *mut rdma_cm_id) -> c_int;
            /// Writes the attributes for the next state of a queue pair that the library did not
            /// make. Available since rdma-core 23. Without this function, the library has to make
            /// the queue pair.
            "RDMACM_1.2" fn rdma_init_qp_attr(
                id: *mut rdma_cm_id, qp_attr: *mut ibv_qp_attr, qp_attr_mask: *mut c_int
            ) -> c_int;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions fail because no test in this program loads the global table.
    #[test]
    fn functions_fail_before_they_are_loaded() {
        // SAFETY: nothing is loaded, so the arguments reach no library.
        let (list, disconnected) = unsafe {
            (ibv_get_device_list(std::ptr::null_mut()), rdma_disconnect(std::ptr::null_mut()))
        };
        assert!(list.is_null());
        assert_eq!(disconnected, libc::EOPNOTSUPP);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
        assert!(!has::ibv_reg_mr_iova() && !has::rdma_establish());
    }
}
