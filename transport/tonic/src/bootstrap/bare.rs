//! Tickets for bare connections, over which a diagnosis sends SENDs and WRITEs without calls.

use std::time::Duration;

/// Marks a ticket as valid only for a bare connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareTicket;

/// Maximum time for which a server serves a bare connection. A diagnosis takes less time.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
