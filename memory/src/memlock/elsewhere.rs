//! For systems other than Linux, where nothing is pinned and so nothing is limited.

use std::io;

/// Returns no soft and no hard limit.
pub(super) fn get() -> io::Result<(Option<u64>, Option<u64>)> {
    Ok((None, None))
}

/// Does nothing, because there is no limit.
pub(super) fn raise() -> io::Result<()> {
    Ok(())
}

/// Returns an empty name, because there are no namespaces.
pub(super) fn user_namespace() -> String {
    String::new()
}

/// Returns an empty status.
pub(super) fn status() -> io::Result<String> {
    Ok(String::new())
}
