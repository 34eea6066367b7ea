#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tonic_rdma_fuzz_targets::socket(data));
