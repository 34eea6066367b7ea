//! What a call carries besides messages: addresses, metadata, header limits, layers, raw HTTP.

pub(crate) mod addresses;
pub(crate) mod headers;
pub(crate) mod layers;
pub(crate) mod metadata;
pub(crate) mod raw;
