//! How calls end: cancelled, late, with a status, or with their server.

pub(crate) mod cancel;
pub(crate) mod deadlines;
pub(crate) mod shutdown;
pub(crate) mod status;
