//! Counted costs: what a piece of work takes in instructions, allocations, control messages and
//! doorbells.
//!
//! Counts do not depend on what else a machine does, so they show a loss of a few percent that no
//! clock would. `costs` holds them against the record in `costs.toml`.
//!
//! Each [`Scenario`] runs in a process of its own under callgrind, which counts the instructions of
//! [`meter::counted`] and of what it calls. Nothing else may move the counts: the process has one
//! thread, an empty environment, and a clock and randomness that go by a rule (`fixed.c`, loaded
//! before libc).
//!
//! | module | what |
//! |---|---|
//! | [`meter`] | counts repetitions of a piece of work |
//! | [`proto`] | frames and connections, without IO |
//! | [`parts`] | the pool, the codec |
//! | [`calls`] | whole calls, client and server in one thread |
//! | [`callgrind`] | runs a scenario under callgrind |
//! | [`scenario`] | a piece of work that is counted |
//! | [`record`] | the recorded counts, and how the ones at hand compare |

pub mod callgrind;
pub mod calls;
pub mod meter;
pub mod parts;
pub mod proto;
pub mod record;
pub mod scenario;

use scenario::Scenario;

/// All scenarios, in the order in which they are shown.
pub fn all() -> Vec<Scenario> {
    [proto::SCENARIOS, parts::SCENARIOS, calls::SCENARIOS].concat()
}
