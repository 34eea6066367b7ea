//! Users, as this process sees them.

/// The user that this process runs as.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether a number may stand for any user: in a user namespace, all users from outside of it show
/// as one, by default 65534.
pub(super) fn is_overflow_user(uid: u32) -> bool {
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    if uid != overflow.trim().parse().unwrap_or(65534) {
        return false;
    }
    let whole = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(whole)
}
