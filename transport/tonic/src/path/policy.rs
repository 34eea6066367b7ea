//! Decides whether to use the fast path, from builder settings and the environment, and whether
//! calls may leave this host unencrypted.
//!
//! | variable | values | effect |
//! |---|---|---|
//! | `TONIC_RDMA` | a policy or fabrics, separated by commas | overrides code |
//! | `TONIC_RDMA_DEVICE` | a device's name, as in `rdma link` | only this device is used |
//! | `TONIC_RDMA_TOS` | 0 to 255, or 0x00 to 0xff | the packets' type of service |
//! | `TONIC_RDMA_POOL` | `512MiB`, or `verbs=64MiB,shm=2GiB` | the size of each pool |
//!
//! The policies are `auto`, `off`, `require` and `require-verbs`. Fabrics named in `TONIC_RDMA`
//! (`shm`, `verbs`) are allowed, and all others excluded. The order of the fabrics is the order of
//! preference: `verbs,shm` prefers RDMA even on one host. `require` means shared memory, RDMA or an
//! error, and `require-verbs` means RDMA or an error.
//!
//! A variable that is set overrides the builder, so that an operator can select a path without a
//! new build. All variables are read each time an `Endpoint` connects or a `Server` starts.
//! `TONIC_RDMA_POOL` takes effect when the pool is created. An empty value counts as not set.

use std::ffi::OsString;
use std::str::FromStr;
use std::{env, fmt};

use super::pool_totals;
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

pub(crate) use super::pool_totals::PoolTotals;

/// Whether to use the fast path. [`FabricKind`] selects the fabrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Use the fast path if it is available, and otherwise TCP.
    #[default]
    Auto,
    /// Never use the fast path. The channel or server is tonic over TCP, loads no RDMA library and
    /// shares no memory.
    Off,
    /// Fail calls instead of using TCP. Shared memory and RDMA both satisfy the policy.
    Require,
    /// Fail calls instead of using TCP or shared memory. Only RDMA satisfies the policy.
    RequireVerbs,
}

impl Policy {
    const NAMES: &'static str = "`auto`, `off`, `require`, `require-verbs`";

    /// Returns `auto`, `off`, `require` or `require-verbs`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Require => "require",
            Self::RequireVerbs => "require-verbs",
        }
    }

    /// Whether calls fail without a fast path.
    pub(crate) fn is_required(self) -> bool {
        matches!(self, Self::Require | Self::RequireVerbs)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The caller gave a name that no [`Policy`] has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not one of {names}", names = Policy::NAMES)]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "require" => Ok(Self::Require),
            "require-verbs" => Ok(Self::RequireVerbs),
            other => Err(UnknownPolicy(other.to_owned())),
        }
    }
}

/// A fabric that the fast path may use.
///
/// [`Endpoint::fabrics`](crate::Endpoint::fabrics) and [`Server::fabrics`](crate::Server::fabrics)
/// select fabrics and their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FabricKind {
    /// Memory shared by two processes on one host.
    Shm,
    /// RDMA through rdma-core.
    Verbs,
}

impl FabricKind {
    /// The default order. Shared memory comes first, and is available only if both ends are on one
    /// host.
    pub const DEFAULT: [FabricKind; 2] = [FabricKind::Shm, FabricKind::Verbs];

    /// Returns `shm` or `verbs`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Verbs => "verbs",
        }
    }
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns the list without duplicates, in the same order.
pub(crate) fn distinct(kinds: impl IntoIterator<Item = FabricKind>) -> Vec<FabricKind> {
    let mut list = Vec::new();
    for kind in kinds {
        if !list.contains(&kind) {
            list.push(kind);
        }
    }
    list
}

/// An environment variable of this process has a bad value. Correct the value where the process is
/// started. No connection or device was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("environment variable {variable}={value:?}: {problem}; allowed: {allowed}")]
pub struct EnvError {
    variable: &'static str,
    value: String,
    problem: &'static str,
    allowed: &'static str,
}

impl EnvError {
    /// The variable's name.
    pub fn variable(&self) -> &str {
        self.variable
    }

    /// The value, with invalid UTF-8 replaced.
    pub fn value(&self) -> &str {
        &self.value
    }
}

/// Checks that `TONIC_RDMA`, `TONIC_RDMA_DEVICE`, `TONIC_RDMA_TOS` and `TONIC_RDMA_POOL` have valid
/// values. Call this function to report a bad value before the program does anything else. Channels
/// and servers check these variables when they start.
///
/// # Errors
///
/// [`EnvError`] names the variable, its value and the allowed values.
///
/// ```
/// if let Err(error) = tonic_rdma::check_environment() {
///     eprintln!("{error}");
///     std::process::exit(2);
/// }
/// ```
pub fn check_environment() -> Result<(), EnvError> {
    EnvSettings::read().map(drop)
}

