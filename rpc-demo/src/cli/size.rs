//! Sizes on the command line.

/// Minimum and maximum size of a chunk in bytes. A chunk of the maximum size and its framing stay
/// below tonic's default message limit of 4 MiB.
pub(crate) const CHUNK_MIN: usize = 4 << 10;
pub(crate) const CHUNK_MAX: usize = 3 << 20;
/// Default size of a chunk in bytes.
pub(crate) const CHUNK: usize = 1 << 20;
/// Default size of a chunk of a range over shared memory. This size halves the number of messages,
/// and so the work that messages cause. Whole files keep the default size. A whole file may be a
/// single message of any length up to a chunk, and the codec has to show tonic each length that is
/// longer than all before it (docs/zero-copy.md, "What has to be learnt").
pub(crate) const RANGE_CHUNK_ON_ONE_HOST: usize = 2 << 20;

/// Minimum and maximum size of an object that `bench` creates, in bytes.
const OBJECT_MIN: u64 = 4 << 10;
const OBJECT_MAX: u64 = 64 << 20;

pub(super) fn chunk(text: &str) -> Result<usize, String> {
    match usize::try_from(size(text)?) {
        Ok(bytes) if (CHUNK_MIN..=CHUNK_MAX).contains(&bytes) => Ok(bytes),
        _ => Err("it must be 4KiB to 3MiB".into()),
    }
}

pub(super) fn range(text: &str) -> Result<u64, String> {
    use crate::ranges::{RANGE_MAX, RANGE_MIN};
    match size(text)? {
        bytes if (RANGE_MIN..=RANGE_MAX).contains(&bytes) => Ok(bytes),
        _ => Err("it must be 64KiB to 4GiB".into()),
    }
}

pub(super) fn object(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if (OBJECT_MIN..=OBJECT_MAX).contains(&bytes) => Ok(bytes),
        _ => Err("it must be 4KiB to 64MiB".into()),
    }
}

/// Parses a whole number of bytes with an optional unit: B, K or KiB to T or TiB (powers of 1,024),
/// kB to TB (powers of 1,000).
pub(super) fn size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor = match unit.trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        "kB" => 1000,
        "MB" => 1000_u64.pow(2),
        "GB" => 1000_u64.pow(3),
        "TB" => 1000_u64.pow(4),
        _ => {
            return Err(
                "write a number of bytes with one of the units KiB, MiB, GiB, TiB, kB, MB, GB, TB"
                    .into(),
            );
        }
    };
    let number: u64 =
        digits.parse().map_err(|_| "it does not begin with a whole number".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "it is more than 2^64 bytes".to_owned())
}

/// Formats bytes in the units that the command line accepts.
pub(crate) fn shown(bytes: u64) -> String {
    tonic_rdma_doctor::ByteSize(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("0", 0), ("17", 17), ("1KiB", 1024), ("3 MiB", 3 << 20), ("2GB", 2_000_000_000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "x", "MiB", "1.5GiB", "-1", "1XB", "99999999999999999999", "99999999TiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(chunk("3MiB"), Ok(CHUNK_MAX));
        assert!(chunk("4MiB").is_err() && chunk("1").is_err());
        assert!(range("1KiB").is_err() && range("5GiB").is_err() && range("4GiB").is_ok());
        assert!(object("1KiB").is_err() && object("65MiB").is_err() && object("64MiB").is_ok());
        for (bytes, text) in [(0, "0 B"), (1000, "1000 B"), (4096, "4 KiB"), (3 << 29, "1536 MiB")]
        {
            assert_eq!(shown(bytes), text);
            assert_eq!(size(text), Ok(bytes));
        }
    }
}
