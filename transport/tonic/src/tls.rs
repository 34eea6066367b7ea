//! The cryptography of TLS. rustls has several providers of it and panics where the features of a
//! program choose none, or two, and the program has installed none.
//!
//! | features | a client's configuration | a server's |
//! |---|---|---|
//! | one of `tls-ring` and `tls-aws-lc` | tonic takes that one | that one, here |
//! | both | tonic takes ring | ring, here |
//! | neither | what another crate of the program has chosen, or an error, here | the same |
//!
//! What the program has installed comes first everywhere.

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
    // An error means that another thread was first. rustls installs one as well.
    #[cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))]
    let _ = own.install_default();
    for_client()
}

/// Whether rustls can make a configuration: nobody but rustls knows which features it has.
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

    /// With both features as well, which `scripts/check-features` tests.
    #[test]
    fn a_servers_configuration_has_a_provider() {
        for_client().unwrap();
        for_server().unwrap();
        assert!(CryptoProvider::get_default().is_some());
        drop(tokio_rustls::rustls::ServerConfig::builder());
        // What is installed is found, whatever features say.
        chosen_elsewhere(|| panic!("no feature chooses one")).unwrap();
    }
}
