//! Sizes: how long a file is without its tests, how many files a folder has, and how many words a
//! document has.

use std::collections::BTreeMap;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::files::Source;
use crate::modules::{attributes, is_for_tests};

/// Maximum number of lines of a file in transport/tonic, not counting its tests.
pub const MAX_LINES_TONIC: usize = 500;
/// Maximum number of lines of any other file, not counting its tests.
pub const MAX_LINES: usize = 800;
/// Maximum number of Rust files in a folder of transport/tonic, not counting subfolders.
pub const MAX_FILES: usize = 12;
/// Maximum number of words in ARCHITECTURE.md, so that it can be read in ten minutes.
pub const MAX_WORDS: usize = 2500;

/// The folder in which the narrower limits hold.
pub const TONIC: &str = "transport/tonic/";

/// Whether a file has only tests: it lies in a folder `tests` of a crate, or is a `tests.rs`.
pub fn is_all_tests(path: &str, crates: &[String]) -> bool {
    let inside = crates
        .iter()
        .filter_map(|directory| path.strip_prefix(directory.as_str())?.strip_prefix('/'))
        .min_by_key(|inside| inside.len())
        .unwrap_or(path);
    inside.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// The directories that hold a Cargo.toml.
pub fn crates(sources: &[Source]) -> Vec<String> {
    sources.iter().filter_map(|s| Some(s.path.strip_suffix("/Cargo.toml")?.to_owned())).collect()
}

/// Number of lines of a Rust file, without the items that have `#[cfg(test)]`.
///
/// # Errors
///
/// When the file does not parse.
pub fn lines_without_tests(source: &Source) -> Result<usize, String> {
    struct Tests(usize);
    impl<'a> Visit<'a> for Tests {
        fn visit_item(&mut self, item: &'a syn::Item) {
            if is_for_tests(attributes(item)) {
                let span = item.span();
                self.0 += span.end().line + 1 - span.start().line;
            } else {
                visit::visit_item(self, item);
            }
        }
    }
    let syntax = syn::parse_file(&source.text).map_err(|e| format!("{}: {e}", source.path))?;
    let mut tests = Tests(0);
    tests.visit_file(&syntax);
    Ok(source.text.lines().count().saturating_sub(tests.0))
}

/// Returns the files that are too long: for each, its path, its number of lines, and the limit.
///
/// # Errors
///
/// When a file does not parse.
pub fn long_files(sources: &[Source]) -> Result<Vec<(String, usize, usize)>, String> {
    let crates = crates(sources);
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.is_rust() && !is_all_tests(&s.path, &crates)) {
        let most = if source.path.starts_with(TONIC) { MAX_LINES_TONIC } else { MAX_LINES };
        let lines = lines_without_tests(source)?;
        if lines > most {
            found.push((source.path.clone(), lines, most));
        }
    }
    Ok(found)
}

/// Number of words of a document, as `wc -w` counts them.
pub fn words(document: &Source) -> usize {
    document.text.split_whitespace().count()
}

/// The folders of transport/tonic that have too many Rust files of their own, and how many.
pub fn full_folders(sources: &[Source]) -> Vec<(String, usize)> {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for source in sources.iter().filter(|s| s.is_rust() && s.path.starts_with(TONIC)) {
        if let Some((folder, _)) = source.path.rsplit_once('/') {
            *folders.entry(folder).or_default() += 1;
        }
    }
    let full = folders.into_iter().filter(|(_, files)| *files > MAX_FILES);
    full.map(|(folder, files)| (folder.to_owned(), files)).collect()
}
