//! Finds the RDMA devices of this host, in a program that calls libibverbs for reasons of its own.
//!
//! `scripts/check-bindings` links it to libibverbs. Without that it is a program like any other.

use tonic_rdma_fabric::Fabric;

#[cfg(links_libibverbs)]
#[link(name = "ibverbs")]
unsafe extern "C" {
    fn ibv_rate_to_mbps(rate: std::ffi::c_int) -> std::ffi::c_int;
}

fn main() {
    #[cfg(links_libibverbs)]
    {
        const IBV_RATE_10_GBPS: std::ffi::c_int = 3;
        // SAFETY: the function takes any number.
        let rate = unsafe { ibv_rate_to_mbps(IBV_RATE_10_GBPS) };
        assert_eq!(rate, 10_000, "Mbit/s");
    }
    match Fabric::devices() {
        Ok(devices) => println!("{} RDMA devices", devices.len()),
        Err(error) => println!("no RDMA devices: {error}"),
    }
}
