//! Loads rdma-core's libraries when RDMA is first used.
//!
//! No other function of this provider is called before [`probe`] has succeeded.

use std::sync::OnceLock;

use rdma_sys::LoadError;
use tonic_rdma_memory::PerProcess;

use crate::error::FabricError;

/// The result of loading the libraries.
static ANSWER: PerProcess<OnceLock<Result<(), FabricError>>> = PerProcess::new(OnceLock::new);

/// Whether a parent of this process has loaded the libraries. The objects of the libraries and of
/// this provider then belong to the parent, and a child destroys none of these objects (R23).
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
            // memory out of children. SAFETY: both libraries are there; called once, before
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
