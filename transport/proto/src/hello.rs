//! The private data of connect, accept and reject.
//!
//! rdma_cm carries at most 56 bytes with a connect request on InfiniBand and RoCE (rdma_connect(3))
//! and pads what it delivers, so every message contains its length. These bytes have room for the
//! settings of both sides. So no message follows to exchange settings, and a connection is complete
//! when it is established. The layouts, and how versions are negotiated, are in `docs/protocol.md`.

/// The lowest protocol version that this crate speaks.
pub const VERSION_MIN: u8 = 5;
/// The highest protocol version that this crate speaks.
pub const VERSION_MAX: u8 = 5;
/// Bytes of a hello and of an accept.
pub const HELLO_LEN: usize = 56;
/// Bytes of a reject.
pub const REJECT_LEN: usize = 16;

/// Allowed range of the limit on header blocks, in bytes.
pub const HEADERS: std::ops::RangeInclusive<u32> = 4096..=1 << 20;

/// Whether this is a valid alignment of landed payload. Landing memory itself is only page-aligned.
pub(crate) fn is_alignment(align: u16) -> bool {
    align.is_power_of_two() && align <= 4096
}

const MAGIC: [u8; 4] = *b"tRDM";

/// The settings of one side that the other side needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerSettings {
    /// Number of RECV slots posted at the start, which are the other side's first credits.
    pub recv_slots: u16,
    /// Maximum number of RECV slots, which bounds the credits that the other side may have.
    pub max_recvs: u16,
    /// Length in bytes of a full RECV slot, which limits the longest SEND.
    pub slot_size: u32,
    /// Bytes of each RECV slot posted at the start. At most `slot_size`.
    pub rest_slot_size: u32,
    /// Maximum number of streams that the other side may have open.
    pub max_streams: u32,
    /// Bytes of small messages that a stream may have unread, before WINDOW frames raise the limit.
    pub stream_window: u32,
    /// Maximum length of a header block in bytes.
    pub max_headers: u32,
    /// Alignment in landing memory, in bytes, that this side requires for a message's longest
    /// aligned segment.
    pub align: u16,
}

/// The client's connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest version that the client speaks.
    pub version_min: u8,
    /// Highest version that the client speaks.
    pub version_max: u8,
    /// The one-time ticket from the Offer.
    pub ticket: [u8; 16],
    /// The client's settings.
    pub settings: PeerSettings,
}

/// The server's reply when it accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    /// The version to be used.
    pub version: u8,
    /// The server's settings.
    pub settings: PeerSettings,
}

/// The server's reply when it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reject {
    /// The sides have no version in common.
    #[error("no common protocol version: the server speaks {min} to {max}")]
    Version {
        /// Lowest version of the server.
        min: u8,
        /// Highest version of the server.
        max: u8,
    },
    /// The ticket is unknown, used or expired.
    #[error("the ticket was not accepted (wrong, used or expired)")]
    Ticket,
    /// The ticket was withdrawn, because more tickets were outstanding than the server allows.
    #[error(
        "the ticket was withdrawn: more were outstanding than a server allows (open fewer channels \
         at a time)"
    )]
    TicketWithdrawn,
    /// The server has no memory or slots left for the connection.
    #[error("the server has no resources for another connection")]
    Resources,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server has reached its limit of connections.
    #[error("the server has as many connections as it allows (Server::max_connections)")]
    Connections,
    /// The server has reached its limit of connections being set up.
    #[error(
        "the server has as many connections in the making, and waiting for that, as it allows \
         (open fewer channels at a time)"
    )]
    Handshakes,
    /// The server already serves a bare connection, and allows one at a time.
    #[error("another diagnosis measures bare connections to the server")]
    Bare,
    /// The server is not allowed to create memory files.
    #[error(
        "the server may not make the memory files that shared memory needs (RLIMIT_FSIZE, or memfd_create(2) forbidden)"
    )]
    MemoryFiles,
    /// The server's process, or its host, has run out of a resource that a connection needs.
    #[error("a limit of the server's process allows no further connection (os error {errno})")]
    ProcessLimit {
        /// The error of the system call.
        errno: u16,
    },
    /// The hello is invalid.
    #[error("the server did not understand the hello")]
    Malformed,
    /// An unknown code.
    #[error("rejected with code {0}")]
    Other(u32),
}

