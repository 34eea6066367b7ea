//! Parts of a call other than messages: addresses, metadata, header limits, layers, raw HTTP.

pub(crate) mod addresses;
pub(crate) mod headers;
pub(crate) mod layers;
pub(crate) mod metadata;
pub(crate) mod raw;
