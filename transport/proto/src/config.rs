//! Limits and sizes of a connection.

use std::time::Duration;

use crate::frame::{FRAME_HEADER, LENT_MESSAGE, MAX_HEADER_BLOCK, MESSAGE_HEADER};
use crate::hello::{HEADERS, PeerSettings, is_alignment};
use crate::payload::Payload;

/// How this side learns that the peer's end of the link is gone (R24). No variant involves the
/// peer's process, because that process may pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The link always reports that the peer's end is gone, so no probes are sent.
    Told,
    /// This side sends [probes](crate::Event::Probe). The peer's end counts as gone if a probe
    /// stays unanswered for this time, or if the link reports earlier that a probe was not
    /// acknowledged.
    Asked(Duration),
}

/// How long a probe may stay unanswered, unless the link states another time. The limit is three
/// times the silence after which a side sends a probe.
const PROBE_LIMIT: Duration = Duration::from_millis(3750);

/// A keep-alive like HTTP/2's: the peer's process has to answer the PINGs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// A PING is sent after this time without a message. A time of more than a day counts as a day.
    pub interval: Duration,
    /// The peer counts as dead if neither the answer nor another message arrives within this time.
    /// A time of more than a day counts as a day.
    pub timeout: Duration,
    /// PINGs are also sent while no stream is open.
    pub while_idle: bool,
}

impl KeepAlive {
    /// Limits both times to a day, so that timers can represent them.
    pub(crate) fn within_a_day(self) -> Self {
        let day = Duration::from_millis(DAY_MS);
        let (interval, timeout) = (self.interval.min(day), self.timeout.min(day));
        KeepAlive { interval, timeout, ..self }
    }
}

/// Limits and sizes of one side of a connection. The hello carries the settings that the peer
/// needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Length in bytes of a control slot, which limits the longest SEND. 512 to 32,768; default
    /// 8,192.
    pub slot_size: u32,
    /// Bytes of each of the first `recv_slots` RECV slots. A connection at rest has only these
    /// slots. The driver need not post these slots while enough extra slots are posted
    /// ([`Event::Quiet`](crate::Event::Quiet)). 512 to `slot_size`; 0, the default, means
    /// `slot_size`.
    pub rest_slot_size: u32,
    /// Number of RECV slots at the start, which are the peer's first credits. 4 to 4,096; default
    /// 32.
    pub recv_slots: u16,
    /// Maximum number of RECV slots. Slots beyond `recv_slots` are added and removed with the load
    /// ([`Connection::wants_recvs`](crate::Connection::wants_recvs)). `recv_slots` to 4,096;
    /// default 32.
    pub max_recvs: u16,
    /// Maximum number of streams that the peer may have open. At least 1; default 1,024.
    pub max_streams: u32,
    /// Bytes of small messages that a stream may always have unread. A stream's window begins with
    /// this size. The hello states this floor. 4 KiB to 2 GiB - 1; default 32 KiB.
    pub stream_window: u32,
    /// Maximum bytes of small messages that a stream may have unread. A stream's window grows up to
    /// this size as the stream is read. Bytes beyond `stream_window` count towards `unread_total`.
    /// `stream_window` to 2 GiB - 1; default 2 MiB.
    pub max_stream_window: u32,
    /// Maximum bytes of a stream that are granted or unread, not counting small messages. A message
    /// of up to this length lands in one piece if memory allows. At least 64 KiB; default 8 MiB.
    pub bulk_window: u32,
    /// Maximum length of a message that lands in one piece although it exceeds `bulk_window`,
    /// provided that its stream has nothing else granted or unread. A longer message lands in
    /// parts, however long it is. A value below `bulk_window` has no effect. Default 0.
    pub whole: u32,
    /// Maximum bytes that are granted or unread in all streams together. Beyond this total, a
    /// stream gets memory only while it holds nothing else, and only for one message that its
    /// reader waits for or that is no longer than `stream_window`. Of each window for small
    /// messages, only the part beyond `stream_window` counts. At least 64 KiB; default 64 MiB.
    pub unread_total: u64,
    /// Maximum length of a received header block in bytes: request headers, response headers, or
    /// trailers. 4 KiB to 1 MiB; default 64 KiB.
    pub max_headers: u32,
    /// Alignment of landed payload in bytes: the longest [aligned
    /// segment](crate::Payload::push_aligned) of a message lands at a multiple of this value. With
    /// an alignment of 1, the addresses of source and destination are equal modulo 64 instead. A
    /// power of two, 1 to 4,096; default 64.
    pub align: u16,
    /// Number of standing grants kept with a peer that sends bulk. 0 turns them off; default 4, at
    /// most 64.
    pub standing_grants: u8,
    /// Maximum length of a message for which standing grants are kept, in bytes. At most 1 GiB;
    /// default 1 MiB + 64 KiB (a message of 1 MiB with its framing).
    pub standing_max: u32,
    /// Maximum length of a WRITE in bytes, unless [`Room::chunk`](crate::Room) allows more. Longer
    /// transfers are split, so that messages and shorter transfers can go in between. At least 4
    /// KiB; default 256 KiB.
    pub write_chunk: u32,
    /// How this side learns that the peer is gone. Default: by probes, with 3.75 s for the answer.
    pub liveness: Liveness,
    /// The program's own keep-alive. With `None`, the default, no keep-alive ends the connection.
    pub keep_alive: Option<KeepAlive>,
    /// For servers: the application decides at the beginning of each stream whether it [names
    /// memory](crate::Connection::decide_naming) for the request. Until the application has
    /// decided, nothing is granted to the stream. The connection gives no standing grants at all.
    /// Default: false.
    pub names_requests: bool,
    /// Whether the peer may lend the payload that it sends. If not, LENT is a breach. Default:
    /// false.
    pub takes_lent: bool,
    /// Standing grants are recalled after this time without bulk. At most a day; default 10 s.
    pub idle_recall: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            slot_size: 8 * 1024,
            rest_slot_size: 0,
            recv_slots: 32,
            max_recvs: 32,
            max_streams: 1024,
            stream_window: 32 << 10,
            max_stream_window: 2 << 20,
            bulk_window: 8 << 20,
            whole: 0,
            unread_total: 64 << 20,
            max_headers: MAX_HEADER_BLOCK as u32,
            align: 64,
            standing_grants: 4,
            standing_max: (1 << 20) + (64 << 10),
            write_chunk: 256 << 10,
            liveness: Liveness::Asked(PROBE_LIMIT),
            keep_alive: None,
            names_requests: false,
            takes_lent: false,
            idle_recall: Duration::from_secs(10),
        }
    }
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// A setting outside its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}, must be {allowed}")]
pub struct ConfigError {
    name: &'static str,
    value: u64,
    allowed: &'static str,
}

