//! Which RDMA libraries, devices, ports and addresses this host has.
//!
//! | module | what |
//! |---|---|
//! | `lib_probe` | loads libibverbs and librdmacm, or says what is missing |
//! | `device_list` | the device list of libibverbs |
//! | `attributes` | name, limits and ports of an open device |
//! | `enumerate` | all devices, and the addresses that lie on them |

pub(super) mod attributes;
pub(super) mod device_list;
pub(super) mod enumerate;
pub(super) mod lib_probe;
