//! Converts fabric, memory and handshake errors to [`Reason`]s.

use std::io::{self, ErrorKind};

use tonic_rdma_fabric::{Addr, ConnectError, ConnectStep, FabricError, RejectReason};
use tonic_rdma_memory::{Memlock, PoolError, RegisterError};
use tonic_rdma_proto::Reject;

use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

pub(crate) fn fabric(error: FabricError) -> Reason {
    let code = match &error {
        FabricError::Platform => ReasonCode::Platform,
        FabricError::NoLibrary { .. }
        | FabricError::NoFunction { .. }
        | FabricError::NoConnectionManager { .. } => ReasonCode::NoRdmaCore,
        FabricError::NoDevice
        | FabricError::NoSuchDevice { .. }
        | FabricError::DeviceRemoved { .. } => ReasonCode::NoDevice,
        FabricError::NoActivePort { .. } | FabricError::NoCarrier { .. } => {
            ReasonCode::NoActivePort
        }
        FabricError::NoAddress { .. }
        | FabricError::NoIpoib { .. }
        | FabricError::NotOnRdma { .. }
        | FabricError::Moved { .. } => ReasonCode::NotOnRdmaDevice,
        // Some adapters' drivers pin the queues' memory.
        FabricError::QueuePairRefused { source, .. }
            if source.kind() == ErrorKind::OutOfMemory && is_limited() =>
        {
            return Reason::new(ReasonCode::Memlock, format!("{error}; {}", pinned()));
        }
        FabricError::Forked => ReasonCode::Forked,
        FabricError::MemoryFile { source, .. } => memory_file(source),
        FabricError::Shm { source, .. } if is_process_limit(source) => ReasonCode::ProcessLimit,
        FabricError::Shm { .. } => ReasonCode::NoSharedMemory,
        // A device that refuses any other call is as unusable as a device without queue pairs.
        _ => ReasonCode::QueuePairRefused,
    };
    Reason::new(code, error.to_string())
}

/// The reason if no thread is available for blocking work.
pub(crate) fn no_thread(error: io::Error) -> Reason {
    let code = match error.raw_os_error() {
        Some(_) => ReasonCode::ProcessLimit,
        None => ReasonCode::LinkLost,
    };
    Reason::new(code, format!("no thread: {error}"))
}

pub(crate) fn connect(error: ConnectError) -> Reason {
    let code = match error {
        ConnectError::Fabric(error) => return fabric(error),
        ConnectError::Memory(error) => return pool(&error),
        ConnectError::Rejected { addr, private_data } => return rejected(&addr, &private_data),
        ConnectError::RejectedByManager { reason, .. } => {
            return rejected_by_manager(reason, error.to_string());
        }
        ConnectError::NotWelcome { .. } => {
            return Reason::from_peer(ReasonCode::OtherUser, error.to_string());
        }
        ConnectError::OtherVersion { .. } => {
            return Reason::from_peer(ReasonCode::VersionMismatch, error.to_string());
        }
        ConnectError::PeerLimit { .. } => {
            return Reason::from_peer(ReasonCode::ProcessLimit, error.to_string());
        }
        ConnectError::UnknownPathMtu { .. } => {
            return Reason::from_peer(ReasonCode::HandshakeRejected, error.to_string());
        }
        ConnectError::NotAllowed { .. } => ReasonCode::OtherUser,
        ConnectError::Failed { ref source, .. } if is_process_limit(source) => {
            ReasonCode::ProcessLimit
        }
        ConnectError::LongPackets { .. }
        | ConnectError::Timeout { step: ConnectStep::LongPacket, .. } => {
            ReasonCode::LargePacketsLost
        }
        ConnectError::Timeout { .. } => ReasonCode::HandshakeTimeout,
        ConnectError::NoRoute { .. } => ReasonCode::NoRoute,
        ConnectError::NotOnRdma { .. } | ConnectError::OtherDevice { .. } => {
            ReasonCode::NotOnRdmaDevice
        }
        _ => ReasonCode::HandshakeRejected,
    };
    Reason::new(code, error.to_string())
}

/// Returns the reason for a rejection by the peer's connection manager, which does not ask the
/// peer's program. The reason counts as this side's, because the peer's program has not seen the
/// ticket. So the attempt uses the ticket for the next address. If the peer timed out, its program
/// may have taken the ticket. This function then returns
/// [`HandshakeTimeout`](ReasonCode::HandshakeTimeout), and the attempt drops the ticket.
fn rejected_by_manager(reason: RejectReason, detail: String) -> Reason {
    match reason {
        RejectReason::TIMEOUT => Reason::new(ReasonCode::HandshakeTimeout, detail).passing(),
        RejectReason::STALE => Reason::new(ReasonCode::HandshakeRejected, detail).passing(),
        RejectReason::INVALID_MTU => Reason::new(ReasonCode::LargePacketsLost, detail),
        reason if reason.is_limit() => Reason::new(ReasonCode::LimitReached, detail),
        reason if reason.is_of_path() => Reason::new(ReasonCode::NoRoute, detail),
        _ => Reason::new(ReasonCode::HandshakeRejected, detail),
    }
}

