//! The faults that a test injects: device faults, delays, and bugs of the fabric itself.

pub(super) mod delay;
pub(super) mod device_faults;
pub(super) mod injected_bugs;
