//! Pool memory is taken from the NUMA node of the pool's device.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::{Arc, Mutex};

use tonic_rdma_memory::{
    HeapRegistrar, Memory, Pool, PoolConfig, RegisterError, Registrar, Registration,
};

/// A device on a node. Records the memory policy of each registered region.
#[derive(Debug)]
struct OnNode {
    node: Option<u32>,
    policies: Mutex<Vec<String>>,
    heap: HeapRegistrar,
}

// SAFETY: as `HeapRegistrar`.
unsafe impl Registrar for OnNode {
    fn pins(&self) -> bool {
        false
    }
    fn numa_node(&self) -> Option<u32> {
        self.node
    }
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        self.policies.lock().unwrap().push(policy(memory.addr.addr().get()));
        // SAFETY: the caller's guarantee.
        unsafe { self.heap.register(memory) }
    }
}

/// The policy of an address in /proc/self/numa_maps, or "none" on a kernel without nodes.
fn policy(addr: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let mut policy = "none".to_owned();
    for line in maps.lines() {
        let mut words = line.split(' ');
        let start = usize::from_str_radix(words.next().unwrap(), 16).unwrap();
        if start <= addr {
            policy = words.next().unwrap().to_owned();
        }
    }
    policy
}

/// The policy that the kernel, or a sandbox, gives a mapping that asks for node 0.
fn policy_of_a_plain_mapping() -> String {
    let len = 1 << 20;
    // SAFETY: a new mapping, used here only.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let nodes: [libc::c_ulong; 2] = [1, 0];
        libc::syscall(libc::SYS_mbind, at, len, libc::MPOL_PREFERRED, nodes.as_ptr(), 65, 0);
        let policy = policy(at.addr());
        libc::munmap(at, len);
        policy
    }
}

fn policies(node: Option<u32>) -> Vec<String> {
    let registrar =
        Arc::new(OnNode { node, policies: Mutex::default(), heap: HeapRegistrar::default() });
    let pool = Pool::new(PoolConfig::default().total(64 << 20), registrar.clone()).unwrap();
    drop((pool.try_alloc(1 << 20).unwrap(), pool.control(8 << 10).unwrap()));
    let policies = registrar.policies.lock().unwrap().clone();
    assert!(policies.len() >= 2, "{policies:?}");
    policies
}

#[test]
fn memory_is_of_the_devices_node() {
    let wanted = policy_of_a_plain_mapping();
    println!("a mapping that asks for node 0: {wanted}");
    let of_node = policies(Some(0));
    assert!(of_node.iter().all(|policy| *policy == wanted), "{of_node:?}");
    let plain = policies(None);
    assert!(plain.iter().all(|policy| ["default", "none"].contains(&policy.as_str())), "{plain:?}");
    // No host has these nodes, so the policy is the same as without a node.
    for node in [1023, 1024, u32::MAX] {
        assert_eq!(policies(Some(node)), plain);
    }
}
