//! Why a channel or a server is not on the fast path. Also escapes and shortens the texts of peers.

use std::fmt::{self, Write};

/// The kind of cause for which calls go over TCP. Codes are stable, so programs can match on them
/// and alerts can use them. [`cure`](ReasonCode::cure) says what to do.
///
/// Every decision for TCP has a code, is logged once with its cure, and is available from
/// [`Channel::path`](crate::Channel::path). [`as_str`](ReasonCode::as_str) returns the form in logs
/// and on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReasonCode {
    /// Switched off by `TONIC_RDMA=off`, by [`Policy::Off`](crate::Policy::Off), or by the choice
    /// of fabrics: no fabric is allowed, or RDMA is needed and not allowed.
    Policy,
    /// The Offer was answered as an unknown method, because the server is a stock gRPC server or a
    /// proxy is in between.
    PeerNotCapable,
    /// A layer, an HTTP route or a proxy answered the Offer instead of the server's service.
    OfferIntercepted,
    /// The server cannot confirm the address of the client's end of the TCP connection, usually
    /// because an HTTP gateway or a translation of source addresses is in between.
    ThroughGateway,
    /// libibverbs or librdmacm cannot be loaded or lacks a function, or the kernel's connection
    /// manager cannot be used.
    NoRdmaCore,
    /// This host has no RDMA device, or lacks the device that `TONIC_RDMA_DEVICE` or
    /// [`ContextBuilder::device`](crate::ContextBuilder::device) names, or the device was removed.
    NoDevice,
    /// This host has devices, but no active port, or the device's interface has no carrier.
    NoActivePort,
    /// The address in question does not belong to an RDMA device.
    NotOnRdmaDevice,
    /// RLIMIT_MEMLOCK is too low to pin the smallest useful pool.
    Memlock,
    /// A device is listed, but this process may not open it, or the device refuses an object that a
    /// connection needs, such as a queue pair.
    QueuePairRefused,
    /// One end has no route to the other end's RDMA address.
    NoRoute,
    /// The fast path was not established in time.
    HandshakeTimeout,
    /// The peer refused the Offer, the ticket or the connection, or its answer makes no sense, or
    /// the hook of [`Endpoint::offer_metadata`](crate::Endpoint::offer_metadata) failed.
    HandshakeRejected,
    /// The two sides have no version of the control protocol in common.
    VersionMismatch,
    /// The fast path was up and has failed.
    LinkLost,
    /// The server runs on another host, so it cannot share memory. For a server on this host, but
    /// in another network namespace, the code is [`HandshakeRejected`](Self::HandshakeRejected).
    OtherHost,
    /// The server runs as another user, and the [`ShmAccess`](crate::ShmAccess) of one end does not
    /// allow memory to be shared with the other end.
    OtherUser,
    /// The Offer came over TLS, RDMA is not encrypted, and one end has not agreed to plain text.
    /// See [`Endpoint::plaintext_rdma`](crate::Endpoint::plaintext_rdma).
    NotEncrypted,
    /// No pinned memory is left for another connection.
    PoolExhausted,
    /// One end cannot create the memory files for shared memory: RLIMIT_FSIZE is too low, or a
    /// system call filter forbids memfd_create(2).
    MemoryFiles,
    /// The system does not let one end share memory: the boot ID in /proc cannot be read, or Unix
    /// sockets are forbidden.
    NoSharedMemory,
    /// RDMA belongs to this process's parent, which used RDMA before it forked.
    Forked,
    /// RDMA is not available on this operating system, on this processor, or in this build (without
    /// the feature `verbs`).
    Platform,
    /// The fast path is being set up. Calls go over TCP until the fast path is up.
    Pending,
    /// One end closed the fast path gracefully, for example because that end shuts down, or because
    /// the connection has reached its maximum age.
    GoAway,
    /// The Offer did not reach the server: TCP is down as well.
    PeerUnreachable,
    /// One end has reached its limit of concurrent connections, handshakes or Offers.
    LimitReached,
    /// One end's process or host has reached a limit of descriptors, threads, address space, or the
    /// length of files. So this end cannot make a connection, or has no memory for long messages to
    /// land in. The text names the system or library function that failed, and its error.
    ProcessLimit,
    /// The path carries short packets but loses packets of full length, because the MTU of an end
    /// or a switch is too small. Calls with more bytes than a packet holds would fail.
    LargePacketsLost,
}

