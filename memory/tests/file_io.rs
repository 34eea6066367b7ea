//! Transfers between files and pool memory through io_uring, on the file system of the build, which
//! has O_DIRECT, and on tmpfs, which may not have it. The tests fail on a kernel that refuses
//! io_uring.

#![allow(clippy::unwrap_used, reason = "a test")]
#![cfg(target_os = "linux")]

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic_rdma_memory::disk::Ring;
use tonic_rdma_memory::{HeapRegistrar, PinnedBuf, Pool, PoolConfig};

const PAGE: usize = 4096;

fn pool() -> Pool {
    Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap()
}

/// A file that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(dir: &str, name: &str, content: &[u8]) -> Scratch {
        let path = Path::new(dir).join(format!("tonic-rdma-disk-{}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Scratch(path)
    }

    fn open(&self, flags: i32) -> Arc<File> {
        let file = File::options().read(true).write(true).custom_flags(flags).open(&self.0);
        Arc::new(file.unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

const DISK: &str = env!("CARGO_TARGET_TMPDIR");

#[test]
fn a_file_is_read_past_the_page_cache_to_its_unaligned_end() {
    let (ring, pool, all) = (Ring::new(8).unwrap(), pool(), content(3 * PAGE + 100));
    let scratch = Scratch::new(DISK, "read", &all);
    let file = scratch.open(libc::O_DIRECT);
    let (read, buf) = ring.read(&file, 0, pool.try_alloc(4 * PAGE).unwrap()).wait();
    assert_eq!((read.unwrap(), &buf[..]), (all.len(), &all[..]));
    // Reads from a block in the middle into the part after the buffer's content, and reads past the
    // end.
    let mut buf = pool.try_alloc(2 * PAGE).unwrap();
    buf.resize_zeroed(PAGE);
    let (read, buf) = ring.read(&file, 3 * PAGE as u64, buf).wait();
    assert_eq!((read.unwrap(), &buf[PAGE..]), (100, &all[3 * PAGE..]));
    let (read, buf) = ring.read(&file, 8 * PAGE as u64, pool.try_alloc(PAGE).unwrap()).wait();
    assert_eq!((read.unwrap(), buf.len()), (0, 0));
    // An offset that O_DIRECT does not allow is an error, and the buffer comes back.
    let (read, buf) = ring.read(&file, 1, buf).wait();
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(buf.capacity(), PAGE);
}

#[test]
fn bytes_are_written_from_where_they_lie() {
    let (ring, pool, all) = (Ring::new(8).unwrap(), pool(), content(5 * PAGE));
    for (dir, flags) in [(DISK, libc::O_DIRECT), ("/dev/shm", 0)] {
        let scratch = Scratch::new(dir, "write", b"");
        let file = scratch.open(flags);
        let mut buf = pool.try_alloc(all.len()).unwrap();
        buf.resize_zeroed(all.len());
        buf.as_mut_slice().copy_from_slice(&all);
        let bytes = buf.freeze();
        let (first, second) = (bytes.slice(..2 * PAGE), bytes.slice(2 * PAGE..));
        let second = ring.write(&file, 2 * PAGE as u64, second);
        let (written, back) = ring.write(&file, 0, first).wait();
        assert_eq!((written.unwrap(), back.as_ptr()), (2 * PAGE, bytes.as_ptr()));
        assert_eq!(second.wait().0.unwrap(), 3 * PAGE);
        assert!(std::fs::read(&scratch.0).unwrap() == all);
    }
}

#[test]
fn errors_of_the_file_come_back_with_the_memory() {
    let ring = Ring::new(1).unwrap();
    let full = Arc::new(File::options().write(true).open("/dev/full").unwrap());
    let (written, back) = ring.write(&full, 0, Bytes::from_static(b"x")).wait();
    assert_eq!((written.unwrap_err().kind(), &back[..]), (io::ErrorKind::StorageFull, &b"x"[..]));
    let dir = Arc::new(File::open("/").unwrap());
    let (read, _) = ring.read(&dir, 0, pool().try_alloc(PAGE).unwrap()).wait();
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::IsADirectory);
}

/// Sixty threads share a ring of two entries. Reads that find the ring full wait for their turn,
/// and none is lost.
#[test]
fn a_full_ring_makes_work_wait() {
    let (ring, pool) = (Ring::new(2).unwrap(), pool());
    let all = Arc::new(content(64 * PAGE));
    let scratch = Scratch::new(DISK, "sixty", &all);
    let file = scratch.open(libc::O_DIRECT);
    let threads: Vec<_> = (0..60)
        .map(|first| {
            let (ring, pool, file, all) = (ring.clone(), pool.clone(), file.clone(), all.clone());
            thread::spawn(move || {
                let reads: Vec<_> = (0..32)
                    .map(|n| (first + n) % 64 * PAGE)
                    .map(|at| (at, ring.read(&file, at as u64, pool.try_alloc(PAGE).unwrap())))
                    .collect();
                for (at, read) in reads {
                    let (read, buf) = read.wait();
                    assert_eq!(read.unwrap(), PAGE);
                    assert!(buf[..] == all[at..at + PAGE], "{at}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(ring.in_flight(), 0);
}

/// Begins a read that waits for its data, because nobody has written to the pipe.
fn pending(ring: &Ring, buf: PinnedBuf) -> (tonic_rdma_memory::disk::Transfer<PinnedBuf>, File) {
    let (reader, writer) = io::pipe().unwrap();
    let reader = Arc::new(File::from(std::os::fd::OwnedFd::from(reader)));
    let read = ring.read(&reader, u64::MAX, buf);
    (read, File::from(std::os::fd::OwnedFd::from(writer)))
}

/// Memory belongs to the kernel until the read is done, even if the future or the ring is dropped
/// (R10).
#[test]
fn a_dropped_transfer_leaves_its_buffer_to_the_kernel() {
    let (ring, pool) = (Ring::new(4).unwrap(), pool());
    let in_use = |pool: &Pool| pool.stats().classes.iter().map(|c| c.in_use).sum::<usize>();
    let (mut read, writer) = pending(&ring, pool.try_alloc(PAGE).unwrap());
    assert!(pin!(&mut read).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(read);
    assert_eq!((in_use(&pool), ring.in_flight()), (1, 1), "the kernel may still write to it");
    let other = pool.try_alloc(PAGE).unwrap();
    // The ring ends before the work.
    drop(ring);
    io::Write::write_all(&mut &writer, b"late").unwrap();
    while in_use(&pool) > 1 {
        thread::yield_now();
    }
    assert!(other.is_empty());
}

#[test]
fn a_transfer_is_a_future() {
    let (ring, pool) = (Ring::new(4).unwrap(), pool());
    let (read, writer) = pending(&ring, pool.try_alloc(PAGE).unwrap());
    let late = thread::spawn(move || io::Write::write_all(&mut &writer, b"late").unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (read, buf) = runtime.block_on(read);
    assert_eq!((read.unwrap(), &buf[..]), (4, &b"late"[..]));
    late.join().unwrap();
}

/// Arenas end while a ring has them registered, and new arenas may get their addresses. Reads go to
/// the new arena's pages. The kernel would write to the old pages if the old index were still used.
#[test]
fn an_arena_that_ended_is_no_longer_registered() {
    let ring = Ring::new(4).unwrap();
    let scratch = Scratch::new(DISK, "arenas", &content(PAGE));
    let file = scratch.open(libc::O_DIRECT);
    for _ in 0..600 {
        let pool = pool();
        let (read, buf) = ring.read(&file, 0, pool.try_alloc(PAGE).unwrap()).wait();
        assert_eq!((read.unwrap(), &buf[..]), (PAGE, &content(PAGE)[..]));
    }
}

fn pinned() -> u64 {
    tonic_rdma_memory::Memlock::read().unwrap().pinned
}

/// The variable that is set in the copy of this program that a test starts.
const CHILD: &str = "TONIC_RDMA_DISK_CHILD";

/// Reads a page, and prints the number of bytes that the ring has pinned for it.
fn read_and_print_pinned() {
    let (ring, pool) = (Ring::new(4).unwrap(), pool());
    let scratch = Scratch::new(DISK, "limit", &content(PAGE));
    let before = pinned();
    let read = ring.read(&scratch.open(libc::O_DIRECT), 0, pool.try_alloc(PAGE).unwrap());
    let (read, buf) = read.wait();
    assert_eq!((read.unwrap(), &buf[..]), (PAGE, &content(PAGE)[..]));
    println!("pinned {}", pinned() - before);
    drop((buf, pool));
    // Linux 6.1 unpins up to a second later.
    let begun = Instant::now();
    while pinned() > before {
        assert!(begun.elapsed() < Duration::from_secs(20), "an arena that ended is still pinned");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn buffers_are_registered_where_memlock_has_room() {
    if std::env::var_os(CHILD).is_some() {
        return read_and_print_pinned();
    }
    let run = |limit: u64| {
        // Set the limit first, because raising it needs a privilege that is dropped below.
        let mut command = std::process::Command::new("prlimit");
        command.arg(format!("--memlock={limit}:{limit}"));
        // The limit does not apply to root.
        // SAFETY: it has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            command.args(["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]);
        }
        let child = command
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "buffers_are_registered_where_memlock_has_room", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
        let rest = said.split_once("pinned ").unwrap().1;
        rest.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(run(64 << 10), 0, "used unregistered");
    assert!(run(8 << 20) >= PAGE as u64, "registered");
}

/// Refuses io_uring_setup(2) with seccomp(2), as container runtimes do, for one thread only.
#[test]
fn a_ring_that_the_kernel_refuses_is_an_error() {
    let refused = |errno: i32| {
        thread::spawn(move || {
            let filter = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
            let mut program = [
                filter((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, 0),
                filter(
                    (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
                    0,
                    1,
                    libc::SYS_io_uring_setup as u32,
                ),
                filter(libc::BPF_RET as u16, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
                filter(libc::BPF_RET as u16, 0, 0, libc::SECCOMP_RET_ALLOW),
            ];
            let program =
                libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
            // SAFETY: both calls read their arguments only, and concern this thread.
            unsafe {
                assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
                assert_eq!(
                    libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program),
                    0
                );
            }
            Ring::new(4).unwrap_err()
        })
        .join()
        .unwrap()
    };
    assert_eq!(refused(libc::EPERM).raw_os_error(), Some(libc::EPERM));
    assert_eq!(refused(libc::ENOSYS).raw_os_error(), Some(libc::ENOSYS));
}
