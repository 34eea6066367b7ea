//! How calls end: by cancellation, deadline, status, or the end of their server.

pub(crate) mod cancel;
pub(crate) mod deadlines;
pub(crate) mod like_tonic;
pub(crate) mod shutdown;
pub(crate) mod status;