/// Private data that is not a valid hello, accept or reject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The data does not begin with this protocol's magic bytes.
    #[error("private data of another protocol (no tonic-rdma magic in {0} bytes)")]
    Magic(usize),
    /// The data is truncated, or states a length that is wrong for its kind.
    #[error("private data of {received} bytes states a length of {stated}")]
    Length {
        /// Bytes received.
        received: usize,
        /// Length stated.
        stated: usize,
    },
    /// The kind is not the expected kind.
    #[error("private data of kind {0} where another was expected")]
    Kind(u8),
    /// The sides have no version in common.
    #[error(
        "peer speaks protocol versions {min} to {max}, this side {VERSION_MIN} to {VERSION_MAX}"
    )]
    Version {
        /// The peer's lowest version.
        min: u8,
        /// The peer's highest version.
        max: u8,
    },
    /// A setting outside its range.
    #[error("peer's {name} is {value}")]
    Setting {
        /// Name of the setting.
        name: &'static str,
        /// The refused value.
        value: u64,
    },
}

const KIND_HELLO: u8 = 1;
const KIND_ACCEPT: u8 = 2;
const KIND_REJECT: u8 = 3;
/// Lower half of the code of [`Reject::ProcessLimit`]. The upper half is the error number.
const PROCESS_LIMIT: u32 = 11;

fn le<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(src) = data.get(at..at + N) {
        out.copy_from_slice(src);
    }
    out
}

fn prefix(data: &[u8], kind: u8, len: usize) -> Result<&[u8], HelloError> {
    if data.get(..4) != Some(&MAGIC) {
        return Err(HelloError::Magic(data.len()));
    }
    let stated = data.get(4).copied().unwrap_or(0) as usize;
    if data.len() < 8 || stated < 8 || data.len() < stated {
        return Err(HelloError::Length { received: data.len(), stated });
    }
    if data[5] != kind {
        return Err(HelloError::Kind(data[5]));
    }
    let (min, max) = (data[6], data[7]);
    // A reject states the server's versions, which may have no version in common with this side.
    if kind != KIND_REJECT && (min > max || min > VERSION_MAX || max < VERSION_MIN) {
        return Err(HelloError::Version { min, max });
    }
    if stated != len {
        return Err(HelloError::Length { received: data.len(), stated });
    }
    Ok(&data[..len])
}

fn put(kind: u8, min: u8, max: u8, ticket: &[u8; 16], s: &PeerSettings) -> [u8; HELLO_LEN] {
    let mut out = [0; HELLO_LEN];
    out[..4].copy_from_slice(&MAGIC);
    out[4] = HELLO_LEN as u8;
    out[5] = kind;
    out[6] = min;
    out[7] = max;
    out[8..24].copy_from_slice(ticket);
    out[24..26].copy_from_slice(&s.recv_slots.to_le_bytes());
    out[26..28].copy_from_slice(&s.max_recvs.to_le_bytes());
    out[28..32].copy_from_slice(&s.slot_size.to_le_bytes());
    out[32..36].copy_from_slice(&s.max_streams.to_le_bytes());
    out[36..40].copy_from_slice(&s.stream_window.to_le_bytes());
    out[48..52].copy_from_slice(&s.max_headers.to_le_bytes());
    out[52..54].copy_from_slice(&s.align.to_le_bytes());
    out[54..56].copy_from_slice(&(s.rest_slot_size as u16).to_le_bytes());
    out
}

