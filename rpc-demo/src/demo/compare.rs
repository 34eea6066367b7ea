//! Compares two trees byte for byte.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;
use crate::progress::Progress;
use crate::source::fill;
use crate::summary::Tally;
use crate::tree::{Tree, shown};

/// Bytes compared at a time.
const BLOCK: usize = 1 << 20;

/// Compares names, kinds, sizes, modes, times and contents. Fails if the trees differ, or as soon
/// as `stop` is set.
pub(super) fn trees(left: &Path, right: &Path, stop: &AtomicBool) -> Result<Tally, Failure> {
    let (ours, theirs) = (Tree::walk(left)?, Tree::walk(right)?);
    if let Some((a, b)) = ours.nodes.iter().zip(&theirs.nodes).find(|(a, b)| a != b) {
        return Err(differ(left, right, format!("one has {a:?} where the other has {b:?}")));
    }
    if ours != theirs {
        let why = format!("one has {} entries, the other {}", ours.nodes.len(), theirs.nodes.len());
        return Err(differ(left, right, why));
    }
    let progress = Progress::start(Some(ours.bytes()));
    let mut tally = Tally::default();
    let (mut a, mut b) = (vec![0; BLOCK], vec![0; BLOCK]);
    for node in &ours.nodes {
        let Some(size) = node.size else {
            tally.directories += 1;
            continue;
        };
        let (one, other) = (left.join(&node.path), right.join(&node.path));
        let bar = progress.file(&node.path, size);
        let mut compare = || -> io::Result<bool> {
            let (mut one, mut other) = (File::open(&one)?, File::open(&other)?);
            loop {
                if stop.load(Ordering::Relaxed) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let (x, y) = (fill(&mut one, &mut a)?, fill(&mut other, &mut b)?);
                if a.get(..x) != b.get(..y) {
                    return Ok(false);
                }
                if x == 0 {
                    return Ok(true);
                }
                bar.add(x);
            }
        };
        match compare() {
            Ok(true) => {}
            Ok(false) => return Err(differ(&one, &other, "their contents differ".into())),
            Err(error) => {
                return Err(Failure::io(format!("cannot compare {}", shown(&one)), &error));
            }
        }
        tally.files += 1;
        tally.bytes += size;
    }
    Ok(tally)
}

fn differ(left: &Path, right: &Path, why: String) -> Failure {
    Failure::new(
        format!("{} and {} are not the same", shown(left), shown(right)),
        why,
        "this is a bug; please report it",
    )
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn compare(left: &Path, right: &Path) -> Result<Tally, Failure> {
        trees(left, right, &AtomicBool::new(false))
    }

    /// Copies the modification times of the left tree to the entries of the right one.
    fn align(left: &Path, right: &Path) {
        for node in Tree::walk(left).unwrap().nodes.iter().rev() {
            if let Ok(file) = File::open(right.join(&node.path)) {
                node.attributes.apply_time(&file).unwrap();
            }
        }
    }

    #[test]
    fn sees_every_difference() {
        let temp = tempfile::tempdir().unwrap();
        let (a, b) = (temp.path().join("a"), temp.path().join("b"));
        let content: Vec<u8> = (0..3_000_000u32).map(|n| (n >> 8) as u8).collect();
        for dir in [&a, &b] {
            fs::create_dir_all(dir.join("sub/empty")).unwrap();
            fs::write(dir.join("sub/file"), &content).unwrap();
        }
        align(&a, &b);
        let same = compare(&a, &b).unwrap();
        assert_eq!(same, Tally { bytes: 3_000_000, files: 1, directories: 2, ..Tally::default() });

        let mut other = content.clone();
        other[2_999_999] ^= 1;
        fs::write(b.join("sub/file"), &other).unwrap();
        align(&a, &b);
        assert!(compare(&a, &b).unwrap_err().to_string().contains("contents differ"));
        let changes: [&dyn Fn(); 5] = [
            &|| fs::write(b.join("sub/file"), &content[1..]).unwrap(),
            &|| fs::remove_dir(b.join("sub/empty")).unwrap(),
            &|| fs::write(b.join("zzz"), "").unwrap(),
            &|| fs::set_permissions(b.join("sub/file"), Permissions::from_mode(0o600)).unwrap(),
            &|| File::open(b.join("sub")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap(),
        ];
        for (index, change) in changes.iter().enumerate() {
            fs::remove_dir_all(&b).unwrap();
            fs::create_dir_all(b.join("sub/empty")).unwrap();
            fs::copy(a.join("sub/file"), b.join("sub/file")).unwrap();
            align(&a, &b);
            compare(&a, &b).unwrap();
            change();
            if index < 4 {
                align(&a, &b);
            }
            assert!(compare(&a, &b).is_err(), "change {index}");
        }
    }
}
