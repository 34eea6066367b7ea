//! The landing chunks of this process, keyed by remote key, and the regions that it may lend, keyed
//! by memory key.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tonic_rdma_memory::{Access, LendScope, Memory, RegisterError, Registrar, Registration};

/// The chunks that peers may be given.
#[derive(Debug, Default)]
pub(crate) struct ChunkTable {
    next: AtomicU32,
    chunks: Mutex<HashMap<u32, Arc<ShmChunk>>>,
    /// Regions that may be lent to peers, keyed by memory key.
    lendable: Mutex<HashMap<u32, Arc<Lendable>>>,
}

/// Memory that may be lent: the file, and its address in this process.
#[derive(Debug)]
pub(crate) struct Lendable {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) file: OwnedFd,
    /// The pipe that tells the owner when all readers are done. The pipe is set only for memory
    /// that a peer has lent to this process.
    pub(crate) owner: OnceLock<Arc<OwnedFd>>,
    /// The links whose peers have the file.
    links: Mutex<Vec<Weak<RevokedKeys>>>,
}

/// A chunk: the file, and its address in this process.
#[derive(Debug)]
pub(crate) struct ShmChunk {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) file: OwnedFd,
    links: Mutex<Links>,
}

/// The links whose peers have a chunk.
#[derive(Debug)]
enum Links {
    /// The link that has the chunk. No other link can ever get this chunk (R12).
    One(Option<Arc<RevokedKeys>>),
    /// The links to which an application buffer was given one after the other. An application
    /// buffer stays registered for several calls.
    InTurn(Vec<Weak<RevokedKeys>>),
}

impl Links {
    /// Gives a link's peer access, and returns whether that is allowed.
    fn add(&mut self, to: &Arc<RevokedKeys>, in_turn: bool) -> bool {
        match self {
            Links::One(link) if !in_turn => Arc::ptr_eq(link.get_or_insert_with(|| to.clone()), to),
            Links::InTurn(links) if in_turn => {
                links.retain(|link| link.strong_count() > 0);
                links.push(Arc::downgrade(to));
                true
            }
            Links::One(_) | Links::InTurn(_) => false,
        }
    }
}

/// Keys that have stopped working. The link has to report these keys to its peer.
#[derive(Debug, Default)]
pub(crate) struct RevokedKeys {
    any: AtomicBool,
    keys: Mutex<Vec<u32>>,
}

