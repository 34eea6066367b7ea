//! Counted costs: instructions, system calls, allocations, control messages and doorbells of a
//! piece of work.
//!
//! Counts do not depend on the load of the machine, so they reveal a loss of a few percent that
//! timings would not. `costs` compares them with the record in `costs.toml`.
//!
//! Each [`Scenario`] runs in its own process under callgrind, which counts the instructions and
//! system calls of [`meter::counted`] and its callees. To make the counts deterministic, the
//! process has one thread, no environment variables but those that the measurement sets, and a
//! replaced clock and source of randomness (`fixed.c`, loaded before libc).
//!
//! | module | what |
//! |---|---|
//! | [`meter`] | counts what repetitions of a piece of work cost |
//! | [`proto`] | frames and connections, without IO |
//! | [`parts`] | the pool, the codec |
//! | [`calls`] | whole calls, client and server in one thread |
//! | [`connects`] | a connection for each call |
//! | [`callgrind`] | runs a scenario under callgrind |
//! | [`scenario`] | a piece of work that is counted |
//! | [`record`] | the recorded counts, and their comparison with the current ones |

pub mod callgrind;
pub mod calls;
pub mod connects;
pub mod meter;
pub mod parts;
pub mod proto;
pub mod record;
pub mod scenario;

use scenario::Scenario;

/// All scenarios in display order.
pub fn all() -> Vec<Scenario> {
    [proto::SCENARIOS, parts::SCENARIOS, calls::SCENARIOS, connects::SCENARIOS].concat()
}
