//! Parts that the tests share: hosts, a service, and captured logs.

pub(crate) mod echo;
pub(crate) mod logs;
pub(crate) mod world;