const POLICY: &str = "TONIC_RDMA";
const POLICY_ALLOWED: &str = "`auto`, `off`, `require` or `require-verbs`, and `shm`, `verbs` in \
                              order of preference, separated by commas";
const DEVICE: &str = "TONIC_RDMA_DEVICE";
const TOS: &str = "TONIC_RDMA_TOS";
const POOL: &str = "TONIC_RDMA_POOL";
const TOS_ALLOWED: &str =
    "a number from 0 to 255, such as 106 or 0x6a: the DSCP times four, and two bits for ECN";
/// Maximum length of a device's name in bytes, including the terminating NUL: the kernel's
/// IB_DEVICE_NAME_MAX.
const DEVICE_NAME_MAX: usize = 64;

/// The settings in the environment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct EnvSettings {
    pub(crate) policy: Option<Policy>,
    /// The allowed fabrics, in order of preference.
    pub(crate) fabrics: Option<Vec<FabricKind>>,
    pub(crate) device: Option<String>,
    pub(crate) type_of_service: Option<u8>,
    pub(crate) pool: PoolTotals,
}

impl EnvSettings {
    pub(crate) fn read() -> Result<Self, EnvError> {
        Self::from_lookup(|name| env::var_os(name))
    }

    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvError> {
        let (policy, fabrics) = match value(&lookup, POLICY, POLICY_ALLOWED)? {
            Some(text) => words(&text).map_err(|problem| EnvError {
                variable: POLICY,
                value: text,
                problem,
                allowed: POLICY_ALLOWED,
            })?,
            None => (None, None),
        };
        Ok(Self {
            policy,
            fabrics,
            device: value(&lookup, DEVICE, DEVICE_ALLOWED)?
                .map(|v| {
                    if is_device_name(&v) {
                        Ok(v)
                    } else {
                        Err(EnvError {
                            variable: DEVICE,
                            value: v,
                            problem: "not a device name",
                            allowed: DEVICE_ALLOWED,
                        })
                    }
                })
                .transpose()?,
            type_of_service: value(&lookup, TOS, TOS_ALLOWED)?
                .map(|text| {
                    number(&text).ok_or(EnvError {
                        variable: TOS,
                        value: text,
                        problem: "not a type of service",
                        allowed: TOS_ALLOWED,
                    })
                })
                .transpose()?,
            pool: match value(&lookup, POOL, pool_totals::ALLOWED)? {
                None => PoolTotals::default(),
                Some(text) => PoolTotals::parse(&text).map_err(|problem| EnvError {
                    variable: POOL,
                    value: text,
                    problem,
                    allowed: pool_totals::ALLOWED,
                })?,
            },
        })
    }

    /// The effective policy, given the policy set in code. A fabric that the environment names
    /// overrides [`Policy::Off`] in code.
    pub(crate) fn policy(&self, builder: Policy) -> Policy {
        match (self.policy, &self.fabrics, builder) {
            (Some(policy), _, _) => policy,
            (None, Some(_), Policy::Off) => Policy::Auto,
            (None, _, builder) => builder,
        }
    }

    /// The effective fabrics in order of preference, given the fabrics set in code and the
    /// effective policy.
    pub(crate) fn fabrics(
        &self,
        builder: Option<&[FabricKind]>,
        policy: Policy,
    ) -> Vec<FabricKind> {
        let mut fabrics = match (&self.fabrics, builder) {
            (Some(fabrics), _) => fabrics.clone(),
            (None, Some(fabrics)) => fabrics.to_vec(),
            (None, None) => FabricKind::DEFAULT.to_vec(),
        };
        if policy == Policy::RequireVerbs {
            fabrics.retain(|fabric| *fabric == FabricKind::Verbs);
        }
        fabrics
    }
}

type Words = (Option<Policy>, Option<Vec<FabricKind>>);

/// Parses the value of `TONIC_RDMA`. The error describes its defect.
fn words(text: &str) -> Result<Words, &'static str> {
    let (mut policy, mut fabrics) = (None, Vec::new());
    for word in text.split(',').map(str::trim) {
        match word {
            "shm" => fabrics.push(FabricKind::Shm),
            "verbs" => fabrics.push(FabricKind::Verbs),
            word => match (word.parse(), policy) {
                (Ok(named), None) => policy = Some(named),
                (Ok(_), Some(_)) => return Err("two policies"),
                (Err(_), _) => return Err("unknown policy or fabric"),
            },
        }
    }
    match (policy, fabrics.is_empty()) {
        (Some(Policy::Off), false) => Err("`off` together with a fabric"),
        (Some(Policy::RequireVerbs), _) if fabrics.contains(&FabricKind::Shm) => {
            Err("`shm` together with `require-verbs`")
        }
        // The policy overrides fabrics that the code names.
        (policy @ Some(Policy::RequireVerbs), _) => Ok((policy, Some(vec![FabricKind::Verbs]))),
        (policy, true) => Ok((policy, None)),
        (policy, false) => Ok((policy, Some(distinct(fabrics)))),
    }
}

