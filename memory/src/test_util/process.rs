//! Children of fork(2), and threads that constantly receive signals.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use std::{fs, io, thread};

/// If this variable is set in the environment of a test program, the threads of the program get
/// SIGPROF every millisecond, from the start.
pub const SIGNALS: &str = "TONIC_RDMA_TEST_SIGNALS";
/// The period of the signals.
const PERIOD: Duration = Duration::from_millis(1);

/// A child of this process.
#[derive(Debug)]
pub struct Child(libc::pid_t);

/// Forks. The child calls `run`, and ends without running destructors. The child has only the
/// thread that forks.
///
/// # Errors
/// The errors of fork(2).
pub fn fork(run: impl FnOnce()) -> io::Result<Child> {
    // SAFETY: the child runs a test, whose purpose is to show that the called code takes no lock
    // that another thread of the parent holds. The child ends without destructors (R23).
    let child = unsafe { libc::fork() };
    if child == 0 {
        let failed = catch_unwind(AssertUnwindSafe(run)).inspect_err(|panic| {
            // The output that the test harness has captured is lost with the child.
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
            let line = format!("the child panicked: {text}\n");
            // SAFETY: the call reads `line.len()` bytes of the line.
            unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
        });
        let failed = failed.is_err();
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(failed)) };
    }
    if child < 0 { Err(io::Error::last_os_error()) } else { Ok(Child(child)) }
}

impl Child {
    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.0.unsigned_abs()
    }

    /// Waits until the child ends. Returns true if `run` returned, and false after a panic or a
    /// signal.
    ///
    /// # Errors
    /// The errors of waitpid(2).
    pub fn wait(self) -> io::Result<bool> {
        let mut status = 0;
        loop {
            // SAFETY: the child is this value's, and the call writes to `status` only.
            if unsafe { libc::waitpid(self.0, &raw mut status, 0) } == self.0 {
                return Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Sets the soft RLIMIT_FSIZE of this process, in bytes.
///
/// # Errors
/// The errors of setrlimit(2).
pub fn limit_file_size(bytes: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit, which the first call fills and the second reads.
    let set = unsafe {
        libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit);
        limit.rlim_cur = bytes;
        libc::setrlimit(libc::RLIMIT_FSIZE, &limit)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of fstatfs(2), for [`forbid`].
pub const FSTATFS: libc::c_long = libc::SYS_fstatfs;
/// The number of memfd_create(2), for [`forbid`].
pub const MEMFD_CREATE: libc::c_long = libc::SYS_memfd_create;
/// The number of ptrace(2), for [`forbid`].
pub const PTRACE: libc::c_long = libc::SYS_ptrace;

/// Makes a system call fail with EPERM in this thread and in threads that it starts. This function
/// installs a seccomp(2) filter, like a sandbox.
///
/// # Errors
/// The errors of prctl(2).
pub fn forbid(call: libc::c_long) -> io::Result<()> {
    filter(call, None, libc::EPERM)
}

/// Makes socket(2) for Unix sockets fail with EAFNOSUPPORT in this thread and in threads that it
/// starts, as RestrictAddressFamilies of systemd does.
///
/// # Errors
/// The errors of prctl(2).
pub fn forbid_unix_sockets() -> io::Result<()> {
    filter(libc::SYS_socket, Some(libc::AF_UNIX), libc::EAFNOSUPPORT)
}

/// Makes a system call fail with `errno`, if `first` is `None` or is the first argument of the
/// call.
fn filter(call: libc::c_long, first: Option<i32>, errno: i32) -> io::Result<()> {
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let number = u32::try_from(call).map_err(|_| io::ErrorKind::InvalidInput)?;
    let refused = libc::SECCOMP_RET_ERRNO | errno as u32;
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let unless = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    // In seccomp_data the number of the call is the first field, and the arguments begin at byte
    // 16. An argument has 8 bytes, of which the lower 4 come first on little-endian systems.
    let mut steps = vec![step(load, 0, 0)];
    match first {
        None => steps.push(step(unless, 1, number)),
        Some(first) => steps.extend([
            step(unless, 3, number),
            step(load, 0, 16),
            step(unless, 1, first as u32),
        ]),
    }
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, refused));
    steps.push(step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let filter = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: the program is valid and the kernel copies it; the other arguments are numbers.
    let set = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64) {
            0 => libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program),
            failed => failed,
        }
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends SIGPROF to each other thread of this process every millisecond, like a profiler, until the
/// process ends. The kernel does not restart system calls that the signal interrupts.
///
/// # Errors
/// The handler cannot be installed, or the thread cannot be started.
pub fn signal_all_threads() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all fields of a sigaction may be zero: no flags, and no signals that are blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int) = nothing;
    action.sa_sigaction = handler as usize;
    // SAFETY: the handler does nothing, and has the signature of one without SA_SIGINFO.
    if unsafe { libc::sigaction(libc::SIGPROF, &action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    thread::Builder::new().name("signals".to_owned()).spawn(|| {
        let own = fs::read_link("/proc/thread-self").unwrap_or_default();
        loop {
            thread::sleep(PERIOD);
            let Ok(threads) = fs::read_dir("/proc/self/task") else { continue };
            for thread in threads.flatten().map(|entry| entry.file_name()) {
                let number = thread.to_str().and_then(|number| number.parse::<i32>().ok());
                let Some(number) = number.filter(|_| !own.ends_with(&thread)) else { continue };
                // SAFETY: the call takes only numbers. A thread that has ended gets no signal.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, libc::SIGPROF) };
            }
        }
    })?;
    Ok(())
}

/// Runs before `main`.
extern "C" fn begin() {
    if std::env::var_os(SIGNALS).is_some()
        && let Err(error) = signal_all_threads()
    {
        eprintln!("{SIGNALS}: {error}");
        std::process::exit(2);
    }
}

// SAFETY: a function without arguments that needs nothing that `main` prepares.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