impl RevokedKeys {
    fn push(&self, key: u32) {
        lock(&self.keys).push(key);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Takes the revoked keys. Costs one load if no key was revoked.
    pub(crate) fn take(&self) -> Vec<u32> {
        match self.any.load(Ordering::Relaxed) {
            true => {
                self.any.store(false, Ordering::Relaxed);
                std::mem::take(&mut *lock(&self.keys))
            }
            false => Vec::new(),
        }
    }

    /// Puts back keys that this end could not report to the peer.
    pub(crate) fn put_back(&self, keys: impl Iterator<Item = u32>) {
        lock(&self.keys).extend(keys);
        self.any.store(true, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ChunkTable {
    pub(crate) fn live(&self) -> usize {
        lock(&self.chunks).len()
    }

    /// Adds memory under an unused key. Keys repeat after 2^32 registrations.
    fn insert<T>(&self, memories: &Mutex<HashMap<u32, Arc<T>>>, memory: T) -> u32 {
        loop {
            let key = self.next.fetch_add(1, Ordering::Relaxed);
            let is_free = || {
                !lock(&self.chunks).contains_key(&key) && !lock(&self.lendable).contains_key(&key)
            };
            // No other registration tries this key before 2^32 more keys have been drawn.
            if is_free() {
                lock(memories).insert(key, Arc::new(memory));
                return key;
            }
        }
    }

    /// Records that memory belongs to a peer. Through `pipe` the peer learns when all readers are
    /// done.
    pub(crate) fn set_owner(&self, key: u32, pipe: &Arc<OwnedFd>) {
        if let Some(memory) = lock(&self.lendable).get(&key) {
            memory.owner.get_or_init(|| pipe.clone());
        }
    }

    /// Gives a link's peer read access to the memory with this key. Returns `None` if there is no
    /// such memory.
    pub(crate) fn lend(&self, key: u32, to: &Arc<RevokedKeys>) -> Option<Arc<Lendable>> {
        let memory = lock(&self.lendable).get(&key).cloned()?;
        let mut links = lock(&memory.links);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(to));
        drop(links);
        Some(memory)
    }

    /// Gives a chunk to a link's peer. Returns `None` if no chunk has the key, or if another link
    /// has the chunk (R12).
    pub(crate) fn share(&self, rkey: u32, to: &Arc<RevokedKeys>) -> Option<Arc<ShmChunk>> {
        self.share_with(rkey, to, false)
    }

    /// Gives a link's peer access to an application buffer. Returns `None` if no application buffer
    /// has the key.
    pub(crate) fn share_named(&self, rkey: u32, to: &Arc<RevokedKeys>) -> Option<Arc<ShmChunk>> {
        self.share_with(rkey, to, true)
    }

    fn share_with(&self, rkey: u32, to: &Arc<RevokedKeys>, in_turn: bool) -> Option<Arc<ShmChunk>> {
        let chunk = lock(&self.chunks).get(&rkey).cloned()?;
        let shared = lock(&chunk.links).add(to, in_turn);
        shared.then_some(chunk)
    }
}

/// The registrar of a device, which adds chunks and lendable regions to the table.
#[derive(Debug)]
pub(crate) struct ShmRegistrar {
    pub(crate) table: Arc<ChunkTable>,
    pub(crate) scope: LendScope,
}

struct ShmRegistration {
    table: Arc<ChunkTable>,
    key: u32,
    addr: u64,
    lends: bool,
}

impl Registration for ShmRegistration {
    fn lkey(&self) -> u32 {
        self.key
    }
    fn rkey(&self) -> u32 {
        self.key
    }
    /// The virtual address. The address need not be secret, because a peer reaches only memory that
    /// its own link has given it.
    fn iova(&self) -> u64 {
        self.addr
    }
}

impl Drop for ShmRegistration {
    fn drop(&mut self) {
        if self.lends {
            let memory = lock(&self.table.lendable).remove(&self.key);
            let links = memory.map(|memory| std::mem::take(&mut *lock(&memory.links)));
            for link in links.into_iter().flatten().filter_map(|link| link.upgrade()) {
                link.push(self.key);
            }
            return;
        }
        let Some(chunk) = lock(&self.table.chunks).remove(&self.key) else { return };
        match &mut *lock(&chunk.links) {
            Links::One(link) => link.take().into_iter().for_each(|link| link.push(self.key)),
            Links::InTurn(links) => {
                let links = links.drain(..).filter_map(|link| link.upgrade());
                links.for_each(|link| link.push(self.key));
            }
        }
    }
}

// SAFETY: each loan looks its key up in the table, and dropping the Registration removes the key
// from the table. A peer that had the key keeps at most its own mapping. The pool takes the pages
// out of the file before it unmaps the file, and never uses the file again. An application buffer
// that stays registered stays in such a mapping, and the documentation of these buffers says so.
unsafe impl Registrar for ShmRegistrar {
    fn pins(&self) -> bool {
        false
    }

    fn wants_file(&self) -> bool {
        true
    }

    fn lend_scope(&self) -> LendScope {
        self.scope
    }

    fn is_slow(&self) -> bool {
        true
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, file } = memory;
        let addr = addr.as_ptr().addr() as u64;
        let (table, len) = (&*self.table, len as u64);
        let key = match (access, file) {
            (Access::RemoteWrite | Access::RemoteWriteInTurn, Some(file)) => {
                let links = Mutex::new(match access {
                    Access::RemoteWrite => Links::One(None),
                    _ => Links::InTurn(Vec::new()),
                });
                table.insert(&table.chunks, ShmChunk { addr, len, file, links })
            }
            (Access::Lend, Some(file)) => {
                let (owner, links) = (OnceLock::new(), Mutex::default());
                let memory = Lendable { addr, len, file, owner, links };
                table.insert(&table.lendable, memory)
            }
            _ => table.next.fetch_add(1, Ordering::Relaxed),
        };
        let lends = access == Access::Lend;
        Ok(Box::new(ShmRegistration { table: self.table.clone(), key, addr, lends }))
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn a_chunk_is_shared_with_one_link_which_hears_of_its_end() {
        let table = Arc::new(ChunkTable::default());
        let registrar = ShmRegistrar { table: table.clone(), scope: LendScope::Nothing };
        let file = Some(tonic_rdma_memory::memfd::sealed(c"test", 4096).unwrap());
        let memory =
            Memory { addr: NonNull::dangling(), len: 4096, access: Access::RemoteWrite, file };
        // SAFETY: nothing touches the memory in this test.
        let registration = unsafe { registrar.register(memory) }.unwrap();
        let (one, other) = (Arc::new(RevokedKeys::default()), Arc::new(RevokedKeys::default()));
        let rkey = registration.rkey();
        assert!(table.share(rkey, &one).is_some());
        assert!(table.share(rkey, &one).is_some(), "again to the same");
        assert!(table.share(rkey, &other).is_none(), "not to another");
        assert!(table.share(rkey + 1, &one).is_none());
        assert!(one.take().is_empty());
        drop(registration);
        assert_eq!((one.take(), other.take()), (vec![rkey], vec![]));
        assert_eq!(table.live(), 0);
        assert!(table.share(rkey, &one).is_none());
    }
}
