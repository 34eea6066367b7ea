//! Opens a library, and looks up functions in it.
//!
//! The dynamic linker skips a library for another processor and reports that there is no such file.
//! The report misleads a user who sees the file, so the error names the file and its processor.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use crate::error::LoadError;

/// A library that stays loaded until the process ends.
pub(crate) struct Library {
    name: &'static str,
    handle: NonNull<c_void>,
}

impl Library {
    /// Opens the library `file`, which error messages call `name`.
    ///
    /// # Errors
    /// The library is missing, or the dynamic linker refuses it.
    pub(crate) fn open(name: &'static str, file: &CStr) -> Result<Library, LoadError> {
        // With RTLD_NOW, the dynamic linker refuses a library if the libraries that it needs lack a
        // function. Otherwise the first call to that function would end the process. SAFETY: runs
        // the constructors of rdma-core, which any program that is linked to it runs. The handle is
        // never closed, so no function that is found in the library can dangle.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if let Some(handle) = NonNull::new(handle) {
            return Ok(Library { name, handle });
        }
        let mut words = dlerror();
        // The dynamic linker skips a file for another processor, and reports the file as missing.
        if let Some((path, machine)) = foreign(file) {
            words += &format!(" ({} is for {machine})", path.display());
        }
        Err(LoadError::Library { library: name, dlerror: words })
    }

    /// The address of a function, in the version to which a linked program would be bound.
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

/// The address of a function in the given version. libibverbs has two versions of some functions.
/// The older version is for programs that were linked before 2007.
#[cfg(target_env = "gnu")]
fn look_up(handle: NonNull<c_void>, symbol: &CStr, version: &CStr) -> *mut c_void {
    // SAFETY: the handle is open and both are strings; looking a symbol up does not use it.
    unsafe { libc::dlvsym(handle.as_ptr(), symbol.as_ptr(), version.as_ptr()) }
}

/// The address of a function in its default version, which is the version wanted here.
#[cfg(not(target_env = "gnu"))]
fn look_up(handle: NonNull<c_void>, symbol: &CStr, _version: &CStr) -> *mut c_void {
    // SAFETY: the handle is open and the symbol is a string; looking a symbol up does not use it.
    unsafe { libc::dlsym(handle.as_ptr(), symbol.as_ptr()) }
}

/// The dynamic linker's message about the last failure on this thread.
fn dlerror() -> String {
    // SAFETY: gives null or a string that lives until this thread's next call to the dynamic
    // linker.
    unsafe {
        let words = libc::dlerror();
        match words.is_null() {
            true => "the dynamic linker does not say why".to_owned(),
            false => CStr::from_ptr(words).to_string_lossy().into_owned(),
        }
    }
}

/// Returns a file that has the library's name but is for another processor, and the name of that
/// processor.
pub(crate) fn foreign(library: &CStr) -> Option<(PathBuf, String)> {
    let library = Path::new(OsStr::from_bytes(library.to_bytes()));
    let candidates = match library.components().count() {
        0 | 1 => directories().into_iter().map(|directory| directory.join(library)).collect(),
        _ => vec![library.to_owned()],
    };
    candidates.into_iter().find_map(|path| machine(&path).map(|machine| (path, machine)))
}

/// The directories that the dynamic linker searches, and Debian's directories for each processor.
fn directories() -> Vec<PathBuf> {
    let listed = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = std::env::split_paths(&listed).collect();
    for root in ["/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib"] {
        directories.push(root.into());
        let inside = fs::read_dir(root).into_iter().flatten().flatten();
        directories.extend(
            inside
                .filter(|entry| entry.file_name().to_string_lossy().contains("-linux-"))
                .map(|entry| entry.path()),
        );
    }
    directories
}

/// The name of a shared object's processor, if it differs from this machine's processor.
fn machine(path: &Path) -> Option<String> {
    let mut header = [0; 20];
    File::open(path).ok()?.read_exact(&mut header).ok()?;
    let [0x7f, b'E', b'L', b'F', class, order, .., low, high] = header else { return None };
    let number = if order == 2 { [high, low] } else { [low, high] };
    let number = u16::from_le_bytes(number);
    const NATIVE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    match (number, class) {
        (NATIVE, 2) => None,
        (3, _) => Some("x86".to_owned()),
        (21, _) => Some("PowerPC".to_owned()),
        (22, _) => Some("S/390".to_owned()),
        (40, _) => Some("Arm".to_owned()),
        (62, _) => Some("x86-64".to_owned()),
        (183, _) => Some("AArch64".to_owned()),
        (243, _) => Some("RISC-V".to_owned()),
        (other, _) => Some(format!("the processor that ELF numbers {other}")),
    }
}

#[cfg(test)]
mod tests;
