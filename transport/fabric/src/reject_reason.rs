//! The reasons that a connection manager gives when it rejects a connect request.

use std::fmt;

/// A reject reason of the connection manager for InfiniBand and RoCE (InfiniBand Architecture
/// Specification 1.3, section 12.6.7.2). iWARP has no reject reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectReason(i32);

impl RejectReason {
    /// The peer has no queue pair left.
    pub const NO_QUEUE_PAIR: RejectReason = RejectReason(1);
    /// The peer is out of resources.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// The peer's connection manager waited for a message from this end that did not arrive.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// Nobody listens on the port.
    pub const NO_SERVICE: RejectReason = RejectReason(8);
    /// The peer still has a connection to a queue pair with this number.
    pub const STALE: RejectReason = RejectReason(10);
    /// The peer cannot use the path MTU.
    pub const INVALID_MTU: RejectReason = RejectReason(26);
    /// The peer cannot have as many READs in flight as this end requests.
    pub const RESPONDER_RESOURCES: RejectReason = RejectReason(27);
    /// The peer's program rejected the request.
    pub const CONSUMER: RejectReason = RejectReason(28);

    /// Creates a reason from any number, even from a number that the specification does not define.
    pub fn new(number: i32) -> RejectReason {
        RejectReason(number)
    }

    /// Whether the peer has reached a limit of a resource.
    pub fn is_limit(self) -> bool {
        matches!(self, Self::NO_QUEUE_PAIR | Self::NO_RESOURCES | Self::RESPONDER_RESOURCES)
    }

    /// Whether the peer cannot use an attribute of the path, such as an address, a service level or
    /// a traffic class.
    pub fn is_of_path(self) -> bool {
        matches!(self.0, 12..=23 | 32 | 33)
    }

    /// The name in the specification, if the specification defines the number.
    pub fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "no queue pair available",
            2 => "no end-to-end context available",
            3 => "no resources available",
            4 => "timeout",
            5 => "unsupported request",
            6 => "invalid communication id",
            7 => "invalid communication instance",
            8 => "invalid service id",
            9 => "invalid transport service type",
            10 => "stale connection",
            11 => "reliable datagram domain does not exist",
            12 => "invalid GID",
            13 => "invalid LID",
            14 => "invalid service level",
            15 => "invalid traffic class",
            16 => "invalid hop limit",
            17 => "invalid packet rate",
            18 => "invalid alternate GID",
            19 => "invalid alternate LID",
            20 => "invalid alternate service level",
            21 => "invalid alternate traffic class",
            22 => "invalid alternate hop limit",
            23 => "invalid alternate packet rate",
            24 => "redirected to another port of the connection manager",
            25 => "redirected to another port",
            26 => "invalid path MTU",
            27 => "insufficient responder resources",
            28 => "consumer reject",
            29 => "invalid RNR retry count",
            30 => "duplicate local communication id",
            31 => "invalid class version",
            32 => "invalid flow label",
            33 => "invalid alternate flow label",
            _ => return None,
        })
    }

    /// Advice to an operator on how to cure the rejection.
    pub fn cure(self) -> &'static str {
        match self {
            Self::TIMEOUT => "it lost packets of this host, or is overloaded; try again",
            Self::STALE => "it forgets a connection that this host has lost; try again",
            Self::NO_SERVICE => "start the server",
            Self::INVALID_MTU => "give both ends the same MTU (`ip link set DEVICE mtu N`)",
            Self::CONSUMER => "look at the peer's log",
            _ if self.is_limit() => {
                "look at `rdma resource show` on its host, and at the limits of its device and cgroup (rdma.max)"
            }
            _ if self.is_of_path() => {
                "compare the GIDs of both devices (`rdma link`, the RoCE version of rdma_cm), the type of service, and the switches' partitions and service levels"
            }
            _ => "look at its kernel log, and compare the drivers of both ends",
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} (reject reason {})", self.0),
            None => write!(f, "reject reason {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_name_of_its_own_and_a_cure() {
        let names: Vec<_> =
            (0..40).filter_map(|n| Some((n, RejectReason::new(n).name()?))).collect();
        assert_eq!(names.iter().map(|(n, _)| *n).collect::<Vec<_>>(), (1..=33).collect::<Vec<_>>());
        for (n, name) in &names {
            assert_eq!(names.iter().filter(|(_, other)| other == name).count(), 1, "{name}");
            let reason = RejectReason::new(*n);
            assert_eq!(reason.to_string(), format!("{name} (reject reason {n})"));
            assert!(!reason.cure().is_empty());
        }
        assert_eq!(RejectReason::new(77).to_string(), "reject reason 77");
    }

    #[test]
    fn cures_differ_by_who_can_do_something() {
        let cure = |n| RejectReason::new(n).cure();
        assert!(cure(3).contains("rdma resource") && cure(27) == cure(1));
        assert!(cure(12).contains("GIDs") && cure(32) == cure(15));
        assert!(cure(26).contains("MTU"));
        assert!(cure(4).contains("try again") && cure(10).contains("try again"));
        assert!(cure(5).contains("kernel log"));
    }
}
