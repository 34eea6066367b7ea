//! Memory that devices read and write, and what peers may reach of it.

use tonic_rdma_memory::{HugePages, Pool, PoolConfig};

use super::*;

/// WRITEs with a wrong key, a wrong address and a local key.
#[tokio::test]
async fn writes_outside_the_grant_hurt_the_link_only() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let local = side.pool.try_alloc(4096).unwrap();
    let (local_addr, lkey) = (local.addr(), local.lkey());
    let wrong: [Aim<'_>; 3] =
        [&|l| (l.addr(), l.rkey() ^ 0x00ff_ff00), &|l| (l.addr() + (1 << 40), l.rkey()), &|_| {
            (local_addr, lkey)
        }];
    for (i, aim) in wrong.into_iter().enumerate() {
        let (target, writer) = a_bad_write(&side, &side, aim).await;
        match transport(&side) {
            Transport::RoCE => {
                let LinkError::Completion { verb, code, .. } = &writer else {
                    panic!("{i}: {writer}")
                };
                assert_eq!((*verb, *code), (Verb::Write, 10), "remote access error");
                let told = matches!(
                    target,
                    LinkError::Completion { verb: Verb::Recv, .. } | LinkError::Disconnected { .. }
                );
                assert!(told, "{i}: {target}");
            }
            _ => {
                assert!(matches!(writer, LinkError::Disconnected { .. }), "{i}: {writer}");
                assert!(matches!(target, LinkError::Disconnected { .. }), "{i}: {target}");
            }
        }
    }
    common::sends_of_all_sizes(&side, &side).await;
}

/// Sends a WRITE and then a SEND over a new connection. Returns `None` if both arrived.
async fn end_of_a_write(side: &Side, remote_addr: u64, rkey: u32) -> Option<LinkError> {
    let (mut s, mut c) = greeted_pair(side, side).await;
    let src = WriteSource::Bytes(side.pool.resolve(&side.payload(4096, 0xa5)).unwrap());
    c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
    c.queue_send(1, b"behind it", true).unwrap();
    c.link.ring_doorbell().unwrap();
    let received =
        tokio::time::timeout(TIMEOUT, s.receive()).await.expect("neither arrives nor ends");
    match received {
        Ok(message) => {
            assert_eq!(message, b"behind it");
            None
        }
        Err(_) => Some(c.death().await),
    }
}

/// All queue pairs share a protection domain, so every peer may use the key of another connection's
/// landing memory: only the address protects it. The peer guesses near its own memory, with one
/// connection for each guess.
#[tokio::test]
async fn landing_memory_of_another_connection_is_not_found() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let len = side.pool.config().chunk;
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    // Lease the chunks one after the other, each for an account of its own, as two connections do.
    let victim = side.landing(len);
    let own = side.landing(len);
    assert_ne!(victim.rkey(), own.rkey());
    // Other memory may be mapped between the two chunks.
    let near = (0..24).map(|chunks| chunks * len as u64);
    let guesses = near.flat_map(|by| [own.addr().wrapping_sub(by), own.addr().wrapping_add(by)]);
    for guess in guesses {
        match (end_of_a_write(&side, guess, victim.rkey()).await, transport(&side)) {
            (Some(LinkError::Completion { verb: Verb::Write, code: 10, .. }), Transport::RoCE) => {}
            // The sender learns only that the connection has ended.
            (Some(LinkError::Disconnected { .. }), Transport::IWarp) => {}
            (None, _) => {
                panic!("{guess:#x} is the victim's: its memory is at {:#x}", victim.addr())
            }
            (Some(other), _) => panic!("{other}"),
        }
    }
    // The victim's connection continues, and only its own peer's data has been written.
    let src = WriteSource::Bytes(side.pool.resolve(&side.payload(4096, 1)).unwrap());
    c.queue(Work::Write { src, remote_addr: victim.addr() + 4096, rkey: victim.rkey() }, false)
        .unwrap();
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    // With the right address the WRITE succeeds.
    let hit = end_of_a_write(&side, victim.addr() + 8192, victim.rkey()).await;
    assert!(hit.is_none(), "{hit:?}");
    let landed = victim.filled(len).lend();
    assert!(landed[..4096].iter().all(|b| *b == 0), "changed before what was written");
    assert!(landed[4096..8192] == pattern(4096, 1)[..]);
    assert!(landed[8192..12288] == pattern(4096, 0xa5)[..]);
    assert!(landed[12288..].iter().all(|b| *b == 0), "changed behind what was written");
}

/// Each bit of the page number varies, as SECURITY.md states. Chunks of whole huge pages keep their
/// offset within a huge page.
#[tokio::test]
async fn addresses_of_landing_memory_are_random() {
    let _turn = TURN.lock().await;
    let mut side = on_guest_device();
    for (huge_pages, first) in [(HugePages::Off, 12), (HugePages::Transparent, 21)] {
        let config = PoolConfig::default().huge_pages(huge_pages);
        side.pool = Pool::new(config, side.fabric.registrar()).unwrap();
        addresses_vary_from(first, &side);
    }
}

