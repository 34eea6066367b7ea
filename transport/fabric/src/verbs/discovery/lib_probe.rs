//! Loads rdma-core's libraries, when RDMA is first asked for.
//!
//! Nothing else in this provider is called before [`probe`] has succeeded.

use std::sync::OnceLock;

use rdma_sys::LoadError;
use tonic_rdma_memory::PerProcess;

use crate::error::FabricError;

/// The result of loading the libraries.
static ANSWER: PerProcess<OnceLock<Result<(), FabricError>>> = PerProcess::new(OnceLock::new);

/// Whether a parent of this process has loaded the libraries: their objects, and those of this
/// provider, are the parent's, and a child destroys none (R23).
pub(crate) fn is_inherited() -> bool {
    ANSWER.inherited().is_some()
}

/// Succeeds when both libraries are loaded. The answer is kept: what is installed later needs a new
/// process.
///
/// # Errors
/// What is missing; [`FabricError::Forked`] in a child of a process that has loaded them.
pub(crate) fn probe() -> Result<(), FabricError> {
    match ANSWER.inherited().map(OnceLock::get) {
        Some(Some(Err(error))) => return Err(error.clone()),
        Some(_) => return Err(FabricError::Forked),
        None => {}
    }
    ANSWER
        .get_or_init(|| {
            rdma_sys::load().map_err(reason)?;
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
