//! A scenario: a piece of work whose costs are counted.

use super::meter::Counts;

/// A piece of work whose costs are counted.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// The scenario's name, which the record also uses.
    pub name: &'static str,
    /// A description of one repetition.
    pub what: &'static str,
    /// Runs the scenario and returns its counts.
    pub run: fn() -> anyhow::Result<Counts>,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scenario").field("name", &self.name).finish_non_exhaustive()
    }
}
