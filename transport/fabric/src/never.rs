//! A type without values.

use std::convert::Infallible;

/// Has no value. It keeps the providers' enums from being empty in a build without any provider.
#[derive(Clone, Debug)]
pub struct Never(Infallible);

impl Never {
    /// Never called, because there is no value.
    pub(crate) fn reached(&self) -> ! {
        match self.0 {}
    }
}
