//! A contender's processes with mimalloc: `compare` starts it as it starts itself for those with
//! the C library's allocator.

use std::process::ExitCode;

use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    let version = ALLOCATOR.version();
    // Two digits each of minor version and patch.
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    benches::allocator::main("role-mimalloc", &format!("mimalloc {major}.{minor}.{patch}"))
}
