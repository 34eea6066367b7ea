//! A piece of work that is counted.

use super::meter::Counts;

/// Something whose costs are counted.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name, in the record too.
    pub name: &'static str,
    /// What is done, and what one repetition is.
    pub what: &'static str,
    /// Does it.
    pub run: fn() -> anyhow::Result<Counts>,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scenario").field("name", &self.name).finish_non_exhaustive()
    }
}
