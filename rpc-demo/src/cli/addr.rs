//! Addresses to listen on, on the command line.

use std::net::{SocketAddr, ToSocketAddrs};

/// Parses an address such as `127.0.0.1:50051`, `[::1]:50051` or `localhost:50051`. Resolves a host
/// name. If the name has several addresses, the first IPv4 address is chosen, because clients use
/// an IPv4 address by default.
pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let port = text.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>()));
    let Some((host, Ok(_))) = port.filter(|(host, _)| !host.is_empty()) else {
        return Err(
            "it must be an address or a host name with a port, such as 127.0.0.1:50051".into()
        );
    };
    let found: Vec<_> = text
        .to_socket_addrs()
        .map_err(|error| format!("the host name '{host}' cannot be resolved: {error}"))?
        .collect();
    let first = found.iter().find(|addr| addr.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| format!("the host name '{host}' has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_addresses_and_names() {
        for text in ["127.0.0.1:0", "[::1]:50051", "10.0.0.1:1"] {
            assert_eq!(listen(text).unwrap(), text.parse().unwrap());
        }
        let local = listen("localhost:50051").unwrap();
        assert!(local.ip().is_loopback() && local.port() == 50051, "{local}");
    }

    #[test]
    fn says_what_is_wrong() {
        for text in ["localhost", ":50051", "127.0.0.1:65536", "127.0.0.1:", ""] {
            assert!(listen(text).unwrap_err().contains("such as 127.0.0.1:50051"), "{text}");
        }
        let unknown = listen("no-such-host.invalid:50051").unwrap_err();
        assert!(unknown.contains("'no-such-host.invalid' cannot be resolved"), "{unknown}");
    }
}