/// Whether the process or the host has used up a resource.
fn is_process_limit(error: &std::io::Error) -> bool {
    // The numbers are EMFILE, ENFILE, EFBIG and ENOMEM.
    matches!(error.raw_os_error(), Some(24 | 23 | 27 | 12))
}

/// Whether RLIMIT_MEMLOCK applies to the process.
fn is_limited() -> bool {
    Memlock::read().is_ok_and(|memlock| memlock.available(false).is_some())
}

/// Returns the code for an error of a memory file, which is either forbidden permanently or not
/// available now.
fn memory_file(error: &std::io::Error) -> ReasonCode {
    match error.kind() {
        ErrorKind::FileTooLarge | ErrorKind::PermissionDenied | ErrorKind::Unsupported => {
            ReasonCode::MemoryFiles
        }
        // The process is out of descriptors or memory.
        _ => ReasonCode::ProcessLimit,
    }
}

/// How much the process has pinned, and how much it may pin.
fn pinned() -> String {
    Memlock::read().map_or_else(
        |error| error.to_string(),
        |Memlock { soft, pinned, .. }| {
            let limit = soft.map_or("unlimited".to_owned(), |soft| format!("{soft} bytes"));
            format!("{pinned} bytes are pinned, and RLIMIT_MEMLOCK is {limit}")
        },
    )
}

fn rejected(addr: &Addr, private_data: &[u8]) -> Reason {
    match Reject::decode(private_data) {
        Ok(reject) => {
            let code = match reject {
                Reject::Version { .. } => ReasonCode::VersionMismatch,
                Reject::Resources => ReasonCode::PoolExhausted,
                Reject::Connections
                | Reject::Handshakes
                | Reject::TicketWithdrawn
                | Reject::Bare => ReasonCode::LimitReached,
                Reject::MemoryFiles => ReasonCode::MemoryFiles,
                Reject::ProcessLimit { .. } => ReasonCode::ProcessLimit,
                Reject::ShuttingDown => ReasonCode::GoAway,
                _ => ReasonCode::HandshakeRejected,
            };
            let reason = Reason::from_peer(code, format!("{reject} ({addr})"));
            match reject {
                Reject::Handshakes | Reject::TicketWithdrawn => reason.passing(),
                _ => reason,
            }
        }
        Err(_) => Reason::from_peer(
            ReasonCode::HandshakeRejected,
            format!("{addr} rejected the connection without a known cause"),
        ),
    }
}

/// Selects the reason to report if several fabrics have a reason, and appends the other reasons.
/// `met` contains the fabrics over which this peer was reached. These fabrics come before the
/// fabrics that could not be tried, because calls could use the reached fabrics if the causes were
/// fixed. Within each group, RDMA comes first, because its cause can be fixed.
pub(crate) fn foremost(mut reasons: Vec<(Path, Reason)>, met: &[Path]) -> Option<Reason> {
    let of = |path: &Path| (!met.contains(path), *path != Path::Verbs);
    let (first, _) = reasons.iter().enumerate().min_by_key(|(_, (path, _))| of(path))?;
    let (_, mut reason) = reasons.remove(first);
    for (path, other) in reasons {
        reason = reason.and(&format!("{path}: {other}"));
    }
    Some(reason)
}

pub(crate) fn pool(error: &PoolError) -> Reason {
    let code = match error {
        PoolError::Memlock { .. } => ReasonCode::Memlock,
        PoolError::File { source, .. } => memory_file(source),
        PoolError::Register(error) => return landing(error, ReasonCode::QueuePairRefused),
        _ => ReasonCode::PoolExhausted,
    };
    Reason::new(code, error.to_string())
}

