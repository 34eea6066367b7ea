//! Counts of a link over shared memory.

/// Counts of a link's work since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShmStats {
    /// Messages sent.
    pub sends: u64,
    /// WRITEs, each one copy.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Times that the peer's process slept and was woken, one system call each.
    pub wakes: u64,
    /// Times that messages were published without one: the peer did not wait, or its process was
    /// awake.
    pub wakes_spared: u64,
    /// Times that this end began to wait.
    pub waits: u64,
    /// Times that a message came while this end polled.
    pub polled: u64,
    /// The number of peer files that had to wait, because earlier files were mapped and never used.
    pub deferred_files: u64,
}
