//! The type of a case, and the macro with which a module lists its cases.

use std::future::Future;
use std::pin::Pin;

use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::TestEnv;

/// Declares `CASES` of a module.
macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        cases![for None; $($name),+];
    };
    (for $only:expr; $($name:ident),+ $(,)?) => {
        pub(crate) const CASES: &[(&str, crate::case::Run, Option<&[tonic_rdma_tests::fabric::Fabric]>)] =
            &[$((stringify!($name), |env| Box::pin($name(env)), $only)),+];
    };
}

/// A case's function.
pub(crate) type Run = for<'a> fn(&'a TestEnv) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// A test of the suite, which runs over every fabric that `only` admits.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// `MODULE::FUNCTION`
    pub(crate) name: String,
    /// Runs the case in an environment.
    pub(crate) run: Run,
    /// The fabrics that the case runs over. `None` means all of them.
    pub(crate) only: Option<&'static [Fabric]>,
}
