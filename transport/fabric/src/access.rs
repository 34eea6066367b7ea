//! The processes of this host with which memory may be shared.

/// Which processes of this host memory may be shared with, by the effective user they run as
/// (SO_PEERCRED, unix(7)).
///
/// Checked by the accepting side and by the connecting side.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShmAccess {
    /// Those of this process's effective user, and of root. The default.
    #[default]
    SameUser,
    /// Those of these users, by number, and of root.
    Users(Vec<u32>),
    /// All.
    Any,
}

impl ShmAccess {
    /// Whether memory may be shared with a process of user `uid`, where this process runs as `own`.
    pub fn allows(&self, uid: u32, own: u32) -> bool {
        match self {
            ShmAccess::Any => true,
            _ if uid == 0 => true,
            ShmAccess::SameUser => uid == own,
            ShmAccess::Users(users) => users.contains(&uid),
        }
    }
}

/// To which processes of this host memory for sending is lent: they map all of it, read-only, and
/// read messages where the sender has them.
///
/// They see what the sender writes there at any time: every message to anybody, and what was in the
/// buffers before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Lending {
    /// To none: every message is copied once. The default.
    #[default]
    Off,
    /// To those of this process's effective user in its PID namespace, as the handshake confirms
    /// them (pidfd_open(2)). They could read its memory in other ways (ptrace(2)), unless the
    /// system forbids that. Others of this user, as in another container of a pod, get copies.
    SameUser,
    /// To one process, the first that a message goes to, of whatever user. All others get copies,
    /// also when it has ended. For memory that holds nothing but what is meant for that process.
    OneProcess,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_named_may() {
        for (access, uid, may) in [
            (ShmAccess::SameUser, 1000, true),
            (ShmAccess::SameUser, 0, true),
            (ShmAccess::SameUser, 1001, false),
            (ShmAccess::Users(vec![7]), 7, true),
            (ShmAccess::Users(vec![7]), 0, true),
            (ShmAccess::Users(vec![7]), 1000, false),
            (ShmAccess::Any, 1001, true),
        ] {
            assert_eq!(access.allows(uid, 1000), may, "{access:?} {uid}");
        }
    }
}
