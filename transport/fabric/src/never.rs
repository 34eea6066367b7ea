//! A type without values.

use std::convert::Infallible;

/// Has no value. It stands for a provider in enums that a build without providers leaves empty.
#[derive(Clone, Debug)]
pub struct Never(Infallible);

impl Never {
    /// Stands where code cannot be reached.
    pub(crate) fn reached(&self) -> ! {
        match self.0 {}
    }
}
