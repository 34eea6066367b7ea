//! The reason why the libraries cannot be used.

use std::error::Error;
use std::fmt;

/// The reason why the libraries cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// The system is none of those that the declarations are for: Linux on x86-64 and on AArch64.
    Platform,
    /// A library cannot be opened, because it is missing or the dynamic linker refuses it.
    Library {
        /// The file name of the library.
        library: &'static str,
        /// The dynamic linker's message. If a file for another processor was found, its path and
        /// its processor are appended.
        dlerror: String,
    },
    /// A library was opened but lacks a function. The library is too old, or does not belong to
    /// rdma-core.
    Symbol {
        /// The file name of the library.
        library: &'static str,
        /// The function.
        symbol: &'static str,
        /// The dynamic linker's message, with the file that the linker has opened.
        dlerror: String,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Platform => {
                f.write_str("there are no RDMA libraries for this operating system and processor")
            }
            LoadError::Library { library, dlerror } => {
                write!(f, "{library} cannot be loaded: {dlerror}")
            }
            LoadError::Symbol { library, symbol, dlerror } => {
                write!(f, "{library} has no function {symbol}: {dlerror}")
            }
        }
    }
}

impl Error for LoadError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_library_and_function() {
        let dlerror = "undefined symbol".to_owned();
        let error = LoadError::Symbol { library: "lib.so.1", symbol: "ibv_x", dlerror };
        assert_eq!(error.to_string(), "lib.so.1 has no function ibv_x: undefined symbol");
        let dlerror = "not found".to_owned();
        let error = LoadError::Library { library: "lib.so.1", dlerror };
        assert_eq!(error.to_string(), "lib.so.1 cannot be loaded: not found");
        assert!(LoadError::Platform.to_string().contains("operating system"));
    }
}
