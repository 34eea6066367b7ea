//! Creates each object that a connection needs on a device, one by one, and frees it again, for
//! diagnosis. The device is opened by its name, so that a device without an address or an active
//! port can also be tested.

use std::io;
use std::ptr::{self, NonNull};
use std::time::Instant;

use rdma_sys::{ibv_access_flags, ibv_qp_type};

use crate::error::{FabricError, Verb};
use crate::self_test::{DeviceLimits, SelfTest, SelfTestStep};
use crate::verbs::discovery;
use crate::verbs::discovery::attributes::ports;
use crate::verbs::discovery::device_list::{List, device_name};

/// Length in bytes of the region that is registered. One page shows whether the device registers
/// memory at all. The pool reports how much memory may be pinned.
const REGION: usize = 4096;

/// An object of the library, freed on drop.
struct Object<T> {
    object: NonNull<T>,
    free: fn(NonNull<T>),
}

impl<T> Object<T> {
    fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        (self.free)(self.object);
    }
}

/// The results of the calls, with their times.
#[derive(Default)]
struct Steps(Vec<SelfTestStep>);

impl Steps {
    fn make<T>(
        &mut self,
        call: &'static str,
        make: impl FnOnce() -> *mut T,
        free: fn(NonNull<T>),
    ) -> Option<Object<T>> {
        let began = Instant::now();
        let object = NonNull::new(make());
        let error = object.is_none().then(|| io::Error::last_os_error().into());
        self.0.push(SelfTestStep { verb: Verb::Call(call), took: began.elapsed(), error });
        object.map(|object| Object { object, free })
    }
}

/// The page that is registered.
#[repr(align(4096))]
struct Page([u8; REGION]);

/// See [`Fabric::self_test`](crate::Fabric::self_test).
///
/// # Errors
/// rdma-core is missing, or lists no such device.
pub fn self_test(name: &str) -> Result<SelfTest, FabricError> {
    discovery::probe()?;
    let list = List::new().map_err(|source| FabricError::Verb {
        verb: Verb::Call("ibv_get_device_list"),
        device: "any device".to_owned(),
        source: source.into(),
    })?;
    // SAFETY: the list is alive.
    let listed = |device: &NonNull<rdma_sys::ibv_device>| unsafe { device_name(*device) };
    let Some(device) = list.iter().find(|device| listed(device) == name) else {
        let found: Vec<String> = list.iter().map(|device| listed(&device)).collect();
        return Err(match found.is_empty() {
            true => FabricError::NoDevice,
            false => FabricError::NoSuchDevice { name: name.to_owned(), found },
        });
    };
    Ok(run(device))
}

/// Runs the steps on `device`. The device list that contains `device` must not be freed before the
/// function returns.
fn run(device: NonNull<rdma_sys::ibv_device>) -> SelfTest {
    let mut steps = Steps::default();
    // Variables are dropped in reverse order, so each object is freed before the objects on which
    // it was made.
    let mut page = Box::new(Page([0; REGION]));
    let context = steps.make(
        "ibv_open_device",
        // SAFETY: `self_test` keeps the list that the device is in.
        || unsafe { rdma_sys::ibv_open_device(device.as_ptr()) },
        |context| {
            // SAFETY: opened once, closed once, after all that was made on it.
            unsafe { rdma_sys::ibv_close_device(context.as_ptr()) };
        },
    );
    let Some(context) = context else { return SelfTest { limits: None, steps: steps.0 } };
    // SAFETY: the context is open.
    let limits = unsafe { ports(context.object) }.ok().map(|(_, _, attr)| limits(&attr));

    let domain = steps.make(
        "ibv_alloc_pd",
        // SAFETY: the context is open.
        || unsafe { rdma_sys::ibv_alloc_pd(context.as_ptr()) },
        |domain| {
            // SAFETY: made once, freed once, after all that was made on it.
            unsafe { rdma_sys::ibv_dealloc_pd(domain.as_ptr()) };
        },
    );
    let access =
        ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let _region = domain.as_ref().and_then(|domain| {
        steps.make(
            "ibv_reg_mr",
            // SAFETY: the domain is alive. The page outlives the region, and nobody has the key.
            || unsafe {
                rdma_sys::ibv_reg_mr(
                    domain.as_ptr(),
                    (&raw mut page.0).cast(),
                    REGION,
                    access.0 as i32,
                )
            },
            |region| {
                // SAFETY: registered once, deregistered once.
                unsafe { rdma_sys::ibv_dereg_mr(region.as_ptr()) };
            },
        )
    });
    let channel = steps.make(
        "ibv_create_comp_channel",
        // SAFETY: the context is open.
        || unsafe { rdma_sys::ibv_create_comp_channel(context.as_ptr()) },
        |channel| {
            // SAFETY: made once, destroyed once, after its queue.
            unsafe { rdma_sys::ibv_destroy_comp_channel(channel.as_ptr()) };
        },
    );
    let queue = channel.as_ref().and_then(|channel| {
        steps.make(
            "ibv_create_cq",
            // SAFETY: context and channel are alive.
            || unsafe {
                rdma_sys::ibv_create_cq(context.as_ptr(), 2, ptr::null_mut(), channel.as_ptr(), 0)
            },
            |queue| {
                // SAFETY: made once, destroyed once, after the queue pair.
                unsafe { rdma_sys::ibv_destroy_cq(queue.as_ptr()) };
            },
        )
    });
    let _pair = domain.as_ref().zip(queue.as_ref()).and_then(|(domain, queue)| {
        let mut attr = rdma_sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: queue.as_ptr(),
            recv_cq: queue.as_ptr(),
            srq: ptr::null_mut(),
            cap: rdma_sys::ibv_qp_cap {
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        steps.make(
            "ibv_create_qp",
            // SAFETY: domain and queue are alive.
            || unsafe { rdma_sys::ibv_create_qp(domain.as_ptr(), &mut attr) },
            |pair| {
                // SAFETY: made once, destroyed once.
                unsafe { rdma_sys::ibv_destroy_qp(pair.as_ptr()) };
            },
        )
    });
    SelfTest { limits, steps: steps.0 }
}

fn limits(attr: &rdma_sys::ibv_device_attr) -> DeviceLimits {
    let number = |n: i32| u64::try_from(n).unwrap_or(0);
    DeviceLimits {
        max_qp: number(attr.max_qp),
        max_qp_wr: number(attr.max_qp_wr),
        max_cq: number(attr.max_cq),
        max_cqe: number(attr.max_cqe),
        max_mr: number(attr.max_mr),
        max_mr_size: attr.max_mr_size,
    }
}
