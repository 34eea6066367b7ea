//! Results of a round.

use crate::cost::Usage;
use crate::measure::Round;

/// One round of one contender, and its costs.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The measured figures.
    pub round: Round,
    /// Usage of the client process.
    pub client: Usage,
    /// Usage of the server process.
    pub server: Usage,
    /// Instructions of both processes, if counted.
    pub instructions: Option<u64>,
}

/// Counts of both processes from rounds that are not timed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// System calls per call.
    pub system_calls: Option<f64>,
    /// Number of copies of each payload byte, by processors and through the kernel.
    pub copies: Option<f64>,
}
