//! Formats entries of the store.

use std::time::SystemTime;

use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::attributes::Attributes;
use crate::pb::Entry;
use crate::pb::entry::Kind;

/// An entry as `--json` prints it.
#[derive(Serialize)]
pub(crate) struct Json<'a> {
    name: &'a str,
    /// `file`, `directory`, `other` (not served) or `unreadable`.
    kind: &'static str,
    /// Size in bytes, for files only.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    /// Permission bits, in octal.
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    /// The modification time in the format of RFC 3339, in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    modified: Option<String>,
    /// The CRC32C in 8 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    crc32c: Option<String>,
    /// Why the entry is not served or cannot be read.
    #[serde(skip_serializing_if = "str::is_empty")]
    note: &'a str,
}

impl<'a> Json<'a> {
    /// The JSON form of an entry.
    pub(crate) fn of(entry: &'a Entry) -> Json<'a> {
        let kind = entry.kind();
        let Attributes { mode, modified } = attributes(entry);
        Json {
            name: &entry.name,
            kind: kind_name(kind),
            size: (kind == Kind::File).then_some(entry.size),
            mode: mode.map(|mode| format!("{mode:04o}")),
            modified: modified.map(rfc3339),
            crc32c: entry.crc32c.map(|crc32c| format!("{crc32c:08x}")),
            note: &entry.note,
        }
    }
}

/// Mode and modification time as the server sent them.
pub(crate) fn attributes(entry: &Entry) -> Attributes {
    entry.attributes.map(Attributes::from).unwrap_or_default()
}

/// The kind in one word.
pub(crate) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Unreadable => "unreadable",
        Kind::Other | Kind::Unspecified => "other",
    }
}

/// The kind and the permission bits as `ls -l` writes them.
pub(crate) fn mode(entry: &Entry) -> String {
    let kind = if entry.kind() == Kind::Directory { 'd' } else { '-' };
    let Some(mode) = attributes(entry).mode else { return "?---------".to_owned() };
    let bit = |shift: u32, letter| if mode >> shift & 1 == 1 { letter } else { '-' };
    let bits = (0..9).rev().map(|shift| bit(shift, ['x', 'w', 'r'][shift as usize % 3]));
    std::iter::once(kind).chain(bits).collect()
}

/// The modification time to the second, in UTC: `2026-11-21 04:38:00`.
pub(crate) fn modified(entry: &Entry) -> String {
    let text = attributes(entry).modified.map(rfc3339);
    text.and_then(|text| Some(text.get(..19)?.replace('T', " "))).unwrap_or_else(|| "-".to_owned())
}

/// The CRC32C, or `-`.
pub(crate) fn crc32c(entry: &Entry) -> String {
    entry.crc32c.map_or("-".to_owned(), |crc32c| format!("{crc32c:08x}"))
}

/// Formats a time in the format of RFC 3339, in UTC, to the nanosecond. A time in a year that RFC
/// 3339 cannot represent is given in seconds since 1970, after an `@`.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let seconds = |sign, duration: std::time::Duration| {
        (sign * duration.as_nanos() as i128, duration.as_secs())
    };
    let (nanos, whole) = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => seconds(1, after),
        Err(before) => seconds(-1, before.duration()),
    };
    let formatted = OffsetDateTime::from_unix_timestamp_nanos(nanos)
        .ok()
        .and_then(|at| at.format(&Rfc3339).ok());
    formatted.unwrap_or_else(|| format!("{}@{whole}", if nanos < 0 { "-" } else { "" }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn shown_as_people_know_it() {
        let attributes = Attributes {
            mode: Some(0o754),
            modified: Some(SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 120_000_000)),
        };
        let mut entry = Entry {
            name: "a\"b".into(),
            kind: Kind::File.into(),
            size: 7,
            attributes: Some(attributes.into()),
            crc32c: Some(0xab),
            note: String::new(),
        };
        assert_eq!(mode(&entry), "-rwxr-xr--");
        assert_eq!(modified(&entry), "2023-11-14 22:13:20");
        assert_eq!(crc32c(&entry), "000000ab");
        let json = serde_json::to_string(&Json::of(&entry)).unwrap();
        assert_eq!(
            json,
            r#"{"name":"a\"b","kind":"file","size":7,"mode":"0754","modified":"2023-11-14T22:13:20.12Z","crc32c":"000000ab"}"#
        );
        entry = Entry {
            name: "x".into(),
            kind: Kind::Other.into(),
            note: "a link".into(),
            ..Entry::default()
        };
        assert_eq!((mode(&entry).as_str(), modified(&entry).as_str()), ("?---------", "-"));
        let json = serde_json::to_string(&Json::of(&entry)).unwrap();
        assert_eq!(json, r#"{"name":"x","kind":"other","note":"a link"}"#);
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)),
            "1969-12-31T23:59:59Z"
        );
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 50)),
            "@1125899906842624"
        );
    }
}
