//! The kinds of frames: their codes, names and flags, and the streams and lengths that each may
//! have.

/// The sender's half of the stream ends with this frame.
pub const END: u8 = 1;
/// The header block continues in the next HEADERS frame of the stream.
pub const MORE: u8 = 2;
/// The header block is compressed with the connection's header table.
pub const INDEXED: u8 = 4;
/// The client names memory for large messages of the response.
pub const LANDS: u8 = 8;
/// The frame answers a PING or a GOAWAY.
pub const ACK: u8 = 1;
/// The sender declines memory that the peer has granted.
pub const OWN: u8 = 1;
/// Maximum length of the text of a GOAWAY or CLOSE, in bytes.
pub const MAX_TEXT: usize = 240;
/// Bytes of the fixed fields of a LENT frame, which lie between the frame header and the head.
pub(crate) const LENT: usize = 24;

macro_rules! frame_kinds {
    ($($kind:ident = $code:literal $name:literal,)*) => {
        /// The kind of a frame, which is the first byte of its header.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        #[allow(missing_docs, reason = "the kinds are those of `Frame`")]
        pub enum FrameKind { $($kind = $code,)* }

        impl FrameKind {
            /// All kinds, in the order of their codes.
            pub const ALL: &[FrameKind] = &[$(FrameKind::$kind,)*];

            /// Looks up the kind by its code.
            #[inline]
            pub fn from_code(code: u8) -> Option<FrameKind> {
                match code {
                    $($code => Some(FrameKind::$kind),)*
                    _ => None,
                }
            }

            /// The name in error messages and documents.
            pub const fn name(self) -> &'static str {
                match self { $(FrameKind::$kind => $name,)* }
            }
        }
    };
}

frame_kinds! {
    Headers = 1 "HEADERS",
    Data = 2 "DATA",
    Window = 3 "WINDOW",
    Reset = 4 "RESET",
    Request = 5 "REQUEST",
    Grant = 6 "GRANT",
    Done = 7 "DONE",
    Abort = 8 "ABORT",
    Recall = 9 "RECALL",
    Ping = 10 "PING",
    GoAway = 11 "GOAWAY",
    Close = 12 "CLOSE",
    Lent = 13 "LENT",
    Return = 14 "RETURN",
    Decline = 15 "DECLINE",
}

/// The allowed flags of each kind, by code.
const FLAG_MASKS: [u8; FrameKind::ALL.len() + 1] = {
    let mut masks = [0; FrameKind::ALL.len() + 1];
    let mut n = 0;
    while n < FrameKind::ALL.len() {
        let (kind, mut flag) = (FrameKind::ALL[n], 0);
        while flag < kind.flags().len() {
            masks[kind as usize] |= kind.flags()[flag].0;
            flag += 1;
        }
        n += 1;
    }
    masks
};

impl FrameKind {
    /// The code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The flags that a frame of this kind may have, with their names.
    pub const fn flags(self) -> &'static [(u8, &'static str)] {
        match self {
            FrameKind::Headers => {
                &[(END, "END"), (MORE, "MORE"), (INDEXED, "INDEXED"), (LANDS, "LANDS")]
            }
            FrameKind::Data | FrameKind::Done | FrameKind::Lent => &[(END, "END")],
            FrameKind::Ping | FrameKind::GoAway => &[(ACK, "ACK")],
            FrameKind::Decline => &[(OWN, "OWN")],
            FrameKind::Window
            | FrameKind::Reset
            | FrameKind::Request
            | FrameKind::Grant
            | FrameKind::Abort
            | FrameKind::Recall
            | FrameKind::Close
            | FrameKind::Return => &[],
        }
    }

    /// Whether a frame of this kind may have these flags together.
    #[inline]
    pub(crate) fn allows_flags(self, flags: u8) -> bool {
        let excluded = self == FrameKind::Headers && flags & MORE != 0;
        flags & !FLAG_MASKS[self as usize] == 0 && !(excluded && flags & (END | INDEXED) != 0)
    }

    /// Whether a frame of this kind may name this stream, 0 for the connection.
    #[inline]
    pub(crate) fn allows_stream(self, stream: u32) -> bool {
        match self {
            FrameKind::Headers
            | FrameKind::Data
            | FrameKind::Window
            | FrameKind::Reset
            | FrameKind::Request
            | FrameKind::Done
            | FrameKind::Lent
            | FrameKind::Decline => stream != 0,
            FrameKind::Grant => true,
            FrameKind::Abort
            | FrameKind::Recall
            | FrameKind::Ping
            | FrameKind::GoAway
            | FrameKind::Close
            | FrameKind::Return => stream == 0,
        }
    }

    /// Whether a frame of this kind may have a payload of this length.
    #[inline]
    pub(crate) fn allows_payload(self, len: usize) -> bool {
        match self {
            FrameKind::Headers | FrameKind::Data => true,
            FrameKind::Window
            | FrameKind::Reset
            | FrameKind::Abort
            | FrameKind::Recall
            | FrameKind::Return => len == 4,
            FrameKind::Request => len == 20,
            FrameKind::Grant => len == 24,
            FrameKind::Done => len == 12,
            FrameKind::Ping => len == 8,
            FrameKind::GoAway | FrameKind::Close => (4..=4 + MAX_TEXT).contains(&len),
            FrameKind::Lent => len >= LENT,
            FrameKind::Decline => len == 0,
        }
    }
}
