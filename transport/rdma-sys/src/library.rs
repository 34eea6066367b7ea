//! Opens a library, and looks up functions in it.

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

use crate::elf;
use crate::error::LoadError;

/// A library that is loaded, and stays so until the process ends.
pub(crate) struct Library {
    name: &'static str,
    handle: NonNull<c_void>,
}

impl Library {
    /// Opens the library that errors call `name`.
    ///
    /// # Errors
    /// It is not there, or the dynamic linker refuses it.
    pub(crate) fn open(name: &'static str, file: &CStr) -> Result<Library, LoadError> {
        // With RTLD_NOW a library that does not go with those that it needs is refused. Otherwise
        // the first call of a function that they lack would end the process.
        // SAFETY: runs the constructors of rdma-core, which any program that is linked to it runs.
        // The handle is never closed, so nothing taken from it can dangle.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if let Some(handle) = NonNull::new(handle) {
            return Ok(Library { name, handle });
        }
        let mut words = dlerror();
        // The dynamic linker passes over a file for another processor, and calls it missing.
        if let Some((path, machine)) = elf::foreign(file) {
            words += &format!(" ({} is for {machine})", path.display());
        }
        Err(LoadError::Library { library: name, dlerror: words })
    }

    /// The address of a function, in the version that a linked program would be bound to.
    ///
    /// # Errors
    /// The library has no such function.
    pub(crate) fn find(
        &self,
        symbol: &'static str,
        version: &'static str,
    ) -> Result<NonNull<c_void>, LoadError> {
        let missing = |dlerror| LoadError::Symbol { library: self.name, symbol, dlerror };
        let c_string = |text: &str| CString::new(text).map_err(|error| missing(error.to_string()));
        let (c_symbol, c_version) = (c_string(symbol)?, c_string(version)?);
        let found = look_up(self.handle, &c_symbol, &c_version);
        NonNull::new(found).ok_or_else(|| missing(dlerror()))
    }
}

/// The address of a function in this version: libibverbs has some in two, for programs that were
/// linked to it before 2007.
#[cfg(target_env = "gnu")]
fn look_up(handle: NonNull<c_void>, symbol: &CStr, version: &CStr) -> *mut c_void {
    // SAFETY: the handle is open and both are strings; a symbol is not used by looking it up.
    unsafe { libc::dlvsym(handle.as_ptr(), symbol.as_ptr(), version.as_ptr()) }
}

/// The address of a function: the default version is the one that is wanted.
#[cfg(not(target_env = "gnu"))]
fn look_up(handle: NonNull<c_void>, symbol: &CStr, _version: &CStr) -> *mut c_void {
    // SAFETY: the handle is open and the symbol is a string; it is not used by looking it up.
    unsafe { libc::dlsym(handle.as_ptr(), symbol.as_ptr()) }
}

/// The dynamic linker's words for what has failed on this thread.
fn dlerror() -> String {
    // SAFETY: gives null or a string that lives until this thread's next call of the dynamic
    // linker.
    unsafe {
        let words = libc::dlerror();
        match words.is_null() {
            true => "the dynamic linker does not say why".to_owned(),
            false => CStr::from_ptr(words).to_string_lossy().into_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
