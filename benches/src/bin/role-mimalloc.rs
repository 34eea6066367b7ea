//! The processes of a contender with mimalloc. `compare` starts this program instead of itself.

use std::process::ExitCode;

use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    let version = ALLOCATOR.version();
    // Minor version and patch have two digits each.
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    benches::allocator::main("role-mimalloc", &format!("mimalloc {major}.{minor}.{patch}"))
}
