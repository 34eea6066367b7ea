//! The ring, which posts work, and the thread that takes completions.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io, thread};

use bytes::{BufMut, Bytes};
use io_uring::types::Fd;
use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue};
use slab::Slab;

use super::fixed::FixedBuffers;
use crate::buf::PinnedBuf;
use crate::disk::{Completer, Transfer, transfer};
use crate::process::Process;

/// The maximum length of one transfer in bytes: a multiple of any page size, below the kernel's
/// limit of just under 2 GiB.
const MAX_LEN: usize = 1 << 30;
/// The maximum number of times that work is posted again after EAGAIN, which the kernel returns
/// when it is short of memory.
const MAX_AGAIN: u32 = 100;
/// The `user_data` of the request that ends the thread.
const STOP: u64 = u64::MAX;
/// The pause before the next request to a kernel that was short of memory.
const PAUSE: Duration = Duration::from_millis(1);

/// A ring of io_uring(7), with a thread that takes its completions. Cheap to clone. Work in flight
/// and its memory outlive the last clone.
///
/// ```
/// use std::fs::File;
/// use std::sync::Arc;
/// use tonic_rdma_memory::disk::Ring;
/// use tonic_rdma_memory::{HeapRegistrar, Pool, PoolConfig};
///
/// let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default()))?;
/// let file = Arc::new(File::open("/proc/self/exe")?);
/// # let Ok(ring) = Ring::new(64) else { return Ok(()) };
/// let (read, buf) = ring.read(&file, 0, pool.try_alloc(4096)?).wait();
/// assert_eq!(read?, buf.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Ring(Arc<RingHandle>);

/// Ends the thread on drop.
struct RingHandle(Arc<RingState>, Process);

struct RingState {
    ring: Arc<IoUring>,
    queue: Mutex<WorkQueue>,
    fixed: Arc<FixedBuffers>,
    /// The maximum number of reads and writes that are posted at a time.
    entries: usize,
}

#[derive(Default)]
struct WorkQueue {
    work: Slab<Work>,
    /// Work that is not posted yet.
    waiting: VecDeque<usize>,
    /// The number of requests that the kernel has, including the request that ends the thread.
    posted: usize,
    stopped: bool,
}

struct Work {
    entry: squeue::Entry,
    /// Keeps the file open until the kernel is done with the work, so that the descriptor's number
    /// is not reused for another file.
    _file: Arc<File>,
    /// Holds the memory until the kernel is done, and then returns the memory to its owner.
    done: Box<dyn FnOnce(io::Result<usize>) + Send>,
    again: u32,
}

