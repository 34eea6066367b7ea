//! Whether rdma-core is installed.
//!
//! `rdma-mummy-sys` opens libibverbs and librdmacm in a constructor, before `main`, and ignores
//! failure: its functions then return `EOPNOTSUPP`. That tells nobody what is missing, so the
//! libraries are looked for here first, by the same names, and nothing else in this provider is
//! called before [`probe`] has succeeded.

use std::ffi::CStr;
use std::sync::OnceLock;

use crate::error::FabricError;

const LIBRARIES: [(&CStr, &str); 2] =
    [(c"libibverbs.so.1", "libibverbs.so.1"), (c"librdmacm.so.1", "librdmacm.so.1")];

/// Succeeds when both libraries can be loaded. The answer is kept: the bindings cannot load them
/// later either.
pub(crate) fn probe() -> Result<(), FabricError> {
    static ANSWER: OnceLock<Result<(), FabricError>> = OnceLock::new();
    ANSWER
        .get_or_init(|| {
            LIBRARIES.iter().try_for_each(|(c_name, name)| load(c_name, name).map(drop))?;
            // Lets the application fork: on kernels that copy pinned pages for a child (5.12) this
            // does nothing, on older ones registered memory is kept out of children.
            // SAFETY: both libraries are there; called once, before anything is registered.
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

/// Whether rdma-core registers memory at an address of the caller's choice: since version 25.
pub(crate) fn has_reg_mr_iova() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let [(c_name, name), _] = LIBRARIES;
    *ANSWER.get_or_init(|| {
        // SAFETY: the handle is that of a library which is never closed; the symbol is not used
        // (R17).
        let found = |handle| unsafe { libc::dlsym(handle, c"ibv_reg_mr_iova".as_ptr()) };
        load(c_name, name).is_ok_and(|handle| !found(handle).is_null())
    })
}

fn load(c_name: &CStr, name: &'static str) -> Result<*mut libc::c_void, FabricError> {
    // SAFETY: dlopen of a shared object whose constructors are those of rdma-core; the handle is
    // never closed, so nothing taken from it can dangle.
    let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror gives null or a string that lives until this thread's next call of a dl
    // function.
    let dlerror = unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "unknown".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    Err(FabricError::NoLibrary { name, dlerror })
}