/// The reason if memory cannot be registered. `refused` is the code if a device refuses.
pub(crate) fn landing(error: &RegisterError, refused: ReasonCode) -> Reason {
    let code = match error.io().kind() {
        ErrorKind::FileTooLarge => ReasonCode::MemoryFiles,
        _ if error.is_unmapped() => ReasonCode::ProcessLimit,
        // The kernel reports this error if the limit is reached in spite of the check.
        ErrorKind::OutOfMemory => ReasonCode::Memlock,
        _ => refused,
    };
    Reason::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_manager_that_rejects_is_told_with_its_reason_and_spends_no_ticket() {
        use ReasonCode::*;
        for (number, code, passes) in [
            (1, LimitReached, false),
            (3, LimitReached, false),
            (4, HandshakeTimeout, true),
            (5, HandshakeRejected, false),
            (10, HandshakeRejected, true),
            (12, NoRoute, false),
            (26, LargePacketsLost, false),
            (27, LimitReached, false),
            (32, NoRoute, false),
            (99, HandshakeRejected, false),
        ] {
            let addr = Addr::Ip(([10, 0, 0, 1], 7).into());
            let by = RejectReason::new(number);
            let reason = connect(ConnectError::RejectedByManager { addr, reason: by });
            assert_eq!((reason.code(), reason.passes()), (code, passes), "{reason}");
            assert_eq!(reason.side(), crate::path::reason::Side::Local, "{reason}");
            assert!(reason.detail().contains(&by.to_string()), "{reason}");
        }
    }

    #[test]
    fn an_interface_without_a_carrier_is_named() {
        let (device, interface) = ("mlx5_0".to_owned(), "eth0".to_owned());
        let reason = fabric(FabricError::NoCarrier { device, interface });
        assert_eq!(reason.code(), ReasonCode::NoActivePort, "{reason}");
        assert!(reason.detail().starts_with("interface eth0 of RDMA device mlx5_0"), "{reason}");
    }

    #[test]
    fn a_processor_without_bindings_is_told_those_that_have_them() {
        let reason = fabric(FabricError::Platform);
        assert_eq!(reason.code(), ReasonCode::Platform, "{reason}");
        for text in [reason.detail(), reason.cure()] {
            assert!(text.contains("Linux on x86-64 or AArch64"), "{text}");
        }
    }

    /// The channel treats `no-device` like every missing device: it is the rail's fault.
    #[test]
    fn a_device_that_is_removed_while_a_connection_is_made_is_no_device() {
        let removed = || FabricError::DeviceRemoved { device: "mlx5_0".to_owned() };
        let reason = connect(removed().into());
        assert_eq!(reason.code(), ReasonCode::NoDevice, "{reason}");
        assert_eq!(reason.detail(), removed().to_string());
        let addr = || Addr::Ip(([10, 0, 0, 1], 7).into());
        let peer = Box::new(tonic_rdma_fabric::PeerInfo {
            provider: "verbs",
            device: "mlx5_0".to_owned(),
            local: addr(),
            remote: addr(),
            path_mtu: None,
        });
        let source = tonic_rdma_fabric::LinkError::Disconnected { peer }.into();
        let reason = connect(ConnectError::LongPackets { addr: addr(), source });
        assert_eq!(reason.code(), ReasonCode::LargePacketsLost, "{reason}");
    }

    #[test]
    fn another_version_of_shared_memory_is_named_as_such() {
        let addr = Addr::Process(7);
        let reason = connect(ConnectError::OtherVersion { addr, version: 3, own: 4 });
        assert_eq!(reason.code(), ReasonCode::VersionMismatch);
        assert!(reason.to_string().contains("has version 3"), "{reason}");
    }

    /// If the memlock limit applies to this process, ENOMEM for an adapter's queues means that the
    /// queues exceed the limit. Otherwise it means that memory is scarce.
    #[test]
    fn queues_that_exceed_the_limit_on_pinned_memory_are_told_so() {
        let refused = |errno| FabricError::QueuePairRefused {
            device: "mlx5_0".to_owned(),
            verb: tonic_rdma_fabric::Verb::Call("rdma_create_qp"),
            source: std::sync::Arc::new(std::io::Error::from_raw_os_error(errno)),
        };
        const ENOMEM: i32 = 12;
        const EPERM: i32 = 1;
        let reason = fabric(refused(ENOMEM));
        let limited = is_limited();
        let code = if limited { ReasonCode::Memlock } else { ReasonCode::QueuePairRefused };
        assert_eq!(reason.code(), code);
        assert_eq!(reason.detail().contains("RLIMIT_MEMLOCK is "), limited, "{reason}");
        assert_eq!(fabric(refused(EPERM)).code(), ReasonCode::QueuePairRefused);
    }

    #[test]
    fn who_was_met_comes_before_what_could_not_be_tried_and_rdma_first() {
        let reason = |path: Path, code| (path, Reason::new(code, "why"));
        let shm = reason(Path::Shm, ReasonCode::OtherUser);
        let code = |reasons: &[(Path, Reason)], met: &[Path]| {
            foremost(reasons.to_vec(), met).unwrap().code()
        };
        let absent = [shm.clone(), reason(Path::Verbs, ReasonCode::NoDevice)];
        assert_eq!(code(&absent, &[Path::Shm]), ReasonCode::OtherUser);
        assert_eq!(code(&absent, &[]), ReasonCode::NoDevice);
        let late = [shm.clone(), reason(Path::Verbs, ReasonCode::HandshakeTimeout)];
        assert_eq!(code(&late, &[Path::Shm, Path::Verbs]), ReasonCode::HandshakeTimeout);
        assert_eq!(code(&[shm], &[]), ReasonCode::OtherUser);
        let both = foremost(absent.to_vec(), &[Path::Shm]).unwrap().to_string();
        assert_eq!(both, "other-user: why; verbs: no-device: why");
        assert_eq!(foremost(Vec::new(), &[]), None);
    }
}
