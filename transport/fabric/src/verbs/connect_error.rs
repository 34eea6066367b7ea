//! The errors of a connection attempt over verbs, on both sides.
//!
//! A device may be removed at any moment of an attempt. The call that is then in progress fails
//! with an error that depends on the call, the device and the kernel. Such errors become
//! [`FabricError::DeviceRemoved`], because neither the peer nor the network is at fault.

use std::io;

use crate::addr::Addr;
use crate::error::{ConnectError, ConnectStep, FabricError, LinkError};

/// The error of an attempt over `device` that has failed with `error`. `is_removed` is true if the
/// removal of the device is known.
pub(super) fn of_attempt(error: ConnectError, device: &str, is_removed: bool) -> ConnectError {
    let is_gone = match &error {
        // The peer has answered.
        ConnectError::Refused { .. }
        | ConnectError::Rejected { .. }
        | ConnectError::RejectedByManager { .. }
        | ConnectError::UnknownPathMtu { .. }
        // The caller is at fault.
        | ConnectError::PrivateDataTooLong { .. }
        | ConnectError::Config(_) => false,
        // The kernel may tell of the removal after a call has failed with this error.
        ConnectError::Failed { source, .. }
        | ConnectError::Fabric(FabricError::Verb { source, .. })
        | ConnectError::Fabric(FabricError::QueuePairRefused { source, .. })
            if source.raw_os_error() == Some(libc::ENODEV) =>
        {
            true
        }
        _ => is_removed,
    };
    match is_gone {
        true => FabricError::DeviceRemoved { device: device.to_owned() }.into(),
        false => error,
    }
}

/// The error of an attempt to connect to `addr` whose link has failed with `error` before the path
/// was proven.
pub(super) fn of_path_proof(addr: Addr, error: LinkError) -> ConnectError {
    let step = ConnectStep::LongPacket;
    match error {
        // The long message or its acknowledgement was lost, or the peer has lost the other long
        // message and has closed the connection.
        LinkError::Completion { .. } | LinkError::Disconnected { .. } => {
            ConnectError::LongPackets { addr, source: error.into() }
        }
        LinkError::DeviceRemoved { peer } => {
            FabricError::DeviceRemoved { device: peer.device }.into()
        }
        LinkError::Device { source, .. } if is_end_of_connection(&source) => {
            ConnectError::PeerGone { addr, step }
        }
        LinkError::Device { verb, source, peer } => {
            FabricError::Verb { verb, device: peer.device, source }.into()
        }
        LinkError::Closed { .. } | LinkError::Breach { .. } | LinkError::Misuse { .. } => {
            ConnectError::Failed { addr, step, source: io::Error::other(error).into() }
        }
    }
}

