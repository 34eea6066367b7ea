//! Registered memory of simulated devices.

pub(super) mod registrar;
pub(super) mod table;
