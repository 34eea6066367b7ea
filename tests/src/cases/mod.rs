//! The cases, one module per idea.

use std::future::Future;
use std::pin::Pin;

use crate::fabric::Fabric;
use crate::harness::Bed;

/// Declares `CASES` of a module.
macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        cases![for None; $($name),+];
    };
    (for $only:expr; $($name:ident),+ $(,)?) => {
        /// The cases of this module.
        pub(crate) const CASES: &[(&str, crate::cases::Run, Option<&[crate::fabric::Fabric]>)] =
            &[$((stringify!($name), |bed| Box::pin($name(bed)), $only)),+];
    };
}

mod addresses;
mod calls;
mod cancel;
mod compression;
mod deadlines;
mod fast;
mod headers;
mod layers;
mod limits;
mod load;
mod metadata;
mod raw;
mod shutdown;
mod sizes;
mod status;
mod streams;
mod zero_copy;

/// A case's function.
pub type Run = for<'a> fn(&'a Bed) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// A case.
#[derive(Clone, Debug)]
pub struct Case {
    /// `MODULE::FUNCTION`
    pub name: String,
    /// Runs it.
    pub run: Run,
    /// The fabrics it is for; `None`: every one.
    pub only: Option<&'static [Fabric]>,
}

/// Every case.
pub fn all() -> Vec<Case> {
    [
        ("addresses", addresses::CASES),
        ("calls", calls::CASES),
        ("cancel", cancel::CASES),
        ("compression", compression::CASES),
        ("deadlines", deadlines::CASES),
        ("fast", fast::CASES),
        ("headers", headers::CASES),
        ("layers", layers::CASES),
        ("limits", limits::CASES),
        ("load", load::CASES),
        ("metadata", metadata::CASES),
        ("raw", raw::CASES),
        ("shutdown", shutdown::CASES),
        ("sizes", sizes::CASES),
        ("status", status::CASES),
        ("streams", streams::CASES),
        ("zero_copy", zero_copy::CASES),
    ]
    .into_iter()
    .flat_map(|(module, cases)| {
        cases.iter().map(move |(name, run, only)| Case {
            name: format!("{module}::{name}"),
            run: *run,
            only: *only,
        })
    })
    .collect()
}
