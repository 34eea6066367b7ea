//! The files of the repository that the checks read.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// A file of the repository.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path below the root, with `/` between its parts.
    pub path: String,
    /// The whole content.
    pub text: String,
}

impl Source {
    /// Creates a made-up file, for tests of the checks.
    pub fn new(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    /// True for Rust source.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// Directories that hold no source: build output, fuzzing inputs, generated code.
const SKIPPED: &[&str] = &["target", "corpus", "artifacts", "generated"];

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads all text files below `root`, sorted by path. Build output, generated code, fuzzing inputs
/// and hidden directories other than `.ci` and `.github` are left out.
///
/// # Errors
///
/// When a directory or a file cannot be read.
pub fn read(root: &Path) -> io::Result<Vec<Source>> {
    let mut found = Vec::new();
    walk(root, "", &mut found)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn walk(directory: &Path, prefix: &str, found: &mut Vec<Source>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        let kind = entry.file_type()?;
        if kind.is_dir() {
            let hidden = name.starts_with('.') && name != ".ci" && name != ".github";
            if !hidden && !SKIPPED.contains(&name.as_str()) {
                walk(&entry.path(), &format!("{path}/"), found)?;
            }
        } else if kind.is_file()
            && !name.ends_with(".lock")
            && let Ok(text) = String::from_utf8(fs::read(entry.path())?)
        {
            found.push(Source { path, text });
        }
    }
    Ok(())
}
