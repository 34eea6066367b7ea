//! Chooses the provider of cryptography for TLS. rustls has several providers. rustls panics if a
//! program's features select no provider or two, and the program has not installed a provider.
//!
//! | features | a client's configuration | a server's configuration |
//! |---|---|---|
//! | one of `tls-ring` and `tls-aws-lc` | tonic takes this provider | this provider, set here |
//! | both | tonic takes ring | ring, set here |
//! | neither | another crate's choice, or else an error from here | the same |
//!
//! In each case, a provider that the program has installed takes precedence.

use tokio_rustls::rustls::crypto::CryptoProvider;

use crate::error::Error;

/// Makes sure that tonic finds a provider for a client's configuration.
///
/// # Errors
/// [`NoCryptography`](crate::Cause::NoCryptography).
pub(crate) fn for_client() -> Result<(), Error> {
    #[cfg(not(any(feature = "tls-ring", feature = "tls-aws-lc")))]
    chosen_elsewhere(|| drop(tokio_rustls::rustls::ClientConfig::builder()))?;
    Ok(())
}

/// Makes sure that tonic finds a provider for a server's configuration.
///
/// # Errors
/// [`NoCryptography`](crate::Cause::NoCryptography).
pub(crate) fn for_server() -> Result<(), Error> {
    if CryptoProvider::get_default().is_some() {
        return Ok(());
    }
    #[cfg(feature = "tls-ring")]
    let own = tokio_rustls::rustls::crypto::ring::default_provider();
    #[cfg(all(feature = "tls-aws-lc", not(feature = "tls-ring")))]
    let own = tokio_rustls::rustls::crypto::aws_lc_rs::default_provider();
    // An error means that another thread has installed a provider first. rustls installs a provider
    // in the same way.
    #[cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))]
    let _ = own.install_default();
    for_client()
}

/// Whether rustls can make a configuration. Only rustls knows its own features.
#[cfg(any(test, not(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
fn chosen_elsewhere(make: impl FnOnce() + std::panic::UnwindSafe) -> Result<(), Error> {
    if CryptoProvider::get_default().is_some() {
        return Ok(());
    }
    std::panic::catch_unwind(make).map_err(|_| crate::Cause::NoCryptography.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also holds with both features, which `scripts/check-features` tests.
    #[test]
    fn a_servers_configuration_has_a_provider() {
        for_client().unwrap();
        for_server().unwrap();
        assert!(CryptoProvider::get_default().is_some());
        drop(tokio_rustls::rustls::ServerConfig::builder());
        // An installed provider is found, whatever the features say.
        chosen_elsewhere(|| panic!("no feature chooses one")).unwrap();
    }
}
