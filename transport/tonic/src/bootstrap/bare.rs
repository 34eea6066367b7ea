//! Tickets for bare connections, which carry SENDs and WRITEs without calls, for a diagnosis.

use std::time::Duration;

/// Marks a ticket as valid only for a bare connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareTicket;

/// Maximum time that a server serves a bare connection, which is longer than a diagnosis takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
