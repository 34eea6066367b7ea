//! A type without values.

use std::convert::Infallible;

/// A type without values. In a build without providers, this type keeps the providers' enums from
/// being empty.
#[derive(Clone, Debug)]
pub struct Never(Infallible);

impl Never {
    /// This function is never called, because the type has no values.
    pub(crate) fn reached(&self) -> ! {
        match self.0 {}
    }
}
