//! The program with the C library's allocator; see the library.

fn main() -> std::process::ExitCode {
    neighbours::main()
}