/// Whether a call failed because the connection has ended.
pub(super) fn is_end_of_connection(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::ENOTCONN | libc::ECONNABORTED))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::addr::PeerInfo;
    use crate::error::Verb;
    use crate::reject_reason::RejectReason;

    const NAME: &str = "mlx5_0";

    fn addr() -> Addr {
        Addr::Ip(([10, 0, 0, 1], 7).into())
    }

    fn peer() -> Box<PeerInfo> {
        let (local, remote) = (addr(), addr());
        let device = NAME.to_owned();
        Box::new(PeerInfo { provider: "verbs", device, local, remote, path_mtu: None })
    }

    fn os_error(errno: i32) -> Arc<io::Error> {
        Arc::new(io::Error::from_raw_os_error(errno))
    }

    fn is_device_removed(error: &ConnectError) -> bool {
        let ConnectError::Fabric(FabricError::DeviceRemoved { device }) = error else {
            return false;
        };
        assert_eq!(device, NAME);
        true
    }

    #[test]
    fn an_attempt_that_fails_because_the_device_is_gone_says_so() {
        let failed = |errno, step| {
            let source = os_error(errno);
            ConnectError::Failed { addr: addr(), step, source }
        };
        let verb = |errno| {
            let (verb, device) = (Verb::Call("rdma_accept"), NAME.to_owned());
            ConnectError::from(FabricError::Verb { verb, device, source: os_error(errno) })
        };
        let refused = |errno| {
            let (verb, device) = (Verb::Call("rdma_create_qp"), NAME.to_owned());
            let source = os_error(errno);
            ConnectError::from(FabricError::QueuePairRefused { device, verb, source })
        };
        for errno in [libc::ENODEV, libc::EIO, libc::EINVAL] {
            let errors = [
                failed(errno, ConnectStep::Connect),
                failed(errno, ConnectStep::LongPacket),
                verb(errno),
                refused(errno),
            ];
            for error in errors {
                let known = of_attempt(error.clone(), NAME, true);
                assert!(is_device_removed(&known), "{error}: {known}");
                // ENODEV is enough without an event.
                let unknown = of_attempt(error.clone(), NAME, false);
                assert_eq!(is_device_removed(&unknown), errno == libc::ENODEV, "{error}");
            }
        }
        let lost = LinkError::Disconnected { peer: peer() };
        let after = Duration::from_secs(1);
        let errors = [
            ConnectError::LongPackets { addr: addr(), source: lost.into() },
            ConnectError::Timeout { addr: addr(), step: ConnectStep::LongPacket, after },
            ConnectError::PeerGone { addr: addr(), step: ConnectStep::Accept },
            ConnectError::NotOnRdma { addr: addr() },
        ];
        for error in errors {
            let known = of_attempt(error.clone(), NAME, true);
            assert!(is_device_removed(&known), "{error}: {known}");
            assert_eq!(of_attempt(error.clone(), NAME, false).to_string(), error.to_string());
        }
    }

    #[test]
    fn what_the_peer_has_answered_stays() {
        let errors = [
            ConnectError::Rejected { addr: addr(), private_data: b"why".to_vec() },
            ConnectError::RejectedByManager { addr: addr(), reason: RejectReason::STALE },
            ConnectError::Refused { addr: addr() },
            ConnectError::UnknownPathMtu { addr: addr(), code: 9 },
            ConnectError::Config("the caller's".to_owned()),
        ];
        for error in errors {
            assert_eq!(of_attempt(error.clone(), NAME, true).to_string(), error.to_string());
        }
    }

    #[test]
    fn only_a_long_message_that_is_not_acknowledged_is_a_lost_long_packet() {
        let completion = LinkError::Completion {
            verb: Verb::Send,
            status: "transport retry counter exceeded".to_owned(),
            code: 12,
            vendor_err: 0,
            peer: peer(),
        };
        for error in [completion, LinkError::Disconnected { peer: peer() }] {
            let error = of_path_proof(addr(), error);
            assert!(matches!(error, ConnectError::LongPackets { .. }), "{error}");
        }
        let removed = of_path_proof(addr(), LinkError::DeviceRemoved { peer: peer() });
        assert!(is_device_removed(&removed), "{removed}");
        let device = |errno| {
            let (verb, source) = (Verb::Call("ibv_post_send"), os_error(errno));
            of_path_proof(addr(), LinkError::Device { verb, source, peer: peer() })
        };
        let refused = device(libc::EIO);
        let text = "ibv_post_send failed on mlx5_0: Input/output error (os error 5)";
        assert_eq!(refused.to_string(), text);
        assert!(is_device_removed(&of_attempt(refused, NAME, true)));
        assert!(is_device_removed(&of_attempt(device(libc::ENODEV), NAME, false)));
        // Soft-iWARP refuses work once its TCP connection has ended.
        let gone = device(libc::ENOTCONN);
        let step = ConnectStep::LongPacket;
        assert!(matches!(gone, ConnectError::PeerGone { step: s, .. } if s == step), "{gone}");
        let closed = of_path_proof(addr(), LinkError::Closed { peer: peer() });
        assert!(matches!(closed, ConnectError::Failed { step: s, .. } if s == step), "{closed}");
    }
}