impl Config {
    /// Checks every setting against its range.
    ///
    /// # Errors
    /// The error names the first setting that is outside its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let rule = |ok: bool, name, value: u64, allowed| {
            if ok { Ok(()) } else { Err(ConfigError { name, value, allowed }) }
        };
        rule(
            (512..=32_768).contains(&self.slot_size),
            "slot_size",
            self.slot_size.into(),
            "512 to 32768",
        )?;
        rule(
            self.rest_slot_size == 0 || (512..=self.slot_size).contains(&self.rest_slot_size),
            "rest_slot_size",
            self.rest_slot_size.into(),
            "0, or 512 to slot_size",
        )?;
        rule(
            (4..=4096).contains(&self.recv_slots),
            "recv_slots",
            self.recv_slots.into(),
            "4 to 4096",
        )?;
        rule(
            (self.recv_slots..=4096).contains(&self.max_recvs),
            "max_recvs",
            self.max_recvs.into(),
            "recv_slots to 4096",
        )?;
        rule(self.max_streams > 0, "max_streams", self.max_streams.into(), "at least 1")?;
        rule(
            (4096..=i32::MAX as u32).contains(&self.stream_window),
            "stream_window",
            self.stream_window.into(),
            "4096 to 2147483647",
        )?;
        rule(self.bulk_window >= 65_536, "bulk_window", self.bulk_window.into(), "at least 65536")?;
        rule(
            (self.stream_window..=i32::MAX as u32).contains(&self.max_stream_window),
            "max_stream_window",
            self.max_stream_window.into(),
            "stream_window to 2147483647",
        )?;
        rule(self.unread_total >= 65_536, "unread_total", self.unread_total, "at least 65536")?;
        rule(
            HEADERS.contains(&self.max_headers),
            "max_headers",
            self.max_headers.into(),
            "4096 to 1048576",
        )?;
        rule(is_alignment(self.align), "align", self.align.into(), "a power of two, 1 to 4096")?;
        rule(
            self.standing_grants <= 64,
            "standing_grants",
            self.standing_grants.into(),
            "0 to 64",
        )?;
        rule(
            self.standing_max <= 1 << 30,
            "standing_max",
            self.standing_max.into(),
            "at most 2^30",
        )?;
        rule(self.write_chunk >= 4096, "write_chunk", self.write_chunk.into(), "at least 4096")?;
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        rule(
            millis(self.idle_recall) <= DAY_MS,
            "idle_recall (ms)",
            millis(self.idle_recall),
            "at most 86400000",
        )
    }

    /// Bytes of each of the first `recv_slots` RECV slots.
    pub(crate) fn rest_slot_size(&self) -> u32 {
        if self.rest_slot_size == 0 { self.slot_size } else { self.rest_slot_size }
    }

    /// The settings that the peer receives in the hello.
    pub fn settings(&self) -> PeerSettings {
        PeerSettings {
            recv_slots: self.recv_slots,
            max_recvs: self.max_recvs,
            slot_size: self.slot_size,
            rest_slot_size: self.rest_slot_size(),
            max_streams: self.max_streams,
            stream_window: self.stream_window,
            max_headers: self.max_headers,
            align: self.align,
        }
    }
}

/// The settings of both sides, as their hellos have stated them.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) own: Config,
    pub(crate) peer: PeerSettings,
}

impl Terms {
    /// Maximum length in bytes of a piece that is sent eagerly.
    pub(crate) fn eager_limit(&self) -> usize {
        self.peer.slot_size as usize - MESSAGE_HEADER - FRAME_HEADER
    }

    /// Whether a segment of the piece may be lent. The address of the segment must have the
    /// alignment that the peer requires of landed payload. The rest of the piece must fit into a
    /// message of a connection at rest, because a LENT frame is not split.
    pub(crate) fn is_lendable(&self, payload: &Payload) -> bool {
        payload.lendable().is_some_and(|lendable| {
            let around = payload.len() - lendable.len();
            around + LENT_MESSAGE <= self.peer.rest_slot_size as usize
                && (lendable.as_ptr() as usize).is_multiple_of(self.peer.align.into())
                && u32::try_from(lendable.len()).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_in_range_and_errors_name_the_setting() {
        Config::default().check().unwrap();
        let bad = Config { slot_size: 100, ..Config::default() };
        assert_eq!(bad.check().unwrap_err().to_string(), "slot_size is 100, must be 512 to 32768");
        for align in [0, 48, 8192] {
            let bad = Config { align, ..Config::default() }.check().unwrap_err().to_string();
            assert_eq!(bad, format!("align is {align}, must be a power of two, 1 to 4096"));
        }
    }
}
