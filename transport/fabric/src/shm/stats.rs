//! Counters of a link over shared memory.

/// Counters of a link's work since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShmStats {
    /// Messages sent.
    pub sends: u64,
    /// WRITEs, each of which is one copy.
    pub writes: u64,
    /// Bytes that these WRITEs copied.
    pub write_bytes: u64,
    /// Number of times that the peer's process slept and was woken. Each wake-up is one system
    /// call.
    pub wakes: u64,
    /// Number of times that messages were published without a system call, because the peer did not
    /// wait or its process was awake.
    pub wakes_spared: u64,
    /// Number of times that this end began to wait.
    pub waits: u64,
    /// Number of times that a message arrived while this end polled.
    pub polled: u64,
    /// The number of peer files that had to wait, because earlier files were mapped and never used.
    pub deferred_files: u64,
}
