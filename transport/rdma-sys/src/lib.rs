//! Declarations of rdma-core's libibverbs and librdmacm, and their functions, loaded at run time.
//!
//! | module | what |
//! |---|---|
//! | `library` | opens a library, or finds it for another processor, and looks up functions in it |
//! | `error` | why the libraries cannot be used |
//! | `functions` | the table: each function, its version, and whether a library may lack it; filled once |
//! | `inline` | functions that verbs.h defines as inline: they call the device's driver |
//! | `objects` | the objects that libibverbs makes: contexts, domains, regions, queues |
//! | `device`, `port`, `queue`, `work`, `cm` | the other structs and the constants of the two headers |
//!
//! Only items that tonic-rdma uses are declared, under their C names. Structs that only the
//! libraries allocate are declared up to the last field that is used. The constants of a C enum are
//! in a module with its name, and their type is `Type` there. A C enum is not declared as a Rust
//! enum, because a library that is newer than this crate may return a value without a name here.
//!
//! # Loading
//!
//! [`load`] opens `libibverbs.so.1` and `librdmacm.so.1` with dlopen(3), and looks up each function
//! with the version that a linked program would be bound to. Without a call to `load`, no library
//! is mapped. Functions that are called before `load`, or after `load` has failed, fail with
//! `EOPNOTSUPP`. The libraries stay loaded until the process ends.
//!
//! dlopen runs the constructors of the libraries in this process. A constructor that crashes ends
//! the process, as it would in a program linked to the library. `TONIC_RDMA=off` keeps tonic-rdma
//! from loading the libraries.
//!
//! # Versions
//!
//! The oldest supported rdma-core is 22, of Debian 10 and RHEL 8. `abi.txt` in this crate's folder
//! lists sizes, offsets, constants, prototypes and symbol versions. A test compares this file with
//! the declarations. `scripts/check-bindings` compares the file with the headers and libraries of
//! the rdma-core that is installed.
//!
//! On systems other than Linux, and on processors other than x86-64 and AArch64, [`load`] returns
//! [`LoadError::Platform`].

#![allow(non_camel_case_types, reason = "types have the names that C gives them")]

mod error;

#[cfg(all(test, target_os = "linux"))]
mod abi;
#[cfg(target_os = "linux")]
mod cm;
#[cfg(target_os = "linux")]
mod device;
#[cfg(target_os = "linux")]
mod functions;
#[cfg(target_os = "linux")]
mod inline;
#[cfg(target_os = "linux")]
mod library;
#[cfg(target_os = "linux")]
mod macros;
#[cfg(target_os = "linux")]
mod objects;
#[cfg(target_os = "linux")]
mod port;
#[cfg(target_os = "linux")]
mod queue;
#[cfg(target_os = "linux")]
mod work;

pub use self::error::LoadError;
#[cfg(target_os = "linux")]
pub use self::{
    cm::*,
    device::*,
    functions::*,
    inline::{ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_query_port, ibv_req_notify_cq},
    objects::*,
    port::*,
    queue::*,
    work::*,
};

/// Always fails, because this system has no rdma-core.
///
/// # Errors
/// [`LoadError::Platform`].
#[cfg(not(target_os = "linux"))]
pub fn load() -> Result<(), LoadError> {
    Err(LoadError::Platform)
}
