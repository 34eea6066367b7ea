//! What a test makes go wrong: faults of devices, delays, and bugs of the fabric itself.

pub(super) mod delay;
pub(super) mod device_faults;
pub(super) mod injected_bugs;