impl Ring {
    /// Makes a ring with at most `entries` reads and writes in flight. `entries` is limited to the
    /// range from 1 to 4096, and the kernel rounds it up to a power of two. Further reads and
    /// writes wait.
    ///
    /// # Errors
    /// The kernel's error: ENOSYS without io_uring, or EPERM where seccomp or
    /// `kernel.io_uring_disabled` forbid it. EINVAL before Linux 5.6, which cannot list its
    /// operations. `Unsupported` if the kernel lacks these reads and writes. The error of
    /// `thread::Builder::spawn` if the ring's thread cannot be created.
    pub fn new(entries: u32) -> io::Result<Ring> {
        let ring = IoUring::new(entries.clamp(1, 4096))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].iter().all(|code| probe.is_supported(*code)) {
            let missing = "io_uring of this kernel has no read and write (Linux 5.6 has)";
            return Err(io::Error::new(io::ErrorKind::Unsupported, missing));
        }
        let entries = ring.params().sq_entries() as usize;
        let ring = Arc::new(ring);
        let fixed = Arc::new(FixedBuffers::new(ring.clone()));
        let shared = Arc::new(RingState { ring, queue: Mutex::default(), fixed, entries });
        let takes = shared.clone();
        thread::Builder::new().name("tonic-rdma-disk".into()).spawn(move || takes.run())?;
        Ok(Ring(Arc::new(RingHandle(shared, Process::current()))))
    }

    /// Reads from `offset` of a file into the unfilled part of `buf`, and counts the bytes read as
    /// filled. May read fewer bytes than fit, and reads 0 bytes at the end of the file. With
    /// O_DIRECT the offset, the length of the filled part and the capacity of the buffer must be
    /// multiples of the disk's block size.
    ///
    /// The first read into an arena also registers the whole arena with the ring, if RLIMIT_MEMLOCK
    /// has room for it and for all memory that the pool may still pin.
    pub fn read(&self, file: &Arc<File>, offset: u64, mut buf: PinnedBuf) -> Transfer<PinnedBuf> {
        let shared = &self.0.0;
        let number = buf.fixed(&shared.fixed);
        let rest = buf.chunk_mut();
        let (ptr, len) = (rest.as_mut_ptr(), rest.len().min(MAX_LEN) as u32);
        let fd = Fd(file.as_raw_fd());
        let entry = match number {
            Some(number) => opcode::ReadFixed::new(fd, ptr, len, number).offset(offset).build(),
            None => opcode::Read::new(fd, ptr, len).offset(offset).build(),
        };
        let (completer, transfer) = transfer();
        shared.post(entry, file, move |result| give_back_read(completer, result, buf));
        transfer
    }

    /// Writes `bytes` at `offset` of a file. May write only the first part of `bytes`. With
    /// O_DIRECT the offset, the length, and the address of the bytes must be multiples of the
    /// disk's block size.
    pub fn write(&self, file: &Arc<File>, offset: u64, bytes: Bytes) -> Transfer<Bytes> {
        let len = bytes.len().min(MAX_LEN) as u32;
        let fd = Fd(file.as_raw_fd());
        let entry = opcode::Write::new(fd, bytes.as_ptr(), len).offset(offset).build();
        let (completer, transfer) = transfer();
        self.0.0.post(entry, file, move |result| completer.complete(result, bytes));
        transfer
    }

    /// The number of reads and writes that have not ended, whether they are posted or not.
    pub fn in_flight(&self) -> usize {
        self.0.0.queue().work.len()
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

fn give_back_read(completer: Completer<PinnedBuf>, result: io::Result<usize>, mut buf: PinnedBuf) {
    if let Ok(count) = result {
        // SAFETY: the kernel has filled `count` bytes of the part that it was given, which is not
        // longer than what remains; all memory of a pool is initialized (R8).
        unsafe { buf.advance_mut(count) };
    }
    completer.complete(result, buf);
}

impl RingState {
    fn queue(&self) -> MutexGuard<'_, WorkQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts work. `done` holds the memory of the work.
    fn post(
        &self,
        entry: squeue::Entry,
        file: &Arc<File>,
        done: impl FnOnce(io::Result<usize>) + Send + 'static,
    ) {
        let mut queue = self.queue();
        let work = Work { entry, _file: file.clone(), done: Box::new(done), again: 0 };
        let key = queue.work.insert(work);
        queue.waiting.push_back(key);
        self.submit(&mut queue);
    }

    /// Posts waiting work while the ring has room. The caller holds the queue's lock.
    fn submit(&self, queue: &mut WorkQueue) {
        let mut pushed = false;
        while queue.posted < self.entries
            && let Some(key) = queue.waiting.pop_front()
        {
            let Some(work) = queue.work.get(key) else { continue };
            let entry = work.entry.clone().user_data(key as u64);
            if !self.push(&entry) {
                // This branch is unreachable, because entries that the kernel has taken leave room.
                // The work is kept nevertheless.
                queue.waiting.push_front(key);
                break;
            }
            queue.posted += 1;
            pushed = true;
        }
        if pushed {
            self.enter();
        }
    }

    fn push(&self, entry: &squeue::Entry) -> bool {
        // SAFETY: only the holder of the queue's lock uses the submission queue. The memory and the
        // descriptor of the entry are held by its `Work` until it has completed (R10).
        unsafe { self.ring.submission_shared().push(entry).is_ok() }
    }

    /// Makes the kernel take the pushed entries.
    fn enter(&self) {
        while let Err(error) = self.ring.submitter().submit() {
            if error.raw_os_error() != Some(libc::EINTR) {
                // Try again after a pause, because a kernel that is short of memory reports no
                // event when memory becomes free.
                tracing::debug!(%error, "io_uring takes no work at the moment");
                thread::sleep(PAUSE);
            }
        }
    }

    /// The main function of the thread: takes completions until the last handle of the ring is
    /// dropped and nothing is in flight.
    fn run(&self) {
        loop {
            // SAFETY: no argument is passed. The call submits nothing, and so needs no lock.
            let waited = unsafe {
                self.ring.submitter().enter::<libc::sigset_t>(
                    0,
                    1,
                    EnterFlags::GETEVENTS.bits(),
                    None,
                )
            };
            if let Err(error) = waited
                && error.raw_os_error() != Some(libc::EINTR)
            {
                crate::throttled!(warn, %error, "io_uring gives no completions at the moment");
                thread::sleep(PAUSE);
            }
            // SAFETY: this thread alone uses the completion queue.
            let completed: Vec<_> = unsafe { self.ring.completion_shared() }
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            let mut ended = Vec::with_capacity(completed.len());
            let mut queue = self.queue();
            for (key, result) in completed {
                queue.posted -= 1;
                if key == STOP {
                    continue;
                }
                let key = key as usize;
                if is_to_repeat(result)
                    && let Some(work) = queue.work.get_mut(key)
                    && work.again < MAX_AGAIN
                {
                    work.again += 1;
                    queue.waiting.push_back(key);
                } else if let Some(work) = queue.work.try_remove(key) {
                    ended.push((work, result));
                }
            }
            self.submit(&mut queue);
            let over = queue.stopped && queue.posted == 0 && queue.work.is_empty();
            drop(queue);
            // Complete the work without the lock, because woken tasks may post, and dropped memory
            // wakes other tasks.
            for (work, result) in ended {
                let error = || io::Error::from_raw_os_error(-result);
                (work.done)(usize::try_from(result).map_err(|_| error()));
            }
            if over {
                return;
            }
        }
    }
}

/// Whether the work failed only because of a signal, or because the kernel was short of memory.
fn is_to_repeat(result: i32) -> bool {
    [-libc::EINTR, -libc::EAGAIN].contains(&result)
}

impl Drop for RingHandle {
    fn drop(&mut self) {
        // The thread of an inherited ring belongs to the parent.
        if !self.1.is_current() {
            return;
        }
        let mut queue = self.0.queue();
        queue.stopped = true;
        // Wake the thread. This additional completion fits, because the completion queue is twice
        // as long as the submission queue.
        if self.0.push(&opcode::Nop::new().build().user_data(STOP)) {
            queue.posted += 1;
            self.0.enter();
        }
    }
}
