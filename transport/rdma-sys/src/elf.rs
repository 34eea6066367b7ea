//! Finds libraries for another processor.
//!
//! The dynamic linker skips such a library and reports that there is no such file. The report
//! misleads a user who sees the file.

use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

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
mod tests {
    use super::*;

    #[test]
    fn own_libraries_and_other_files_are_not_foreign() {
        assert_eq!(machine(&std::env::current_exe().unwrap()), None);
        assert_eq!(machine(Path::new("/etc/passwd")), None);
        assert_eq!(machine(Path::new("/no/such/file")), None);
        assert_eq!(foreign(c"libno_such_library.so.1"), None);
    }
}
