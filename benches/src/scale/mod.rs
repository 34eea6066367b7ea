//! `scale`: what many clients, connections and streams cost.
//!
//! | module | what |
//! |---|---|
//! | [`args`] | the command line |
//! | [`bulk`] | many clients that send large messages |
//! | [`connections`] | many connections, most of them at rest |
//! | [`streams`] | many streams on one connection |
//! | [`limits`] | the limits of a process, and how near it is to them |
//! | [`record`] | what was measured, as it is kept in JSON |
//! | [`figure`] | the figures of a record, by row and name |
//! | [`bound`] | bounds that a run must keep |
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
