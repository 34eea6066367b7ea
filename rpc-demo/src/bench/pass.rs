//! The passes of a measurement.

/// A pass over all objects of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    WriteInOrder,
    ReadInOrder,
    ReadAtRandom,
    WriteAtRandom,
}

/// All passes, in order.
pub(super) const PASSES: [Pass; 4] =
    [Pass::WriteInOrder, Pass::ReadInOrder, Pass::ReadAtRandom, Pass::WriteAtRandom];

impl Pass {
    pub(super) fn writes(self) -> bool {
        matches!(self, Pass::WriteInOrder | Pass::WriteAtRandom)
    }

    pub(super) fn at_random(self) -> bool {
        matches!(self, Pass::ReadAtRandom | Pass::WriteAtRandom)
    }
}
