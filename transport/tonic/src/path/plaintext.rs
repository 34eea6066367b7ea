//! Decides whether calls may leave the host unencrypted if the Offer came over TLS.
//!
//! | the Offer's TCP connection | both ends have set `plaintext_rdma` | over a device | shared memory |
//! |---|---|---|---|
//! | not encrypted | any | yes | yes |
//! | TLS | yes | yes | yes |
//! | TLS | no | no: `not-encrypted` | yes |
//!
//! Each side decides by its own end of the TCP connection. If the table says no, the server offers
//! no device and rejects tickets that arrive over a device, and the client connects to no device
//! that is offered.

use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

/// The decision of one end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Plaintext {
    /// Whether this end is set up for TLS. Even without this setting, single connections may be
    /// known to use TLS.
    pub(crate) tls: bool,
    /// Whether the program has set `plaintext_rdma`.
    pub(crate) agreed: bool,
}

impl Plaintext {
    /// Whether `path` is denied. `by_tls` says that the Offer's connection is known to use TLS.
    pub(crate) fn denies(self, path: Path, by_tls: bool) -> bool {
        path.leaves_host() && (self.tls || by_tls) && !self.agreed
    }
}

pub(crate) fn denied_by_client() -> Reason {
    denied("Endpoint::plaintext_rdma is not set")
}

/// The server's reason, for a client that has not agreed either.
pub(crate) fn and_by_client(reason: Reason) -> Reason {
    match reason.code() {
        ReasonCode::NotEncrypted => reason.and("nor is Endpoint::plaintext_rdma, at this end"),
        _ => reason,
    }
}

pub(crate) fn denied_by_server() -> Reason {
    denied("Server::plaintext_rdma is not set")
}

fn denied(setting: &str) -> Reason {
    let detail = format!("the Offer came over TLS, RDMA is not encrypted, and {setting}");
    Reason::new(ReasonCode::NotEncrypted, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

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