const DEVICE_ALLOWED: &str =
    "the name of one RDMA device as `rdma link` shows it, such as `mlx5_0` or `rxe0`";

fn value(
    lookup: &impl Fn(&str) -> Option<OsString>,
    variable: &'static str,
    allowed: &'static str,
) -> Result<Option<String>, EnvError> {
    match lookup(variable) {
        None => Ok(None),
        Some(v) if v.is_empty() => Ok(None),
        Some(v) => v.into_string().map(Some).map_err(|v| EnvError {
            variable,
            value: v.to_string_lossy().into_owned(),
            problem: "not UTF-8",
            allowed,
        }),
    }
}

fn number(text: &str) -> Option<u8> {
    match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn is_device_name(name: &str) -> bool {
    name.len() < DEVICE_NAME_MAX
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

/// Decides whether calls may leave the host unencrypted if the Offer came over TLS.
///
/// | the Offer's TCP connection | both ends have set `plaintext_rdma` | over a device | shared memory |
/// |---|---|---|---|
/// | not encrypted | any | yes | yes |
/// | TLS | yes | yes | yes |
/// | TLS | no | no: `not-encrypted` | yes |
///
/// Each side decides by its own end of the TCP connection. If the table says no, the server offers
/// no device and rejects tickets that arrive over a device, and the client connects to no device
/// that is offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Plaintext {
    /// Whether this end is set up for TLS. Even if it is not, some of its connections may be known
    /// to use TLS.
    pub(crate) tls: bool,
    /// Whether the program has set `plaintext_rdma`.
    pub(crate) agreed: bool,
}

impl Plaintext {
    /// Whether `path` is denied. `by_tls` says that the Offer's connection is known to use TLS.
    pub(crate) fn denies(self, path: Path, by_tls: bool) -> bool {
        path.leaves_host() && (self.tls || by_tls) && !self.agreed
    }

    pub(crate) fn denied_by_client() -> Reason {
        Self::denied("Endpoint::plaintext_rdma is not set")
    }

    /// Adds to the server's reason that the client has not agreed either.
    pub(crate) fn and_by_client(reason: Reason) -> Reason {
        match reason.code() {
            ReasonCode::NotEncrypted => reason.and("nor is Endpoint::plaintext_rdma, at this end"),
            _ => reason,
        }
    }

    pub(crate) fn denied_by_server() -> Reason {
        Self::denied("Server::plaintext_rdma is not set")
    }

    fn denied(setting: &str) -> Reason {
        let detail = format!("the Offer came over TLS, RDMA is not encrypted, and {setting}");
        Reason::new(ReasonCode::NotEncrypted, detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(policy: Option<&str>, device: Option<&str>) -> Result<EnvSettings, EnvError> {
        EnvSettings::from_lookup(|name| match name {
            POLICY => policy.map(OsString::from),
            DEVICE => device.map(OsString::from),
            TOS | POOL => None,
            other => panic!("unexpected variable {other}"),
        })
    }

    #[test]
    fn unset_and_empty_leave_the_builder_alone() {
        for policy in [None, Some("")] {
            let env = read(policy, None).unwrap();
            assert_eq!(env.policy(Policy::Require), Policy::Require);
            assert_eq!(env.device, None);
        }
    }

    #[test]
    fn a_set_variable_wins_over_the_builder() {
        assert_eq!(read(Some("off"), None).unwrap().policy(Policy::Require), Policy::Off);
        assert_eq!(read(Some("auto"), None).unwrap().policy(Policy::Off), Policy::Auto);
        assert_eq!(
            read(Some("require"), Some("mlx5_0")).unwrap(),
            EnvSettings {
                policy: Some(Policy::Require),
                fabrics: None,
                device: Some("mlx5_0".into()),
                ..EnvSettings::default()
            }
        );
    }

    #[test]
    fn pools_have_sizes() {
        let read = |text: &str| {
            EnvSettings::from_lookup(|name| (name == POOL).then(|| text.into())).map(|env| env.pool)
        };
        let both = PoolTotals { verbs: Some(64 << 20), shm: Some(64 << 20) };
        assert_eq!(read("64MiB").unwrap(), both);
        assert_eq!(read("").unwrap(), PoolTotals::default());
        let error = read("plenty").unwrap_err();
        assert_eq!((error.variable(), error.value()), (POOL, "plenty"));
        let text = error.to_string();
        assert!(text.contains("TONIC_RDMA_POOL=\"plenty\": not a size; allowed: "), "{text}");
        assert!(text.contains("such as 512MiB"), "{text}");
    }

    #[test]
    fn a_type_of_service_is_a_byte() {
        let read = |text: &str| {
            EnvSettings::from_lookup(|name| (name == TOS).then(|| text.into()))
                .map(|env| env.type_of_service)
        };
        assert_eq!(read("106").unwrap(), Some(106));
        assert_eq!(read("0x6a").unwrap(), Some(106));
        assert_eq!(read("").unwrap(), None);
        for bad in ["256", "-1", "0x100", "af41", " 8", "0x"] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("TONIC_RDMA_TOS={bad:?}")), "{error}");
            assert!(error.contains("from 0 to 255"), "{error}");
        }
    }

    #[test]
    fn fabrics_are_named_in_order() {
        use FabricKind::{Shm, Verbs};
        let only = read(Some("shm"), None).unwrap();
        let auto = Policy::Auto;
        assert_eq!(only.fabrics(None, auto), [Shm]);
        assert_eq!(only.policy(Policy::Off), Policy::Auto);
        assert_eq!(only.policy(Policy::Require), Policy::Require);
        let both = read(Some("require, verbs,shm,verbs"), None).unwrap();
        assert_eq!(both.fabrics(Some(&[Shm]), auto), [Verbs, Shm]);
        assert_eq!(both.policy(Policy::Auto), Policy::Require);
        let none = read(None, None).unwrap();
        assert_eq!(none.fabrics(None, auto), FabricKind::DEFAULT);
        assert_eq!(none.fabrics(Some(&[Verbs]), auto), [Verbs]);
    }

    #[test]
    fn rdma_can_be_required_and_shared_memory_does_not_satisfy_that() {
        use FabricKind::{Shm, Verbs};
        for text in ["require-verbs", "require-verbs,verbs"] {
            let env = read(Some(text), None).unwrap();
            let policy = env.policy(Policy::Auto);
            assert_eq!(policy, Policy::RequireVerbs);
            assert_eq!(env.fabrics(None, policy), [Verbs]);
            assert_eq!(env.fabrics(Some(&[Shm]), policy), [Verbs]);
        }
        // The environment can lift or contradict a requirement of the code.
        let required = Policy::RequireVerbs;
        let unset = read(None, None).unwrap();
        assert_eq!(unset.fabrics(None, unset.policy(required)), [Verbs]);
        let either = read(Some("require"), None).unwrap();
        assert_eq!(either.fabrics(None, either.policy(required)), FabricKind::DEFAULT);
        let shm = read(Some("shm"), None).unwrap();
        assert_eq!(shm.fabrics(None, shm.policy(required)), []);
    }

    #[test]
    fn bad_values_name_variable_value_and_what_is_allowed() {
        let e = read(Some("on"), None).unwrap_err().to_string();
        assert!(e.contains("TONIC_RDMA=\"on\""), "{e}");
        assert!(e.contains("`auto`, `off`, `require` or `require-verbs`"), "{e}");
        for (bad, problem) in [
            ("auto,off", "two policies"),
            ("off,shm", "`off` together with a fabric"),
            ("shm,", "unknown"),
            ("require-verbs,verbs,shm", "`shm` together with `require-verbs`"),
            ("require,require-verbs", "two policies"),
        ] {
            let e = read(Some(bad), None).unwrap_err().to_string();
            assert!(e.contains(problem), "{e}");
        }
        for bad in ["a/b", "mlx5 0", &"x".repeat(64)] {
            let e = read(None, Some(bad)).unwrap_err();
            assert_eq!(e.variable(), DEVICE);
            assert_eq!(e.value(), bad);
        }
    }

    #[cfg(unix)]
    #[test]
    fn invalid_utf8_is_an_error() {
        use std::os::unix::ffi::OsStringExt;
        let e = EnvSettings::from_lookup(|_| Some(OsString::from_vec(vec![0xff]))).unwrap_err();
        assert!(e.to_string().contains("not UTF-8"), "{e}");
    }

    #[test]
    fn only_what_leaves_the_host_by_tls_needs_consent() {
        for (tls, by_tls, agreed) in
            (0..8).map(|bits| (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0))
        {
            let end = Plaintext { tls, agreed };
            assert!(!end.denies(Path::Shm, by_tls) && !end.denies(Path::Tcp, by_tls));
            assert_eq!(end.denies(Path::Verbs, by_tls), (tls || by_tls) && !agreed);
        }
    }
}
