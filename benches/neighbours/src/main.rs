//! The program with the C library's allocator. See the library.

fn main() -> std::process::ExitCode {
    neighbours::main()
}
