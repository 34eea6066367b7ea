//! Systems other than Linux: nothing is pinned there, so nothing limits it.

use std::io;

/// No soft and no hard limit.
pub(super) fn get() -> io::Result<(Option<u64>, Option<u64>)> {
    Ok((None, None))
}

/// Has nothing to raise.
pub(super) fn raise() -> io::Result<()> {
    Ok(())
}

/// There are no namespaces.
pub(super) fn user_namespace() -> String {
    String::new()
}

/// A status that says nothing.
pub(super) fn status() -> io::Result<String> {
    Ok(String::new())
}
