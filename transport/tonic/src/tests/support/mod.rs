//! What the tests share: hosts, a service, and what is logged.

pub(crate) mod echo;
pub(crate) mod logs;
pub(crate) mod world;
