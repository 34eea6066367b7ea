//! User numbers, as this process sees them.

use std::sync::OnceLock;

use crate::proc_file;

/// The user that this process runs as.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether a number may mean any user. In a user namespace, all users from outside have the same
/// number, by default 65534.
pub(super) fn is_overflow_user(uid: u32) -> bool {
    /// The kernel's number for such users. It is read once, because each connection needs it
    /// several times.
    static OVERFLOW_UID: OnceLock<String> = OnceLock::new();
    let read = |path| proc_file::read(path).unwrap_or_default();
    let overflow_uid = OVERFLOW_UID.get_or_init(|| read("/proc/sys/kernel/overflowuid"));
    stands_for_any(uid, overflow_uid, || read("/proc/self/uid_map"))
}

/// Like [`is_overflow_user`], but gets the kernel's files, which are empty if they cannot be read.
fn stands_for_any(uid: u32, overflow_uid: &str, uid_map: impl FnOnce() -> String) -> bool {
    if uid != overflow_uid.trim().parse().unwrap_or(65534) {
        return false;
    }
    // Each user has its own number only if the namespace maps all users.
    !uid_map().split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_from_outside_of_a_namespace_look_alike() {
        let all = || "         0          0 4294967295\n".to_owned();
        let container = || "         0       1000          1\n".to_owned();
        for (uid, overflow_uid, uid_map, any) in [
            (65534, "65534\n", &container as &dyn Fn() -> String, true),
            (65534, "65534\n", &all, false),
            (1000, "65534\n", &container, false),
            (7, "7\n", &container, true),
            (65534, "7\n", &container, false),
            // If the kernel does not say, a namespace is assumed.
            (65534, "", &String::new, true),
            (0, "", &String::new, false),
        ] {
            let is = stands_for_any(uid, overflow_uid, uid_map);
            assert_eq!(is, any, "{uid} where {overflow_uid:?} stands for others");
        }
    }
}
