//! Transfers between files and pool memory through io_uring(7), with O_DIRECT if the file was
//! opened with it. The disk then accesses the same memory as the RDMA device, without a copy by the
//! processor.
//!
//! | state of a piece of work | its memory belongs to | becomes |
//! |---|---|---|
//! | queued: the ring is full | the work | posted, when another ends |
//! | posted | the work; the kernel reads or writes it (R10) | posted again after EINTR and EAGAIN; done |
//! | done | whoever holds the [`Transfer`]; nobody if that has been dropped | |
//!
//! | module | what |
//! |---|---|
//! | `ring` | [`Ring`]: posting, and the thread that takes completions |
//! | `transfer` | [`Transfer`]: waiting for one |
//! | `fixed` | arenas that are also registered with the ring |
//! | `unsupported` | the [`Ring`] of other systems, which cannot be made |

#[cfg(target_os = "linux")]
pub(crate) mod fixed;
#[cfg(target_os = "linux")]
mod ring;
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
mod transfer;
#[cfg(not(target_os = "linux"))]
mod unsupported;

#[cfg(target_os = "linux")]
pub use ring::Ring;
pub use transfer::Transfer;
#[cfg(not(target_os = "linux"))]
pub use unsupported::Ring;
