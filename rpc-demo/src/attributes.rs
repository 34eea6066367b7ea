//! Metadata of a file or directory: permission bits and modification time.

use std::fs::{File, FileTimes, Metadata, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::pb;

/// Permission bits that are transferred, without set-id and sticky bits.
const BITS: u32 = 0o777;

/// Permission bits and modification time. An attribute that is `None` is left unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    /// Unix permission bits, within 0777.
    pub(crate) mode: Option<u32>,
    /// Modification time.
    pub(crate) modified: Option<SystemTime>,
}

impl Attributes {
    /// Reads the attributes of a local file or directory.
    pub(crate) fn of(metadata: &Metadata) -> Attributes {
        Attributes {
            mode: Some(metadata.permissions().mode() & BITS),
            modified: metadata.modified().ok(),
        }
    }

    /// Sets the attributes that are not `None`. If there is a mode, the permission bits `least` are
    /// set in addition to its bits.
    pub(crate) fn apply(&self, file: &File, least: u32) -> io::Result<()> {
        self.apply_time(file)?;
        self.apply_mode(file, least)
    }

    /// Sets the modification time only.
    pub(crate) fn apply_time(&self, file: &File) -> io::Result<()> {
        match self.modified {
            Some(modified) => file.set_times(FileTimes::new().set_modified(modified)),
            None => Ok(()),
        }
    }

    /// Sets the permission bits only.
    pub(crate) fn apply_mode(&self, file: &File, least: u32) -> io::Result<()> {
        match self.mode {
            Some(mode) => file.set_permissions(Permissions::from_mode(mode & BITS | least)),
            None => Ok(()),
        }
    }

    /// Whether a file with the attributes `there` already has the attributes that `apply` would
    /// set. For `least`, see [`apply`](Attributes::apply).
    pub(crate) fn are(&self, there: &Attributes, least: u32) -> bool {
        self.mode.is_none_or(|mode| there.mode == Some(mode & BITS | least))
            && self.modified.is_none_or(|modified| there.modified == Some(modified))
    }
}

impl From<Attributes> for pb::Attributes {
    fn from(attributes: Attributes) -> pb::Attributes {
        pb::Attributes { mode: attributes.mode, modified: attributes.modified.map(timestamp) }
    }
}

/// Attributes from a peer. A time that this system cannot represent is left out.
impl From<pb::Attributes> for Attributes {
    fn from(attributes: pb::Attributes) -> Attributes {
        Attributes {
            mode: attributes.mode.map(|mode| mode & BITS),
            modified: attributes.modified.and_then(|stamp| time(&stamp)),
        }
    }
}

fn timestamp(time: SystemTime) -> pb::Timestamp {
    let (seconds, nanos) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let whole = 0_i64.saturating_sub_unsigned(before.as_secs());
            match before.subsec_nanos() {
                0 => (whole, 0),
                nanos => (whole.saturating_sub(1), 1_000_000_000 - nanos),
            }
        }
    };
    pb::Timestamp { seconds, nanos }
}

fn time(stamp: &pb::Timestamp) -> Option<SystemTime> {
    if stamp.nanos >= 1_000_000_000 {
        return None;
    }
    let seconds = Duration::from_secs(stamp.seconds.unsigned_abs());
    let whole = if stamp.seconds < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole?.checked_add(Duration::from_nanos(stamp.nanos.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_there_and_back() {
        let times = [
            UNIX_EPOCH,
            UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789),
            UNIX_EPOCH - Duration::new(1, 0),
            UNIX_EPOCH - Duration::new(10, 1),
            UNIX_EPOCH - Duration::from_nanos(1),
        ];
        for at in times {
            assert_eq!(time(&timestamp(at)), Some(at));
        }
        assert_eq!(timestamp(UNIX_EPOCH - Duration::from_nanos(1)).seconds, -1);
        for (seconds, nanos) in [(0, 1_000_000_000), (i64::MIN, 0), (i64::MAX, 999_999_999)] {
            let stamp = pb::Timestamp { seconds, nanos };
            assert!(time(&stamp).is_none_or(|at| timestamp(at) == stamp));
        }
        assert_eq!(time(&pb::Timestamp { seconds: 0, nanos: u32::MAX }), None);
    }

    #[test]
    fn are_set_and_compared() {
        let file = tempfile::tempfile().unwrap();
        let wanted =
            Attributes { mode: Some(0o6040), modified: Some(UNIX_EPOCH + Duration::from_secs(5)) };
        wanted.apply(&file, 0o400).unwrap();
        let there = Attributes::of(&file.metadata().unwrap());
        assert_eq!(there, Attributes { mode: Some(0o440), ..wanted });
        assert!(wanted.are(&there, 0o400) && !wanted.are(&there, 0));
        assert!(Attributes::default().are(&there, 0));
        assert!(!Attributes { modified: Some(UNIX_EPOCH), ..there }.are(&there, 0));
    }
}
