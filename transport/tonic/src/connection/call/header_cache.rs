//! Caches the decoded heads of requests. The heads of one method repeat, so a head that is seen a
//! second time is cached, and later only cloned.

use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::Extensions;
use http::request::Parts;
use tonic_rdma_proto::Breach;

use crate::codec::{self, Call, Methods};
use crate::connection::call::headers;

/// Maximum number of heads that a connection caches. Each method has one head or a few heads.
const MAX_CACHED: usize = 16;
/// Maximum length in bytes of a block that is cached.
const MAX_BLOCK: usize = 1024;

/// A request's head, and facts derived from it.
#[derive(Clone)]
pub(crate) struct Head {
    pub(crate) parts: Parts,
    pub(crate) call: Call,
    /// The result of [`codec::is_plain_grpc`] for this head.
    pub(crate) plain: bool,
}

/// The cached heads of one connection.
pub(crate) struct HeaderCache {
    methods: Arc<Methods>,
    /// Extensions that every request gets.
    extensions: Extensions,
    /// The cached heads, most recently used first.
    cached: Vec<(Bytes, Head)>,
    /// Hashes of the last blocks that were not cached. A block is cached when it is seen a second
    /// time.
    seen: [u64; MAX_CACHED],
    /// Index of the oldest hash.
    oldest: usize,
    hasher: RandomState,
}

impl HeaderCache {
    pub(crate) fn new(methods: Arc<Methods>, extensions: Extensions) -> Self {
        let (hasher, extensions) = (RandomState::default(), with_room(extensions));
        HeaderCache {
            methods,
            extensions,
            cached: Vec::new(),
            seen: [0; MAX_CACHED],
            oldest: 0,
            hasher,
        }
    }

    /// Returns the head of a block from the cache, or decodes the block.
    pub(crate) fn read(&mut self, block: Bytes) -> Result<Head, Breach> {
        if let Some(at) = self.cached.iter().position(|(known, _)| *known == block) {
            self.cached[..=at].rotate_right(1);
            return Ok(self.cached[0].1.clone());
        }
        if block.len() > MAX_BLOCK {
            return self.decode(block);
        }
        let hash = self.hasher.hash_one(&block);
        if !self.seen.contains(&hash) {
            self.seen[self.oldest] = hash;
            self.oldest = (self.oldest + 1) % MAX_CACHED;
            return self.decode(block);
        }
        // Copy the block to its own memory, because it may be part of a larger buffer.
        let block = Bytes::copy_from_slice(&block);
        let head = self.decode(block.clone())?;
        if head.call.is_known() {
            self.cached.truncate(MAX_CACHED - 1);
            self.cached.insert(0, (block, head.clone()));
        }
        Ok(head)
    }

    fn decode(&self, block: Bytes) -> Result<Head, Breach> {
        let mut parts = headers::decode_request(block)?;
        let call = self.methods.call(&parts.uri);
        let plain = codec::is_plain_grpc(&parts.headers);
        parts.extensions = self.extensions.clone();
        Ok(Head { parts, call, plain })
    }
}

/// Reserves capacity for the extensions that a request gets on its way to the handler. tonic and
/// axum alone add three.
fn with_room(mut extensions: Extensions) -> Extensions {
    #[derive(Clone)]
    struct Filler<const N: u8>;
    extensions.insert(Filler::<0>);
    extensions.insert(Filler::<1>);
    extensions.insert(Filler::<2>);
    extensions.insert(Filler::<3>);
    extensions.remove::<Filler<0>>();
    extensions.remove::<Filler<1>>();
    extensions.remove::<Filler<2>>();
    extensions.remove::<Filler<3>>();
    extensions
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use tonic_rdma_proto::headers::encode;

    use super::*;
    use crate::codec::Used;

    fn block(path: &str, id: &str) -> Bytes {
        let mut block = BytesMut::new();
        for (name, value) in [(":method", "POST"), (":path", path), ("x-id", id)] {
            encode(&mut block, name, value.as_bytes()).unwrap();
        }
        block.freeze()
    }

    #[test]
    fn a_head_that_comes_again_is_the_same() {
        let mut extensions = Extensions::new();
        extensions.insert(7_u32);
        let mut header_cache = HeaderCache::new(Arc::default(), extensions);
        for n in 0..4 {
            let mut head = header_cache.read(block("/a.B/C", "1")).unwrap();
            assert_eq!(
                (head.parts.uri.path(), &head.parts.headers["x-id"]),
                ("/a.B/C", &"1".parse().unwrap())
            );
            assert_eq!(head.parts.extensions.get::<u32>(), Some(&7));
            assert_eq!(header_cache.cached.len(), usize::from(n > 0), "once it has come twice");
            head.call.learn(Used::Plain);
            // Changes to one head do not affect the next.
            head.parts.headers.clear();
            head.parts.extensions.clear();
        }
    }

    #[test]
    fn few_are_remembered_and_none_that_comes_once() {
        let mut header_cache = HeaderCache::new(Arc::default(), Extensions::new());
        for path in (0..100).map(|n| format!("/a.B/{n}")) {
            for id in ["1", "1", "1", "2"] {
                let mut head = header_cache.read(block(&path, id)).unwrap();
                head.call.learn(Used::Plain);
                assert_eq!(
                    (head.parts.uri.path(), &head.parts.headers["x-id"]),
                    (&path[..], &id.parse().unwrap())
                );
            }
            assert!(header_cache.cached.iter().any(|(_, head)| head.parts.uri.path() == path));
        }
        assert_eq!(header_cache.cached.len(), MAX_CACHED);
        let twos = header_cache.cached.iter().filter(|(_, head)| head.parts.headers["x-id"] == "2");
        assert_eq!(twos.count(), 0);
    }

    #[test]
    fn long_heads_and_bad_ones_are_not_remembered() {
        let mut header_cache = HeaderCache::new(Arc::default(), Extensions::new());
        let long = block("/a.B/C", &"x".repeat(MAX_BLOCK));
        for _ in 0..4 {
            header_cache.read(long.clone()).unwrap().call.learn(Used::Plain);
            assert!(header_cache.read(Bytes::from_static(b"\xff")).is_err());
        }
        assert!(header_cache.cached.is_empty());
    }

    /// Two blocks that take turns replace old blocks, and not each other.
    #[test]
    fn what_comes_now_stays() {
        let mut header_cache = HeaderCache::new(Arc::default(), Extensions::new());
        let mut read = |id: &str| {
            let mut head = header_cache.read(block("/a.B/C", id)).unwrap();
            head.call.learn(Used::Plain);
            header_cache.cached.len()
        };
        for old in 0..4 * MAX_CACHED {
            for _ in 0..3 {
                read(&old.to_string());
            }
        }
        for _ in 0..3 {
            read("a");
            read("b");
        }
        for id in ["a", "b"] {
            let block = block("/a.B/C", id);
            assert!(header_cache.cached.iter().any(|(known, _)| *known == block), "{id}");
        }
        assert_eq!(header_cache.cached.len(), MAX_CACHED);
    }
}
