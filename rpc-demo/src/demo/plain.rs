//! Makes a plain copy of a tree for comparison, like `cp -r`, one file after the other.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use std::{fs, io};

use super::report::Run;
use crate::costs::{self, Costs};
use crate::failure::Failure;
use crate::tree::{Tree, shown};

/// Copies the tree `from` to `to`, which must not exist. Fails before the next file once `stop` is
/// set.
pub(super) fn copy(from: &Path, to: &Path, stop: &AtomicBool) -> Result<Run, Failure> {
    let (began, before) = (Instant::now(), Costs::now());
    let tree = Tree::walk(from)?;
    let mut bytes = 0;
    let mut one = |path: &str, is_file: bool| -> io::Result<()> {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if !is_file {
            return fs::create_dir(to.join(path));
        }
        // The kernel copies between the files (copy_file_range), as with cp.
        let copied = fs::copy(from.join(path), to.join(path))?;
        costs::written(copied);
        bytes += copied;
        Ok(())
    };
    let nodes = tree.nodes.iter().map(|node| (node.path.as_str(), node.size.is_some()));
    for (path, is_file) in std::iter::once(("", false)).chain(nodes) {
        one(path, is_file).map_err(|error| {
            Failure::io(format!("cannot copy to {}", shown(&to.join(path))), &error)
        })?;
    }
    let spent = Costs::now() - before;
    Ok(Run {
        bytes,
        seconds: began.elapsed().as_secs_f64(),
        cpu_seconds: spent.cpu_seconds,
        copied_bytes: spent.file_read_bytes + spent.file_written_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_everything_once() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("sub/empty")).unwrap();
        fs::write(from.join("sub/file"), vec![7; 100_000]).unwrap();
        let run = copy(&from, &to, &AtomicBool::new(false)).unwrap();
        assert_eq!(run.bytes, 100_000);
        // Other tests of this process are also counted.
        assert!(run.copied_bytes >= 100_000);
        let paths =
            |dir| Tree::walk(dir).unwrap().nodes.into_iter().map(|node| (node.path, node.size));
        assert!(paths(&from).eq(paths(&to)));
        assert_eq!(fs::read(to.join("sub/file")).unwrap(), vec![7; 100_000]);
        assert!(copy(&from, &to, &AtomicBool::new(false)).is_err(), "it is there");
        assert!(copy(&from, &dir.path().join("other"), &AtomicBool::new(true)).is_err());
    }
}
