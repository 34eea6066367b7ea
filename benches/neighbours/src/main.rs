//! See the library, with the C library's allocator.

fn main() -> std::process::ExitCode {
    neighbours::main()
}
