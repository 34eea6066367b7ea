//! `scale`: the costs of many clients, connections and streams.
//!
//! | module | what |
//! |---|---|
//! | [`args`] | the command line |
//! | [`bulk`] | many clients that send large messages |
//! | [`connections`] | many connections, mostly idle |
//! | [`streams`] | many streams on one connection |
//! | [`limits`] | resource usage of a process, and its limits |
//! | [`record`] | the recorded results |
//! | [`figure`] | the figures of a record, by row and name |
//! | [`bound`] | bounds for a run |
//! | [`tables`] | tables of a record |
//! | [`plots`] | a record as SVG |
//! | [`document`] | docs/scale.md |

pub mod args;
pub mod bound;
pub mod bulk;
pub mod connections;
pub mod document;
pub mod figure;
pub mod limits;
pub mod plots;
pub mod record;
pub mod streams;
pub mod tables;
