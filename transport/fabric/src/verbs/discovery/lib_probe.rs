//! Loads rdma-core's libraries, when RDMA is first asked for.
//!
//! Nothing else in this provider is called before [`probe`] has succeeded.

use std::sync::OnceLock;

use rdma_sys::LoadError;

use crate::error::FabricError;

/// Succeeds when both libraries are loaded. The answer is kept: what is installed later needs a new
/// process.
pub(crate) fn probe() -> Result<(), FabricError> {
    static ANSWER: OnceLock<Result<(), FabricError>> = OnceLock::new();
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
