//! Parses the total sizes of pools in the variable `TONIC_RDMA_POOL`.

use tonic_rdma_memory::MIN_POOL;

/// The allowed values of `TONIC_RDMA_POOL`.
pub(super) const ALLOWED: &str = "a number of bytes with a unit, such as 512MiB or 2GiB, of at least 2MiB; for one kind of pool \
     `verbs=512MiB` or `shm=2GiB`, or both, separated by a comma";

/// The total sizes of pools in bytes, as an operator sets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PoolTotals {
    /// Size of each RDMA device's pool.
    pub(crate) verbs: Option<usize>,
    /// Size of the pool for shared memory.
    pub(crate) shm: Option<usize>,
}

impl PoolTotals {
    /// Parses one size for all pools, or a size for each kind of pool. The error describes the
    /// defect.
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        if !text.contains('=') {
            let all = Some(size(text.trim())?);
            return Ok(Self { verbs: all, shm: all });
        }
        let mut sizes = Self::default();
        for word in text.split(',') {
            let (kind, bytes) = word.split_once('=').ok_or("a size without its kind of pool")?;
            let place = match kind.trim() {
                "verbs" => &mut sizes.verbs,
                "shm" => &mut sizes.shm,
                _ => return Err("unknown kind of pool"),
            };
            if place.replace(size(bytes.trim())?).is_some() {
                return Err("two sizes for one kind of pool");
            }
        }
        Ok(sizes)
    }
}

fn size(text: &str) -> Result<usize, &'static str> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor: u64 = match unit.trim_start() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return Err("not a size"),
    };
    if digits.is_empty() {
        return Err("not a size");
    }
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    // A number that overflows is also too large.
    match bytes.and_then(|bytes| usize::try_from(bytes).ok()).filter(|bytes| *bytes <= MAX) {
        Some(bytes) if bytes < MIN_POOL => Err("smaller than any pool"),
        Some(bytes) => Ok(bytes),
        None => Err("larger than any memory"),
    }
}

/// Maximum size of a pool in bytes: half of a process's address space on x86-64 and on 32-bit
/// architectures.
const MAX: usize = (1_u64 << if usize::BITS == 64 { 46 } else { 31 }) as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_is_for_all_pools_and_a_named_one_for_its_kind() {
        let sizes = |verbs, shm| Ok(PoolTotals { verbs, shm });
        assert_eq!(PoolTotals::parse("512MiB"), sizes(Some(512 << 20), Some(512 << 20)));
        assert_eq!(PoolTotals::parse(" 2097152 "), sizes(Some(2 << 20), Some(2 << 20)));
        assert_eq!(PoolTotals::parse("1 GiB"), sizes(Some(1 << 30), Some(1 << 30)));
        assert_eq!(PoolTotals::parse("shm=2G"), sizes(None, Some(2 << 30)));
        assert_eq!(PoolTotals::parse("verbs=64M, shm=1T"), sizes(Some(64 << 20), Some(1 << 40)));
    }

    #[test]
    fn what_is_no_size_is_an_error() {
        for (bad, problem) in [
            ("much", "not a size"),
            ("MiB", "not a size"),
            ("-1", "not a size"),
            ("0x100000", "not a size"),
            ("1.5GiB", "not a size"),
            ("64MB", "not a size"),
            ("64MiB,1GiB", "not a size"),
            ("shm=", "not a size"),
            ("0", "smaller than any pool"),
            ("2MiB0", "not a size"),
            ("2097151", "smaller than any pool"),
            ("65T", "larger than any memory"),
            ("18446744073709551616", "larger than any memory"),
            ("18014398509481984K", "larger than any memory"),
            ("tcp=64MiB", "unknown kind of pool"),
            ("shm=64MiB,1GiB", "a size without its kind of pool"),
            ("shm=64MiB,shm=1GiB", "two sizes for one kind of pool"),
        ] {
            assert_eq!(PoolTotals::parse(bad), Err(problem), "{bad}");
        }
    }
}
