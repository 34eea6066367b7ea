//! Memory that two processes share.
//!
//! | module | what |
//! |---|---|
//! | `map` | checks a file and maps it |
//! | `peer_map` | maps a peer's file once, and unmaps it on another thread |
//! | `map_debt` | charges peers for files that were mapped but not used |
//! | `chunks` | the peer's landing chunks: limits, WRITEs |
//! | `table` | this process's landing chunks, keyed by remote key |

pub(super) mod chunks;
pub(super) mod map;
pub(super) mod map_debt;
pub(super) mod peer_map;
pub(super) mod table;
