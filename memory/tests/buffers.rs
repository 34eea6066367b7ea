//! Filling buffers, and resolving bytes to their keys.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::io::{self, Read};

use bytes::{BufMut, Bytes};
use common::small;

#[test]
fn resolve_finds_bytes_of_the_pool_only() {
    let (pool, registrar) = small();
    let (other, _) = small();
    let mut buf = pool.try_alloc(100).unwrap();
    buf.put_slice(&[1; 100]);
    let (addr, lkey) = (buf.addr(), buf.lkey());
    let bytes = buf.freeze();
    let part = bytes.slice(10..20);
    let resolved = pool.resolve(&part).unwrap();
    assert_eq!((resolved.addr(), resolved.len(), resolved.lkey()), (addr + 10, 10, lkey));
    assert!(registrar.covers(resolved.lkey(), resolved.iova(), resolved.len()));
    let inner = resolved.slice(2..5);
    assert_eq!((inner.addr(), inner.len(), inner.lkey()), (addr + 12, 3, lkey));
    drop((bytes, part, resolved));
    assert_eq!(inner.as_ref(), [1; 3]);
    assert!(other.resolve(&inner.clone().into_bytes()).is_none());
    for foreign in [Bytes::new(), Bytes::from_static(b"static"), Bytes::from(vec![0; 1 << 16])] {
        assert!(pool.resolve(&foreign).is_none());
    }
    let mut own = pool.try_alloc(300_000).unwrap();
    own.resize_zeroed(300_000);
    let own = own.freeze();
    assert!(pool.resolve(&own).is_some_and(|r| registrar.covers(r.lkey(), r.iova(), 300_000)));
}

/// A reader that returns a few bytes at a time, is interrupted in between, and ends with an error.
struct Slow {
    left: usize,
    interrupted: bool,
    fails: bool,
}

impl Read for Slow {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.interrupted = !self.interrupted;
        if self.interrupted {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if self.left == 0 && self.fails {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let n = self.left.min(7).min(buf.len());
        buf[..n].fill(9);
        self.left -= n;
        Ok(n)
    }
}

#[test]
fn readers_fill_buffers() {
    let (pool, _) = small();
    let mut buf = pool.try_alloc(100).unwrap();
    buf.put_u8(1);
    assert_eq!(
        buf.fill_from(&mut Slow { left: 50, interrupted: false, fails: false }).unwrap(),
        50
    );
    assert_eq!(buf.len(), 51);
    let error = buf.fill_from(&mut Slow { left: 20, interrupted: false, fails: true }).unwrap_err();
    assert_eq!((error.kind(), buf.len()), (io::ErrorKind::BrokenPipe, 71));
    assert_eq!(buf.fill_from(&mut io::repeat(9)).unwrap(), 29);
    assert_eq!(buf.fill_from(&mut io::repeat(9)).unwrap(), 0);
    assert_eq!((buf[0], &buf[1..]), (1, &[9; 99][..]));
    buf.truncate(200);
    assert_eq!(buf.len(), 100);
    buf.truncate(1);
    buf.resize_zeroed(3);
    assert_eq!(&buf[..], [1, 0, 0]);
    buf.resize_zeroed(usize::MAX);
    assert_eq!(buf.len(), 100);
    buf.clear();
    assert!(buf.is_empty() && buf.freeze().is_empty());
}

/// A reader sees the old contents of the buffer: zeroing them would cost a pass over every byte.
#[test]
fn memory_is_not_zeroed_before_it_is_read_into() {
    let (pool, _) = small();
    let mut buf = pool.try_alloc(100).unwrap();
    buf.fill_from(&mut io::repeat(9)).unwrap();
    buf.truncate(10);
    struct Look(Vec<u8>);
    impl Read for Look {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.0 = buf.to_vec();
            Ok(0)
        }
    }
    let mut look = Look(Vec::new());
    assert_eq!(buf.fill_from(&mut look).unwrap(), 0);
    assert_eq!((look.0, buf.len()), (vec![9; 90], 10));
}

#[tokio::test]
async fn async_readers_fill_buffers() {
    use tokio::io::AsyncReadExt;
    let (pool, _) = small();
    let source: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let (mut near, far) = tokio::io::duplex(100);
    let sent = source.clone();
    let writer = async move {
        let mut far = far;
        tokio::io::AsyncWriteExt::write_all(&mut far, &sent).await.unwrap();
    };
    let reader = async {
        let mut buf = pool.alloc(8_000).await.unwrap();
        while buf.has_remaining_mut() && near.read_buf(&mut buf).await.unwrap() > 0 {}
        assert_eq!((buf.len(), buf.remaining_mut()), (8_000, 0));
        let mut rest = pool.alloc(8_000).await.unwrap();
        while rest.has_remaining_mut() && near.read_buf(&mut rest).await.unwrap() > 0 {}
        [buf.freeze(), rest.freeze()].concat()
    };
    let (read, ()) = tokio::join!(reader, writer);
    assert_eq!(read, source);
}
