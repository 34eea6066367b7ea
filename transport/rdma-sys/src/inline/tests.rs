use std::mem::zeroed;
use std::ptr;

use super::*;
use crate::objects::ibv_context_ops;

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    _: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the tests pass a queue pair.
    unsafe { (*qp).qp_num as c_int }
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    _: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    2
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, num_entries: c_int, _: *mut ibv_wc) -> c_int {
    num_entries
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, solicited_only: c_int) -> c_int {
    40 + solicited_only
}

unsafe extern "C" fn fill_port(
    _: *mut ibv_context,
    port_num: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: the tests pass room for the attributes.
    unsafe { (*attr).lid = u16::from(port_num) + len as u16 };
    0
}

/// An open device that no library has made.
fn context() -> ibv_context {
    // SAFETY: null pointers, numbers and options of functions may be zero; nobody locks the mutex.
    unsafe { zeroed() }
}

#[test]
fn work_goes_to_the_driver_of_the_context() {
    let mut context = context();
    let set = |ops: &mut ibv_context_ops| {
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.poll_cq = Some(poll_cq);
        ops.req_notify_cq = Some(req_notify_cq);
    };
    // SAFETY: null pointers and numbers may be zero.
    let (mut qp, mut cq): (ibv_qp, ibv_cq) = unsafe { (zeroed(), zeroed()) };
    qp.qp_num = 7;
    for (is_set, answers) in [(false, [95, 95, -95, 95]), (true, [7, 2, 5, 41])] {
        if is_set {
            set(&mut context.ops);
        }
        (qp.context, cq.context) = (&raw mut context, &raw mut context);
        // SAFETY: both have a context, and the functions above ignore what is null.
        let answered = unsafe {
            [
                ibv_post_send(&mut qp, ptr::null_mut(), ptr::null_mut()),
                ibv_post_recv(&mut qp, ptr::null_mut(), ptr::null_mut()),
                ibv_poll_cq(&mut cq, 5, ptr::null_mut()),
                ibv_req_notify_cq(&mut cq, 1),
            ]
        };
        assert_eq!(answered, answers);
    }
}

/// Without the context's function, the library's function is called. The library is not loaded
/// here, so this call fails.
#[test]
fn a_port_is_asked_by_the_way_that_the_context_has() {
    let mut outer = verbs_context {
        query_port: Some(fill_port),
        between: [ptr::null_mut(); 38],
        sz: size_of::<verbs_context>(),
        context: context(),
    };
    // SAFETY: numbers may be zero.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    let mut query = |outer: &mut verbs_context| {
        attr.lid = 9;
        let outer = &raw mut *outer;
        // SAFETY: the context lies in a `verbs_context` if its `abi_compat` says so.
        let failed = unsafe { ibv_query_port(&raw mut (*outer).context, 1, &mut attr) };
        (failed, attr.lid)
    };
    assert_eq!(query(&mut outer), (libc::EOPNOTSUPP, 0), "a context of its own");
    outer.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
    assert_eq!(query(&mut outer), (0, 53), "an extended one");
    outer.sz -= 8;
    assert_eq!(query(&mut outer), (libc::EOPNOTSUPP, 0), "an extended one that is older");
    outer.sz += 80;
    assert_eq!(query(&mut outer), (0, 53), "an extended one that is newer");
    outer.query_port = None;
    assert_eq!(query(&mut outer), (libc::EOPNOTSUPP, 0), "a driver without the function");
}
