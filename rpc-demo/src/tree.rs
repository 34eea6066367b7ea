//! A local directory tree.

use std::fs::{self, FileType};
use std::path::{Path, PathBuf};

use crate::attributes::Attributes;
use crate::failure::Failure;
use crate::names::Shown;

/// Everything below a directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tree {
    /// Files and directories, parents before their children, each directory sorted by name.
    pub(crate) nodes: Vec<Node>,
    /// Number of links and special files, which are left out.
    pub(crate) skipped: u64,
}

/// A file or directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// Path relative to the tree, with `/` between components.
    pub(crate) path: String,
    /// Size in bytes. `None` for a directory.
    pub(crate) size: Option<u64>,
    /// Mode and modification time.
    pub(crate) attributes: Attributes,
}

impl Tree {
    /// Walks `dir`. Links and special files are counted and left out. A name that is not UTF-8, or
    /// an entry that cannot be read, is an error.
    pub(crate) fn walk(dir: &Path) -> Result<Tree, Failure> {
        let mut tree = Tree::default();
        let mut levels = vec![children(dir, "")?];
        while let Some(level) = levels.last_mut() {
            let Some((path, kind)) = level.next() else {
                levels.pop();
                continue;
            };
            let full = dir.join(&path);
            let look = || fs::symlink_metadata(&full).map_err(|error| unreadable(&full, &error));
            if kind.is_dir() {
                levels.push(children(&full, &path)?);
                tree.nodes.push(Node { path, size: None, attributes: Attributes::of(&look()?) });
            } else if kind.is_file() {
                let metadata = look()?;
                let (size, attributes) = (Some(metadata.len()), Attributes::of(&metadata));
                tree.nodes.push(Node { path, size, attributes });
            } else {
                let what = if kind.is_symlink() { "a symbolic link" } else { "a special file" };
                tracing::warn!("{} is {what}; left out", shown(&full));
                tree.skipped += 1;
            }
        }
        Ok(tree)
    }

    /// Whether the directory at `index` contains no entry of the tree.
    pub(crate) fn is_empty_at(&self, index: usize) -> bool {
        let below = |(node, next): (&Node, &Node)| {
            next.path.strip_prefix(&node.path).is_some_and(|rest| rest.starts_with('/'))
        };
        !self.nodes.get(index).zip(self.nodes.get(index + 1)).is_some_and(below)
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.nodes.iter().filter_map(|node| node.size).sum()
    }
}

type Children = std::vec::IntoIter<(String, FileType)>;

fn children(dir: &Path, prefix: &str) -> Result<Children, Failure> {
    let failed = |error| unreadable(dir, &error);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().into_string().map_err(|name| {
            Failure::new(
                format!("cannot read {}", shown(&dir.join(&name))),
                "its name is not UTF-8",
                "rename it, or move it elsewhere",
            )
        })?;
        let kind = entry.file_type().map_err(failed)?;
        found.push((if prefix.is_empty() { name } else { format!("{prefix}/{name}") }, kind));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found.into_iter())
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::io(format!("cannot read {}", shown(path)), error)
}

/// Formats a local path for a message.
pub(crate) fn shown(path: &Path) -> String {
    Shown(&PathBuf::from(path).to_string_lossy()).to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn parents_first_sorted_and_links_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir_all(at("b/c")).unwrap();
        fs::create_dir(at("empty")).unwrap();
        fs::write(at("a"), "12345").unwrap();
        fs::write(at("b/c/d"), "").unwrap();
        std::os::unix::fs::symlink("a", at("link")).unwrap();
        let tree = Tree::walk(dir.path()).unwrap();
        let nodes: Vec<_> = tree.nodes.iter().map(|node| (node.path.as_str(), node.size)).collect();
        assert_eq!(
            nodes,
            [("a", Some(5)), ("b", None), ("b/c", None), ("b/c/d", Some(0)), ("empty", None)]
        );
        assert_eq!((tree.skipped, tree.bytes()), (1, 5));
        let empty: Vec<_> = (0..5).filter(|index| tree.is_empty_at(*index)).collect();
        assert_eq!(empty, [0, 2 + 1, 4]);
    }

    #[test]
    fn a_name_that_is_not_utf8_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(std::ffi::OsStr::from_bytes(b"bad\xff")), "").unwrap();
        let error = Tree::walk(dir.path()).unwrap_err().to_string();
        assert!(error.contains("bad\u{fffd}") && error.contains("not UTF-8"), "{error}");
    }
}
