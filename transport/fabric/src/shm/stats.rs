//! What a link over shared memory has done.

/// What a link has done since it was made.
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
    /// Files of the peer that had to wait, because files before them were mapped for nothing.
    pub deferred_files: u64,
}
