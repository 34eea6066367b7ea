//! TLS in a program whose features choose no cryptography, or two. With none, TLS gives an error
//! that names the cure. With two, only the invalid identity is an error. Neither panics.

use tonic_rdma::{Cause, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};

fn main() {
    let client = Endpoint::from_static("https://localhost:1").tls_config(ClientTlsConfig::new());
    // There is no certificate either, but without cryptography it is never read.
    let identity = Identity::from_pem("", "");
    let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity));
    let (client, server) = (client.map(drop), server.map(drop));
    match cfg!(feature = "both") {
        true => {
            assert!(client.is_ok(), "{client:?}");
            let error = server.unwrap_err();
            assert!(Cause::of(&error).is_none(), "{error:?}");
        }
        false => {
            for end in [client, server] {
                let error = end.unwrap_err();
                let cause = Cause::of(&error).expect("a cause");
                assert!(matches!(cause, Cause::NoCryptography), "{cause:?}");
                assert!(cause.cure().contains("enable the feature tls-ring"), "{cause:?}");
            }
        }
    }
}
