//! The peer's landing chunks that this end has mapped.
//!
//! | message | checked first | then |
//! |---|---|---|
//! | CHUNK | its key is new, and the limits hold | the file is mapped (`peer_map`), and WRITEs go there; or DECLINED |
//! | FORGET | its key is known | the file is unmapped, if it was mapped |
//! | NAME | its key is new, and the limits of offers hold | the file is mapped, WRITEs go there, and TAKEN is sent; or DECLINED |
//! | UNNAME | | the file is unmapped, if it was mapped |
//!
//! The limits suffice for a peer that leases all of its landing memory to one connection, in chunks
//! of the usual size and a few chunks of other sizes. [`MAX_CHUNK_BYTES`] is also the limit that an
//! end imposes on itself as [`Caps::max_landing`](crate::Caps::max_landing). A peer that keeps
//! giving chunks and taking them back unused costs this end time for nothing, so this end ends the
//! connection.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::shm::memory::peer_map::{Given, MAX_CHUNK_BYTES, OfferedMemory, PeerMap};
use crate::shm::offers::{MAX_BYTES, MAX_FILES};

/// Maximum number of a peer's chunks that are kept mapped.
pub(crate) const MAX_CHUNKS: usize = 512;
/// Maximum number of chunks that a peer may take back unused in [`UNUSED_PERIOD`].
const MAX_UNUSED: u32 = 1024;
const UNUSED_PERIOD: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct PeerChunk {
    addr: u64,
    len: u64,
    /// `None` if this end could not map the chunk.
    map: Option<PeerMap>,
    /// Whether the memory is an application buffer.
    named: bool,
}

/// The chunks of one link's peer.
#[derive(Debug, Default)]
pub(crate) struct PeerChunks {
    chunks: HashMap<u32, PeerChunk>,
    bytes: u64,
    named: usize,
    named_bytes: u64,
    /// Number of CHUNK messages that have been handled.
    handled: u64,
    /// The time when the count of `unused` began.
    unused_since: Option<Instant>,
    unused: u32,
}

impl PeerChunks {
    /// The number of CHUNK messages that have been handled.
    pub(crate) fn handled(&self) -> u64 {
        self.handled
    }

    /// Checks whether process `pid` may give a chunk. Returns the number and the total length of
    /// the chunks that were given before, without application buffers.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn check(&self, offered: OfferedMemory, pid: u32) -> Result<Given, String> {
        let OfferedMemory { key: rkey, len, .. } = offered;
        let files = self.chunks.len() - self.named;
        let (count, total) = (files + 1, self.bytes.saturating_add(len));
        if count > MAX_CHUNKS || total > MAX_CHUNK_BYTES {
            return Err(format!(
                "more landing memory than a peer may give: {count} chunks, {total} bytes; \
                 the limit is {MAX_CHUNKS} and {MAX_CHUNK_BYTES}"
            ));
        }
        match self.chunks.contains_key(&rkey) {
            true => Err(format!("rkey {rkey:#x} twice")),
            false => Ok(Given { files, bytes: self.bytes, pid }),
        }
    }

    /// Adds a chunk that was checked. `map` is `None` if the chunk could not be mapped.
    pub(crate) fn insert(&mut self, offered: OfferedMemory, map: Option<PeerMap>) {
        let OfferedMemory { key: rkey, addr, len } = offered;
        self.chunks.insert(rkey, PeerChunk { addr, len, map, named: false });
        self.bytes += len;
        self.handled += 1;
    }

    /// Checks whether process `pid` may offer an application buffer. Returns the number and the
    /// total length of the buffers that are mapped already.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn check_named(&self, offered: OfferedMemory, pid: u32) -> Result<Given, String> {
        let OfferedMemory { key, len, .. } = offered;
        let (count, total) = (self.named + 1, self.named_bytes.saturating_add(len));
        if count > MAX_FILES || total > MAX_BYTES {
            return Err(format!(
                "more buffers to land in than a peer may offer: {count} of {total} bytes; the \
                 limit is {MAX_FILES} and {MAX_BYTES}"
            ));
        }
        match self.chunks.contains_key(&key) {
            true => Err(format!("rkey {key:#x} twice")),
            false => Ok(Given { files: self.named, bytes: self.named_bytes, pid }),
        }
    }

    /// Adds a buffer that was checked and is now mapped.
    pub(crate) fn insert_named(&mut self, offered: OfferedMemory, map: PeerMap) {
        let OfferedMemory { key, addr, len } = offered;
        self.chunks.insert(key, PeerChunk { addr, len, map: Some(map), named: true });
        self.named += 1;
        self.named_bytes += len;
    }

    /// Handles UNNAME: the peer takes back a buffer, which this end may have failed to map.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn unname(&mut self, key: u32) -> Result<(), String> {
        match self.chunks.get(&key) {
            Some(chunk) if chunk.named => self.forget(key),
            Some(_) => Err(format!("rkey {key:#x} is taken back as what it is not")),
            None => Ok(()),
        }
    }

    /// Whether a chunk with this key was given and is mapped.
    pub(crate) fn is_mapped(&self, rkey: u32) -> bool {
        self.chunks.get(&rkey).is_some_and(|chunk| chunk.map.is_some())
    }

    /// Handles FORGET: the peer takes a chunk back.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn forget(&mut self, rkey: u32) -> Result<(), String> {
        let Some(chunk) = self.chunks.remove(&rkey) else {
            return Err(format!("rkey {rkey:#x} is taken back, and was not given"));
        };
        match chunk.named {
            true => (self.named, self.named_bytes) = (self.named - 1, self.named_bytes - chunk.len),
            false => self.bytes -= chunk.len,
        }
        let is_unused = chunk.map.as_ref().is_none_or(PeerMap::is_unused);
        match is_unused && self.is_flood(Instant::now()) {
            true => {
                Err(format!("a flood of chunks: {MAX_UNUSED} unused ones within {UNUSED_PERIOD:?}"))
            }
            false => Ok(()),
        }
    }

    fn is_flood(&mut self, now: Instant) -> bool {
        let since = *self.unused_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= UNUSED_PERIOD {
            (self.unused_since, self.unused) = (Some(now), 0);
        }
        self.unused += 1;
        self.unused > MAX_UNUSED
    }

    /// Copies bytes to an address in a chunk. Returns false if no mapped chunk has this key, or if
    /// the bytes do not lie within the chunk. Key, address and length come from the peer, and must
    /// match a chunk that the peer gave (R15).
    pub(crate) fn write(&mut self, rkey: u32, remote_addr: u64, bytes: &[u8]) -> bool {
        self.chunks.get_mut(&rkey).is_some_and(|chunk| {
            let offset = remote_addr.checked_sub(chunk.addr);
            offset.is_some_and(|offset| {
                offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= chunk.len)
                    && chunk.map.as_mut().is_some_and(|map| map.write(offset, bytes))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_chunks_are_counted_over_a_time() {
        let (mut chunks, start) = (PeerChunks::default(), Instant::now());
        for round in 0..3 {
            let now = start + UNUSED_PERIOD * round;
            assert!((0..MAX_UNUSED).all(|_| !chunks.is_flood(now)));
        }
        assert!(chunks.is_flood(start + UNUSED_PERIOD * 2));
    }
}
