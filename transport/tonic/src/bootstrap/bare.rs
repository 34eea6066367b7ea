//! Tickets for bare connections, which carry SENDs and WRITEs without calls, for a diagnosis.

use std::time::Duration;

/// Marks a ticket as one for a bare connection, and for nothing else.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareTicket;

/// How long a server serves a bare connection: longer than a diagnosis takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
