//! TLS in a program whose features choose no cryptography, or two: an error that names the cure,
//! and no panic.

use tonic_rdma::{ClientTlsConfig, Endpoint, Error, Identity, Server, ServerTlsConfig};

fn main() {
    let client = Endpoint::from_static("https://localhost:1").tls_config(ClientTlsConfig::new());
    // No certificate either, which nobody comes to look at without cryptography.
    let identity = Identity::from_pem("", "");
    let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity));
    let (client, server) = (client.map(drop), server.map(drop));
    match cfg!(feature = "both") {
        true => {
            assert!(client.is_ok(), "{client:?}");
            assert!(matches!(server, Err(Error::Transport(_))), "{server:?}");
        }
        false => {
            for end in [client, server] {
                let Err(error @ Error::NoCryptography) = end else { panic!("{end:?}") };
                assert!(error.to_string().contains("enable the feature tls-ring"), "{error}");
            }
        }
    }
}