fn settings(data: &[u8]) -> Result<PeerSettings, HelloError> {
    let s = PeerSettings {
        recv_slots: u16::from_le_bytes(le(data, 24)),
        max_recvs: u16::from_le_bytes(le(data, 26)),
        slot_size: u32::from_le_bytes(le(data, 28)),
        rest_slot_size: u16::from_le_bytes(le(data, 54)).into(),
        max_streams: u32::from_le_bytes(le(data, 32)),
        stream_window: u32::from_le_bytes(le(data, 36)),
        max_headers: u32::from_le_bytes(le(data, 48)),
        align: u16::from_le_bytes(le(data, 52)),
    };
    let rule = |ok: bool, name, value: u64| {
        if ok { Ok(()) } else { Err(HelloError::Setting { name, value }) }
    };
    rule((4..=4096).contains(&s.recv_slots), "recv_slots", s.recv_slots.into())?;
    rule((s.recv_slots..=4096).contains(&s.max_recvs), "max_recvs", s.max_recvs.into())?;
    rule((512..=32_768).contains(&s.slot_size), "slot_size", s.slot_size.into())?;
    rule(
        (512..=s.slot_size).contains(&s.rest_slot_size),
        "rest_slot_size",
        s.rest_slot_size.into(),
    )?;
    // If the peer accepted no streams, every call would wait forever.
    rule(s.max_streams > 0, "max_streams", s.max_streams.into())?;
    rule(
        s.stream_window >= 4096 && s.stream_window <= i32::MAX as u32,
        "stream_window",
        s.stream_window.into(),
    )?;
    rule(HEADERS.contains(&s.max_headers), "max_headers", s.max_headers.into())?;
    rule(is_alignment(s.align), "align", s.align.into())?;
    Ok(s)
}

impl Hello {
    /// Creates a hello with this crate's versions.
    pub fn new(ticket: [u8; 16], settings: PeerSettings) -> Self {
        Hello { version_min: VERSION_MIN, version_max: VERSION_MAX, ticket, settings }
    }

    /// Encodes the private data of connect.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        put(KIND_HELLO, self.version_min, self.version_max, &self.ticket, &self.settings)
    }

    /// Decodes a hello from private data, which may be padded.
    ///
    /// # Errors
    /// The reason why the data is invalid.
    pub fn decode(data: &[u8]) -> Result<Self, HelloError> {
        let data = prefix(data, KIND_HELLO, HELLO_LEN)?;
        Ok(Hello {
            version_min: data[6],
            version_max: data[7],
            ticket: le(data, 8),
            settings: settings(data)?,
        })
    }

    /// The highest common version.
    pub fn version(&self) -> u8 {
        self.version_max.min(VERSION_MAX)
    }
}

impl Accept {
    /// Encodes the private data of accept.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        put(KIND_ACCEPT, self.version, self.version, &[0; 16], &self.settings)
    }

    /// Decodes an accept from private data, which may be padded.
    ///
    /// # Errors
    /// The reason why the data is invalid.
    pub fn decode(data: &[u8]) -> Result<Self, HelloError> {
        let data = prefix(data, KIND_ACCEPT, HELLO_LEN)?;
        if data[6] != data[7] {
            return Err(HelloError::Version { min: data[6], max: data[7] });
        }
        Ok(Accept { version: data[6], settings: settings(data)? })
    }
}

