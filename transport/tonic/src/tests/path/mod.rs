//! The paths of calls: fast path, TCP, and stock tonic at either end.

mod fallback;
mod fast;
mod interop;
mod observers;
#[cfg(feature = "shm")]
mod other_user;
mod places;
mod rails;