fn addresses_vary_from(first: u32, side: &Side) {
    let named: Vec<u64> = (0..40).map(|_| side.landing(4096).addr()).collect();
    let top = u64::BITS - named.iter().max().unwrap().leading_zeros();
    match transport(side) {
        Transport::IWarp => {
            assert!(top >= 39, "{top}: User Mode Linux has 39, other x86-64 kernels 47")
        }
        _ => assert_eq!(top, 64),
    }
    for bit in first..top {
        let set = named.iter().filter(|addr| (*addr >> bit) & 1 == 1).count();
        assert!(set > 0 && set < named.len(), "bit {bit} of {top} is always the same: {named:x?}");
    }
}

/// Application memory may be mapped read-only, at any address. The device only reads it, so not
/// even a peer that knows its address and key can write to it.
#[tokio::test]
async fn a_mapped_file_is_sent_from_where_it_lies_and_cannot_be_written() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut file = tempfile::tempfile().unwrap();
    let content = pattern(100_001, 7);
    std::io::Write::write_all(&mut file, &content).unwrap();
    // SAFETY: nobody else has the file.
    let shared = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    // Linux can pin such a mapping since 6.2. On earlier kernels the error says what to do.
    match side.pool.register(bytes::Bytes::from_owner(shared)) {
        Ok(registered) => drop(registered),
        Err(error) => assert!(error.to_string().contains("map_copy_read_only"), "{error}"),
    }
    // SAFETY: as above.
    let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) }.unwrap();
    let memory = bytes::Bytes::from_owner(map).slice(1..);
    let registered = side.pool.register(memory.clone()).unwrap();
    let source = side.pool.resolve(&memory).unwrap();
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    let landing = side.landing(memory.len());
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    c.queue(Work::Write { src: WriteSource::Bytes(source.clone()), remote_addr, rkey }, false)
        .unwrap();
    // The application has dropped its handle. The work in flight still uses the memory.
    drop(registered);
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    assert!(landing.filled(memory.len()).lend()[..] == content[1..]);
    let stats = side.pool.stats();
    assert_eq!(stats.application, memory.len(), "registered while bytes with its key are left");

    let written = end_of_a_write(&side, source.iova(), source.lkey()).await;
    assert!(written.is_some(), "a peer has written to application memory");
    assert!(memory[..] == content[1..]);
    drop((source, s, c));
    while side.pool.stats().application > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Memory that can be lent to processes on this host can also be sent over the network.
#[tokio::test]
async fn lendable_memory_is_registered_with_devices() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut buf = LendableBuf::zeroed(100_001).unwrap();
    buf.copy_from_slice(&pattern(100_001, 7));
    let memory = Arc::new(buf.freeze());
    let registered = side.pool.register_lendable(memory.clone()).unwrap();
    let bytes = LendableMemory::bytes(memory);
    assert!(side.pool.lend(&bytes).is_none(), "not over the network");
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    let landing = side.landing(bytes.len());
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    let src = WriteSource::Bytes(side.pool.resolve(&bytes).unwrap());
    c.queue(Work::Write { src, remote_addr, rkey }, false).unwrap();
    c.queue_send(1, b"landed", true).unwrap();
    c.link.ring_doorbell().unwrap();
    assert_eq!(s.receive().await.unwrap(), b"landed");
    assert!(landing.filled(bytes.len()).lend()[..] == bytes[..]);
    // As with any file that is mapped shared and read-only, this needs Linux 6.2.
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = memfd_create("test", flags).unwrap();
    ftruncate(&file, 100_001).unwrap();
    let memory = Arc::new(LendableMemory::from_file(file).unwrap());
    match side.pool.register_lendable(memory) {
        Ok(other) => drop(other),
        Err(error) => assert!(error.to_string().contains("map_copy_read_only"), "{error}"),
    }
    drop(registered);
}

/// Registration beyond the limit fails with the device's error.
#[tokio::test]
async fn registration_beyond_the_limit_is_an_error() {
    let _turn = TURN.lock().await;
    let fabric = Fabric::open(Some(&guest_device())).unwrap();
    let registrar = fabric.registrar();
    assert!(registrar.pins());
    let layout = std::alloc::Layout::from_size_align(4096, 4096).unwrap();
    // SAFETY: the layout has a size above zero. The memory is freed below.
    let memory = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
    let range = |len, access| Memory { addr: memory, len, access, file: None };
    // SAFETY: the memory is allocated; a length that wraps is refused before any access.
    let refused = unsafe { registrar.register(range(usize::MAX - 4096, Access::Local)) };
    assert!(refused.is_err());
    // SAFETY: the memory is mapped until after the registration is dropped.
    let region = unsafe { registrar.register(range(4096, Access::RemoteWrite)) }.unwrap();
    assert_ne!(region.rkey(), 0);
    drop(region);
    // SAFETY: allocated above with this layout, and no longer registered.
    unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
}
