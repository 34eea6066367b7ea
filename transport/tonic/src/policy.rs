//! Whether the fast path is wanted: builder setting and environment.
//!
//! | variable | values | effect |
//! |---|---|---|
//! | `TONIC_RDMA` | `auto`, `off`, `require` | replaces the policy set in code |
//! | `TONIC_RDMA_DEVICE` | a device's name, as in `rdma link` | only this device is used |
//!
//! A variable that is set wins over the builder, so that an operator can force a path without a
//! new build. Both are read once for every `Endpoint` that connects and every `Server` that
//! starts. An empty value counts as not set.

use std::{env, ffi::OsString, fmt, str::FromStr};

/// Whether to use the fast path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Use it where it can be had, TCP otherwise.
    #[default]
    Auto,
    /// Never use it: the channel or server is tonic over TCP, and no RDMA library is loaded.
    Off,
    /// Fail rather than use TCP for calls.
    Require,
}

impl Policy {
    const NAMES: &'static str = "`auto`, `off`, `require`";

    /// `auto`, `off` or `require`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Require => "require",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A policy's name that is none.
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
            other => Err(UnknownPolicy(other.to_owned())),
        }
    }
}

/// An environment variable with a value that cannot be used. Nothing was changed or opened.
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

    /// The value found, with invalid UTF-8 replaced.
    pub fn value(&self) -> &str {
        &self.value
    }
}

const POLICY: &str = "TONIC_RDMA";
const DEVICE: &str = "TONIC_RDMA_DEVICE";
/// IB_DEVICE_NAME_MAX of the kernel, with its terminating NUL.
const DEVICE_NAME_MAX: usize = 64;

/// What the environment says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct EnvSettings {
    pub(crate) policy: Option<Policy>,
    pub(crate) device: Option<String>,
}

impl EnvSettings {
    pub(crate) fn read() -> Result<Self, EnvError> {
        Self::from_lookup(|name| env::var_os(name))
    }

    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvError> {
        Ok(Self {
            policy: value(&lookup, POLICY, Policy::NAMES)?
                .map(|v| {
                    v.parse().map_err(|_| EnvError {
                        variable: POLICY,
                        value: v,
                        problem: "unknown policy",
                        allowed: Policy::NAMES,
                    })
                })
                .transpose()?,
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
        })
    }

    /// The policy in force, given the one set in code.
    pub(crate) fn policy(&self, builder: Policy) -> Policy {
        self.policy.unwrap_or(builder)
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

fn is_device_name(name: &str) -> bool {
    name.len() < DEVICE_NAME_MAX
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(policy: Option<&str>, device: Option<&str>) -> Result<EnvSettings, EnvError> {
        EnvSettings::from_lookup(|name| match name {
            POLICY => policy.map(OsString::from),
            DEVICE => device.map(OsString::from),
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
            EnvSettings { policy: Some(Policy::Require), device: Some("mlx5_0".into()) }
        );
    }

    #[test]
    fn bad_values_name_variable_value_and_what_is_allowed() {
        let e = read(Some("on"), None).unwrap_err().to_string();
        assert!(e.contains("TONIC_RDMA=\"on\""), "{e}");
        assert!(e.contains("`auto`, `off`, `require`"), "{e}");
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
}