impl ReasonCode {
    /// Every code.
    pub const ALL: [ReasonCode; 29] = [
        Self::Policy,
        Self::PeerNotCapable,
        Self::OfferIntercepted,
        Self::ThroughGateway,
        Self::NoRdmaCore,
        Self::NoDevice,
        Self::NoActivePort,
        Self::NotOnRdmaDevice,
        Self::Memlock,
        Self::QueuePairRefused,
        Self::NoRoute,
        Self::HandshakeTimeout,
        Self::HandshakeRejected,
        Self::VersionMismatch,
        Self::LinkLost,
        Self::OtherHost,
        Self::OtherUser,
        Self::NotEncrypted,
        Self::PoolExhausted,
        Self::MemoryFiles,
        Self::NoSharedMemory,
        Self::Forked,
        Self::Platform,
        Self::Pending,
        Self::GoAway,
        Self::PeerUnreachable,
        Self::LimitReached,
        Self::ProcessLimit,
        Self::LargePacketsLost,
    ];

    /// Returns the code as it is logged and sent, for example `no-device`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::PeerNotCapable => "peer-not-capable",
            Self::OfferIntercepted => "offer-intercepted",
            Self::ThroughGateway => "through-gateway",
            Self::NoRdmaCore => "no-rdma-core",
            Self::NoDevice => "no-device",
            Self::NoActivePort => "no-active-port",
            Self::NotOnRdmaDevice => "not-on-rdma-device",
            Self::Memlock => "memlock",
            Self::QueuePairRefused => "queue-pair-refused",
            Self::NoRoute => "no-route",
            Self::HandshakeTimeout => "handshake-timeout",
            Self::HandshakeRejected => "handshake-rejected",
            Self::VersionMismatch => "version-mismatch",
            Self::LinkLost => "link-lost",
            Self::OtherHost => "other-host",
            Self::OtherUser => "other-user",
            Self::NotEncrypted => "not-encrypted",
            Self::PoolExhausted => "pool-exhausted",
            Self::MemoryFiles => "memory-files",
            Self::NoSharedMemory => "no-shared-memory",
            Self::Forked => "forked",
            Self::Platform => "platform",
            Self::Pending => "pending",
            Self::GoAway => "go-away",
            Self::PeerUnreachable => "peer-unreachable",
            Self::LimitReached => "limit-reached",
            Self::ProcessLimit => "process-limit",
            Self::LargePacketsLost => "large-packets-lost",
        }
    }

    /// Returns the code with this name, or `None`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.as_str() == name)
    }

    /// Whether the cause may resolve without intervention, so that an early retry is useful.
    pub(crate) fn is_transient(self) -> bool {
        match self {
            Self::LinkLost
            | Self::GoAway
            | Self::NoRoute
            | Self::HandshakeTimeout
            | Self::HandshakeRejected
            | Self::PoolExhausted
            | Self::PeerUnreachable
            | Self::LimitReached
            | Self::ProcessLimit
            | Self::Pending => true,
            Self::Policy
            | Self::PeerNotCapable
            | Self::OfferIntercepted
            | Self::ThroughGateway
            | Self::NoRdmaCore
            | Self::NoDevice
            | Self::NoActivePort
            | Self::NotOnRdmaDevice
            | Self::Memlock
            | Self::QueuePairRefused
            | Self::VersionMismatch
            | Self::OtherHost
            | Self::OtherUser
            | Self::NotEncrypted
            | Self::LargePacketsLost
            | Self::MemoryFiles
            | Self::NoSharedMemory
            | Self::Forked
            | Self::Platform => false,
        }
    }

    /// Returns what to do about the cause, in one sentence.
    pub fn cure(self) -> &'static str {
        match self {
            Self::Policy => {
                "unset TONIC_RDMA (or set it to `auto`), use Policy::Auto, and build with the \
                 feature `verbs`"
            }
            Self::PeerNotCapable => {
                "serve with tonic_rdma::Server, and connect to it directly, not through an HTTP gateway"
            }
            Self::OfferIntercepted => {
                "let POST /tonic_rdma.v1.Bootstrap/Offer pass through the server's layers, \
                 routes and proxies (tonic_rdma::server::is_offer recognises it)"
            }
            Self::ThroughGateway => {
                "connect to the server directly, without HTTP gateway and source address translation, or \
                 let it serve their clients without addresses and certificates \
                 (Server::offer_through_gateways)"
            }
            Self::NoRdmaCore => "install rdma-core (libibverbs1, librdmacm1, ibverbs-providers)",
            Self::NoDevice => {
                "check `rdma link` (Soft-RoCE, if the kernel has it: `rdma link add rxe0 type rxe netdev eth0`), that \
                 /dev/infiniband is visible in the container, and TONIC_RDMA_DEVICE"
            }
            Self::NoActivePort => "bring up the RDMA device's network interface",
            Self::NotOnRdmaDevice => {
                "use an address of an interface that has an RDMA device (InfiniBand: of its IPoIB interface)"
            }
            Self::Memlock => {
                "raise the limit: `ulimit -l`, LimitMEMLOCK= in the systemd unit, or `--ulimit \
                 memlock=` for the container"
            }
            Self::QueuePairRefused => {
                "check the device's limits and permissions (/dev/infiniband/uverbs*, rdma \
                 cgroup); a device without reliable connections, such as AWS EFA, cannot be used"
            }
            Self::NoRoute => "check routing and firewall between the two RDMA addresses",
            Self::HandshakeTimeout => {
                "look at the server's log; raise Endpoint::fast_path_timeout if it is only slow"
            }
            Self::HandshakeRejected => "look at the server's log for the cause",
            Self::VersionMismatch => "upgrade the older of the two sides",
            Self::LinkLost => "nothing: the channel tries again by itself",
            Self::OtherHost => {
                "nothing, if this is intended: memory is shared only on one host, within one \
                 network namespace"
            }
            Self::OtherUser => {
                "run client and server as the same user, or name the other user in ContextBuilder::shm_access at the \
                 end that refuses"
            }
            Self::NotEncrypted => {
                "nothing, if the network is not trusted; else let both programs say that their calls may go \
                 over RDMA in plain text (plaintext_rdma(true) on Endpoint and Server)"
            }
            Self::PoolExhausted => {
                "give the pool more memory (PoolConfig, TONIC_RDMA_POOL), or close connections"
            }
            Self::MemoryFiles => {
                "raise the limit (`ulimit -f unlimited`, LimitFSIZE=infinity in the systemd unit, `docker run --ulimit \
                 fsize=-1`), and let the system call filter (seccomp) allow memfd_create"
            }
            Self::NoSharedMemory => {
                "mount all of /proc (no ProcSubset=pid in the systemd unit), and let the sandbox allow Unix sockets \
                 (seccomp, RestrictAddressFamilies)"
            }
            Self::Forked => {
                "fork before the first channel or server uses RDMA, or let the child execute a program"
            }
            Self::Platform => {
                "run on Linux on x86-64 or AArch64, and build with the feature `verbs`"
            }
            Self::Pending => "nothing: wait for Channel::path_changed",
            Self::GoAway => "nothing: the channel tries again by itself",
            Self::PeerUnreachable => {
                "start the server, and check address, routes and firewall of its TCP port"
            }
            Self::LimitReached => {
                "nothing, if it is temporary: the channel tries again; otherwise open fewer \
                 channels, or raise the server's limit of connections (max_connections)"
            }
            Self::LargePacketsLost => {
                "give both ends and the switches between them the same MTU (`ip link set DEVICE mtu N`), and look \
                 with `ping -M do -s N` from which length on packets are lost"
            }
            Self::ProcessLimit => {
                "raise the limit that the error names: EMFILE `ulimit -n`, ENOMEM and EAGAIN \
                 `ulimit -v`, \
                 EFBIG `ulimit -f` (LimitNOFILE=, LimitAS=, LimitFSIZE= in the systemd unit); the channel tries again by itself"
            }
        }
    }
}

