//! Frames as a log shows them: kind, flags, fields, and the lengths of payloads without their
//! bytes.

use std::fmt;

use super::Frame;
use crate::payload::{Field, LentBody};

impl fmt::Display for Frame {
    /// Writes the name of the frame, the stream, the flags that are set, and the fields. Header
    /// blocks, payload and texts appear as their lengths.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Frame::Headers { stream, end, more, indexed, lands, block } => {
                write!(f, " stream={stream}")?;
                flag(f, *end, " END")?;
                flag(f, *more, " MORE")?;
                flag(f, *indexed, " INDEXED")?;
                flag(f, *lands, " LANDS")?;
                write!(f, " block={}B", block.len())
            }
            Frame::Data { stream, end, data } => {
                write!(f, " stream={stream}")?;
                flag(f, *end, " END")?;
                write!(f, " data={}B", data.len())
            }
            Frame::Window { stream, increment } => {
                write!(f, " stream={stream} increment={increment}")
            }
            Frame::Reset { stream, code } => write!(f, " stream={stream} code={code}"),
            Frame::Request { stream, len, begin, field } => {
                let Field { at, len: field } = field.unwrap_or(Field { at: 0, len: 0 });
                write!(f, " stream={stream} len={len} begin={begin}")?;
                write!(f, " field_offset={at} field_len={field}")
            }
            Frame::Grant { stream, id, rkey, len, addr } => {
                write!(f, " stream={stream} id={id} rkey={rkey:#x} len={len} address={addr:#x}")
            }
            Frame::Done { stream, end, id, len, begin } => {
                write!(f, " stream={stream}")?;
                flag(f, *end, " END")?;
                write!(f, " id={id} len={len} begin={begin}")
            }
            Frame::Abort { id } | Frame::Recall { id } => write!(f, " id={id}"),
            Frame::Ping { ack, token } => {
                flag(f, *ack, " ACK")?;
                write!(f, " token={token}")
            }
            Frame::GoAway { ack, code, text } => {
                flag(f, *ack, " ACK")?;
                write!(f, " code={code} text={}B", text.len())
            }
            Frame::Close { code, text } => write!(f, " code={code} text={}B", text.len()),
            Frame::Lent { stream, end, lent } => {
                let LentBody { head, place, len, tail } = &**lent;
                write!(f, " stream={stream}")?;
                flag(f, *end, " END")?;
                write!(f, " lease={} key={:#x} len={len}", place.lease, place.key)?;
                write!(f, " address={:#x} head={}B tail={}B", place.addr, head.len(), tail.len())
            }
            Frame::Return { lease } => write!(f, " lease={lease}"),
            Frame::Decline { stream, own } => {
                write!(f, " stream={stream}")?;
                flag(f, *own, " OWN")
            }
        }
    }
}

fn flag(f: &mut fmt::Formatter<'_>, set: bool, name: &str) -> fmt::Result {
    f.write_str(if set { name } else { "" })
}
