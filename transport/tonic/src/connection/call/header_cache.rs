//! HeaderCache of requests that come again and again: read once, then copied.

use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::Extensions;
use http::request::Parts;
use tonic_rdma_proto::Breach;

use crate::codec::{self, Call, Methods};
use crate::connection::call::headers;

/// HeaderCache that a connection remembers. Each method has one or a few.
const HEADS: usize = 16;
/// The longest block that is remembered, in bytes.
const LONGEST: usize = 1024;

/// A request's head, and what follows from it.
#[derive(Clone)]
pub(in crate::connection) struct Head {
    pub(in crate::connection) parts: Parts,
    pub(in crate::connection) call: Call,
    /// See [`codec::is_plain_grpc`].
    pub(in crate::connection) plain: bool,
}

/// The heads of one connection.
pub(in crate::connection) struct HeaderCache {
    methods: Arc<Methods>,
    /// Given to every request.
    extensions: Extensions,
    /// Those used last are in front.
    known: Vec<(Bytes, Head)>,
    /// Hashes of the last blocks that have come and were not known: what comes once only is not
    /// worth remembering.
    seen: [u64; HEADS],
    /// The oldest of them.
    oldest: usize,
    hasher: RandomState,
}

impl HeaderCache {
    pub(in crate::connection) fn new(methods: Arc<Methods>, extensions: Extensions) -> Self {
        let (hasher, extensions) = (RandomState::default(), with_room(extensions));
        HeaderCache { methods, extensions, known: Vec::new(), seen: [0; HEADS], oldest: 0, hasher }
    }

    /// Reads a block.
    pub(in crate::connection) fn read(&mut self, block: Bytes) -> Result<Head, Breach> {
        if let Some(at) = self.known.iter().position(|(known, _)| *known == block) {
            self.known[..=at].rotate_right(1);
            return Ok(self.known[0].1.clone());
        }
        if block.len() > LONGEST {
            return self.decode(block);
        }
        let hash = self.hasher.hash_one(&block);
        if !self.seen.contains(&hash) {
            self.seen[self.oldest] = hash;
            self.oldest = (self.oldest + 1) % HEADS;
            return self.decode(block);
        }
        // In memory of its own: what came may be a piece of something larger.
        let block = Bytes::copy_from_slice(&block);
        let head = self.decode(block.clone())?;
        if head.call.is_known() {
            self.known.truncate(HEADS - 1);
            self.known.insert(0, (block, head.clone()));
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

/// What is put into a request's extensions on its way to the handler, three things by tonic and
/// axum alone, finds room then.
fn with_room(mut extensions: Extensions) -> Extensions {
    #[derive(Clone)]
    struct Place<const N: u8>;
    extensions.insert(Place::<0>);
    extensions.insert(Place::<1>);
    extensions.insert(Place::<2>);
    extensions.insert(Place::<3>);
    extensions.remove::<Place<0>>();
    extensions.remove::<Place<1>>();
    extensions.remove::<Place<2>>();
    extensions.remove::<Place<3>>();
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
            assert_eq!(header_cache.known.len(), usize::from(n > 0), "once it has come twice");
            head.call.learn(Used::Plain);
            // Nothing that is done to one is seen in the next.
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
            assert!(header_cache.known.iter().any(|(_, head)| head.parts.uri.path() == path));
        }
        assert_eq!(header_cache.known.len(), HEADS);
        let twos = header_cache.known.iter().filter(|(_, head)| head.parts.headers["x-id"] == "2");
        assert_eq!(twos.count(), 0);
    }

    #[test]
    fn long_heads_and_bad_ones_are_not_remembered() {
        let mut header_cache = HeaderCache::new(Arc::default(), Extensions::new());
        let long = block("/a.B/C", &"x".repeat(LONGEST));
        for _ in 0..4 {
            header_cache.read(long.clone()).unwrap().call.learn(Used::Plain);
            assert!(header_cache.read(Bytes::from_static(b"\xff")).is_err());
        }
        assert!(header_cache.known.is_empty());
    }

    /// Two that take turns push out what is old, and not each other.
    #[test]
    fn what_comes_now_stays() {
        let mut header_cache = HeaderCache::new(Arc::default(), Extensions::new());
        let mut read = |id: &str| {
            let mut head = header_cache.read(block("/a.B/C", id)).unwrap();
            head.call.learn(Used::Plain);
            header_cache.known.len()
        };
        for old in 0..4 * HEADS {
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
            assert!(header_cache.known.iter().any(|(known, _)| *known == block), "{id}");
        }
        assert_eq!(header_cache.known.len(), HEADS);
    }
}