impl fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The end that a [`Reason`] refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// This process.
    Local,
    /// The other end of the connection, which gave the reason in its answer to the Offer or in its
    /// rejection of the connection.
    Peer,
}

/// Why calls use TCP instead of the fast path: a code and the details.
///
/// Displays as `memlock: needed 2359296 bytes, limit 65536`, with `peer: ` in front if the other
/// end is the cause. `Reason` is an error type. [`Reason::of`] finds it in the error of an endpoint
/// that [requires](crate::Endpoint::require_rdma) a fast path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    code: ReasonCode,
    side: Side,
    detail: String,
    /// Whether the reason is a temporary limit, so that another attempt may succeed immediately.
    passes: bool,
}

impl Reason {
    /// A reason that this end has found.
    pub fn new(code: ReasonCode, detail: impl Into<String>) -> Self {
        Self { code, side: Side::Local, detail: detail.into(), passes: false }
    }

    /// A reason that the peer gave.
    pub fn from_peer(code: ReasonCode, detail: impl Into<String>) -> Self {
        Self { code, side: Side::Peer, detail: detail.into(), passes: false }
    }

    /// Marks the reason as a temporary limit.
    pub(crate) fn passing(mut self) -> Self {
        self.passes = true;
        self
    }

    /// Whether the reason is a temporary limit, so that waiting is useful.
    pub(crate) fn passes(&self) -> bool {
        self.passes
    }

