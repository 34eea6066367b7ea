//! A type without values.

use std::convert::Infallible;

/// A type without values. In a build without providers, this type keeps the providers' enums from
/// being empty.
#[derive(Clone, Debug)]
pub struct Never(Infallible);

impl Never {
    /// Never called, because there is no value.
    pub(crate) fn reached(&self) -> ! {
        match self.0 {}
    }
}
