//! 10,000 small files and some of 4 GiB are put, interrupted by a kill, resumed, and fetched. Needs
//! 20 GB of disk and some minutes. `make test-large` runs it over TCP, over shared memory, and over
//! RDMA in the guest.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use common::*;
use rustix::process::Signal;

const LARGE: u64 = 2;

/// Distance in bytes between pieces of content, so that each range has some.
const EACH: u64 = 4 << 20;

/// Size of each large file: RPC_DEMO_LARGE_SIZE, or 4 GiB.
fn size() -> u64 {
    std::env::var("RPC_DEMO_LARGE_SIZE").map_or(4 << 30, |text| text.parse().unwrap())
}

/// A directory on a file system with enough space: RPC_DEMO_LARGE_DIR, or the build's.
fn place() -> PathBuf {
    std::env::var_os("RPC_DEMO_LARGE_DIR").map_or(env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from)
}

/// Compares two files block by block.
fn same_content(left: &Path, right: &Path) -> bool {
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let (mut left, mut right) = (File::open(left).unwrap(), File::open(right).unwrap());
    if left.metadata().unwrap().len() != right.metadata().unwrap().len() {
        return false;
    }
    loop {
        let length = left.read(&mut a).unwrap();
        right.read_exact(&mut b[..length]).unwrap();
        if a[..length] != b[..length] {
            return false;
        }
        if length == 0 {
            return true;
        }
    }
}

fn each_file(dir: &Path, see: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { each_file(&path, see) } else { see(&path) }
    }
}

#[test]
fn large_and_many_files_survive_a_kill_and_come_back() {
    let dir = tempfile::tempdir_in(place()).unwrap();
    let at = |path: &str| dir.path().join(path);
    let (tree, root, copy) = (at("tree"), at("root"), at("copy"));
    fs::create_dir(&root).unwrap();
    let mut bytes = 0;
    for n in 0..10_000_usize {
        let path = tree.join(format!("small/{:02}/{n}", n % 100));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content(n % 3000, n as u32)).unwrap();
        bytes += n as u64 % 3000;
    }
    for n in 0..LARGE {
        let file = File::create(tree.join(format!("large-{n}"))).unwrap();
        file.set_len(size()).unwrap();
        for offset in (0..size()).step_by(EACH as usize) {
            file.write_all_at(&content(10_000, (offset >> 20) as u32 * 7 + n as u32), offset)
                .unwrap();
        }
        bytes += size().max((size() - 1) / EACH * EACH + 10_000);
    }

    let put = |server: &Server, more: &[&str]| {
        let mut command = server.client_command(["put".as_ref(), tree.as_os_str(), "t".as_ref()]);
        command
            .arg("--json")
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut server = Server::start(&root);
    let client = put(&server, &[]);
    let temp = root.join(".rpc-demo-tmp");
    // Ranges are sent in order. The block count is no alternative, because some file systems update
    // it late.
    let quarter = size() / 4 / EACH * EACH;
    until("a quarter of a large one is there", &temp, || {
        names(&temp).iter().any(|name| {
            let mut bytes = [0; 100];
            let read = File::open(temp.join(name))
                .and_then(|file| file.read_exact_at(&mut bytes, quarter));
            read.is_ok() && bytes != [0; 100]
        })
    });
    server.signal(Signal::KILL);
    server.wait();
    failed(client.wait_with_output().unwrap(), 1);
    each_file(&root.join("t"), &mut |path| {
        assert!(
            same_content(path, &tree.join(path.strip_prefix(root.join("t")).unwrap())),
            "{path:?}"
        );
    });

    let server = Server::start(&root);
    let resumed = ok(put(&server, &["--resume"]).wait_with_output().unwrap());
    print!("{}", stdout(&resumed));
    let resumed = json(&resumed);
    let (moved, kept) = (number(&resumed, "moved_bytes"), number(&resumed, "kept_bytes"));
    assert_eq!(moved + kept, bytes);
    // Eight ranges may have been in flight.
    assert!(kept >= quarter.saturating_sub(64 << 20), "{kept} bytes were kept");

    let get = server.client(["get".as_ref(), "t".as_ref(), copy.as_os_str(), "--json".as_ref()]);
    print!("{}", stdout(&ok(get)));
    let mut files = 0;
    each_file(&tree, &mut |path| {
        assert!(same_content(path, &copy.join(path.strip_prefix(&tree).unwrap())), "{path:?}");
        files += 1;
    });
    assert_eq!(files, 10_000 + LARGE);
}
