//! A type without values.

use std::convert::Infallible;

/// Has no value. It keeps enums of providers from being empty in a build without any.
#[derive(Clone, Debug)]
pub struct Never(Infallible);

impl Never {
    /// Never called.
    pub(crate) fn reached(&self) -> ! {
        match self.0 {}
    }
}
