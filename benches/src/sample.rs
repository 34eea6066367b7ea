//! What a round yields.

use crate::cost::Usage;
use crate::measure::Round;

/// One round of one contender, with what it cost.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What was measured.
    pub round: Round,
    /// What the client's process used.
    pub client: Usage,
    /// What the server's process used.
    pub server: Usage,
    /// Instructions of both, where they are counted.
    pub instructions: Option<u64>,
}

/// What is counted in rounds that are not timed, of both processes together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// System calls for one call.
    pub system_calls: Option<f64>,
    /// How often each byte of payload is copied, by processors and through the kernel.
    pub copies: Option<f64>,
}