impl Reject {
    /// Encodes the private data of reject.
    pub fn encode(&self) -> [u8; REJECT_LEN] {
        let code: u32 = match *self {
            Reject::Version { .. } => 1,
            Reject::Ticket => 2,
            Reject::Resources => 3,
            Reject::ShuttingDown => 4,
            Reject::Malformed => 5,
            Reject::Connections => 6,
            Reject::Handshakes => 7,
            Reject::Bare => 8,
            Reject::MemoryFiles => 9,
            Reject::TicketWithdrawn => 10,
            Reject::ProcessLimit { errno } => PROCESS_LIMIT | u32::from(errno) << 16,
            Reject::Other(code) => code,
        };
        let mut out = [0; REJECT_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = REJECT_LEN as u8;
        out[5] = KIND_REJECT;
        out[6] = VERSION_MIN;
        out[7] = VERSION_MAX;
        out[8..12].copy_from_slice(&code.to_le_bytes());
        out
    }

    /// Decodes a reject from private data, which may be padded.
    ///
    /// # Errors
    /// The reason why the data is invalid.
    pub fn decode(data: &[u8]) -> Result<Self, HelloError> {
        let data = prefix(data, KIND_REJECT, REJECT_LEN)?;
        Ok(match u32::from_le_bytes(le(data, 8)) {
            1 => Reject::Version { min: data[6], max: data[7] },
            2 => Reject::Ticket,
            3 => Reject::Resources,
            4 => Reject::ShuttingDown,
            5 => Reject::Malformed,
            6 => Reject::Connections,
            7 => Reject::Handshakes,
            8 => Reject::Bare,
            9 => Reject::MemoryFiles,
            10 => Reject::TicketWithdrawn,
            code if code & 0xffff == PROCESS_LIMIT => {
                Reject::ProcessLimit { errno: (code >> 16) as u16 }
            }
            code => Reject::Other(code),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn hello() -> Hello {
        Hello::new([7; 16], Config::default().settings())
    }

    #[test]
    fn round_trips_with_padding() {
        let mut data = hello().encode().to_vec();
        data.extend([0; 40]);
        assert_eq!(Hello::decode(&data).unwrap(), hello());
        for align in [1, 2, 64, 4096] {
            let accept = Accept {
                version: VERSION_MAX,
                settings: PeerSettings { align, ..hello().settings },
            };
            assert_eq!(Accept::decode(&accept.encode()).unwrap(), accept);
        }
        for reject in [
            Reject::Ticket,
            Reject::Resources,
            Reject::ShuttingDown,
            Reject::Malformed,
            Reject::Connections,
            Reject::Handshakes,
            Reject::Bare,
            Reject::MemoryFiles,
            Reject::TicketWithdrawn,
            Reject::ProcessLimit { errno: 24 },
            Reject::Other(99),
        ] {
            assert_eq!(Reject::decode(&reject.encode()).unwrap(), reject);
        }
    }

    #[test]
    fn every_truncation_is_an_error() {
        let data = hello().encode();
        for len in 0..data.len() {
            assert!(Hello::decode(&data[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn names_what_is_wrong() {
        let mut data = hello().encode();
        data[0] = b'x';
        assert!(matches!(Hello::decode(&data), Err(HelloError::Magic(56))));
        let mut data = hello().encode();
        (data[6], data[7]) = (9, 12);
        assert_eq!(
            Hello::decode(&data).unwrap_err().to_string(),
            "peer speaks protocol versions 9 to 12, this side 5 to 5"
        );
        let mut data = hello().encode();
        data[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Hello::decode(&data).unwrap_err().to_string(), "peer's slot_size is 4294967295");
        for size in [511_u16, 8193] {
            let mut data = hello().encode();
            data[54..56].copy_from_slice(&size.to_le_bytes());
            assert_eq!(
                Hello::decode(&data).unwrap_err().to_string(),
                format!("peer's rest_slot_size is {size}")
            );
        }
        for align in [0, 3, 65, 8192, u16::MAX] {
            let mut data = hello().encode();
            data[52..54].copy_from_slice(&align.to_le_bytes());
            assert_eq!(
                Hello::decode(&data).unwrap_err().to_string(),
                format!("peer's align is {align}")
            );
        }
        let mut data = hello().encode();
        data[48..52].copy_from_slice(&4095_u32.to_le_bytes());
        assert_eq!(Hello::decode(&data).unwrap_err().to_string(), "peer's max_headers is 4095");
        let mut data = hello().encode();
        data[32..36].fill(0);
        assert_eq!(Hello::decode(&data).unwrap_err().to_string(), "peer's max_streams is 0");
        assert!(matches!(Accept::decode(&hello().encode()), Err(HelloError::Kind(1))));
    }

    #[test]
    fn a_newer_client_that_still_speaks_ours_is_understood() {
        let data = Hello { version_max: 200, ..hello() }.encode();
        assert_eq!(Hello::decode(&data).unwrap().version(), VERSION_MAX);
    }
}