    /// Appends `more` to the details.
    pub(crate) fn and(mut self, more: &str) -> Self {
        if !self.detail.is_empty() {
            self.detail.push_str("; ");
        }
        self.detail.push_str(more);
        self
    }

    /// The kind of cause.
    pub fn code(&self) -> ReasonCode {
        self.code
    }

    /// The end that is the cause.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The details: numbers, addresses, names.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Returns one sentence that says what to do about the cause.
    pub fn cure(&self) -> &'static str {
        self.code.cure()
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.side == Side::Peer {
            f.write_str("peer: ")?;
        }
        f.write_str(self.code.as_str())?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Reason {}

/// Maximum characters of a peer's text in a log line.
pub(crate) const MAX_LOG_TEXT: usize = 80;
/// Maximum characters of a peer's text in a reason's details.
pub(crate) const MAX_DETAIL_TEXT: usize = 512;

/// Displays a peer's text, up to the given number of characters. Every character that is not
/// printable is escaped, so a peer can neither begin a new log line nor move a terminal's cursor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerText<'a>(pub(crate) &'a str, pub(crate) usize);

impl fmt::Display for PeerText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PeerText(text, most) = *self;
        let mut left = most;
        for char in text.chars() {
            // Quotes and backslashes need no escape, because they are harmless in log lines.
            let is_plain = matches!(char, '"' | '\'' | '\\');
            let escaped = char.escape_debug();
            let len = if is_plain { 1 } else { escaped.len() };
            let Some(rest) = left.checked_sub(len) else { return f.write_str("...") };
            left = rest;
            match is_plain {
                true => f.write_char(char)?,
                false => write!(f, "{escaped}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_name_of_its_own_that_reads_back() {
        for code in ReasonCode::ALL {
            assert_eq!(ReasonCode::from_name(code.as_str()), Some(code));
            assert!(!code.cure().is_empty());
        }
        assert_eq!(ReasonCode::from_name("Memlock"), None);
    }

    #[test]
    fn display_names_side_code_and_detail() {
        let local = Reason::new(ReasonCode::Memlock, "needed 2, limit 1");
        assert_eq!(local.to_string(), "memlock: needed 2, limit 1");
        let peer = Reason::from_peer(ReasonCode::NoDevice, "");
        assert_eq!(peer.to_string(), "peer: no-device");
    }

    #[test]
    fn a_text_is_cut_and_escaped() {
        let shown = |text: &str, most| PeerText(text, most).to_string();
        assert_eq!(shown("it's \"fine\": C:\\x \u{fc}", 80), "it's \"fine\": C:\\x \u{fc}");
        let evil = "ok\nWARN forged\r\u{1b}[2J\u{202e}\0";
        assert_eq!(shown(evil, 80), r"ok\nWARN forged\r\u{1b}[2J\u{202e}\0");
        assert_eq!(shown(&"\u{1f980}".repeat(300), 80), "\u{1f980}".repeat(80) + "...");
        // An escape is written completely or not at all.
        assert_eq!(shown("abc\u{1b}", 8), "abc...");
        for most in 0..40 {
            let (short, cut) = (shown(evil, most), shown(&"\n".repeat(99), most));
            assert!(short.len() <= most + 3 && cut.len() <= most + 3);
            assert!(!short.chars().chain(cut.chars()).any(char::is_control));
        }
    }
}
