//! The one-time tickets that a server has issued.
//!
//! | state | issue | redeem | time |
//! |---|---|---|---|
//! | (none) | live | refused: unknown | |
//! | live | withdrawn, if the table is full and its network holds the most | used | expired |
//! | used | | refused: used | forgotten after [`SPENT`] later tickets are spent |
//! | withdrawn | | refused: withdrawn | forgotten after [`SPENT`] later tickets are spent |
//! | expired | | refused: expired | forgotten after [`SPENT`] later tickets are spent |
//!
//! A ticket is 128 bits from the operating system's random source. The table is keyed by the whole
//! value with a randomly keyed hash, so the time of a look-up reveals nothing about nearly correct
//! tickets. Every guess costs the guesser a connect request.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;
use rand::TryRngCore;
use rand::rngs::OsRng;
use tokio::time::Instant;

use crate::bootstrap::network::Network;
use crate::path::reason::ReasonCode;

/// Length of a ticket in bytes.
pub(crate) const TICKET_LEN: usize = 16;
/// Default limit of live tickets, which bounds the connections that are being set up at once.
pub(crate) const CAPACITY: usize = 1024;
/// Maximum lifetime of a ticket: a year, which every clock can add to the current time.
const MAX_LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Default lifetime of a ticket.
pub(crate) const LIFETIME: Duration = Duration::from_secs(10);
/// Number of spent tickets that are remembered, so that a refusal can name its cause.
const SPENT: usize = 1024;

/// A ticket. Its bytes are secret: `Debug` does not show them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ticket(pub(crate) [u8; TICKET_LEN]);

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket(..)")
    }
}

/// Why a ticket is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("wrong ticket")]
    Unknown,
    #[error("ticket already used")]
    Used,
    #[error("ticket expired")]
    Expired,
    #[error("ticket withdrawn: its network had asked for too many")]
    Withdrawn,
}

/// Why no ticket can be issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoTicket {
    #[error("{0} tickets are outstanding already (Server::tickets)")]
    Full(usize),
    #[error("the operating system gives no random bytes")]
    NoRandomness,
}

impl NoTicket {
    /// The reason code that the client receives.
    pub(crate) fn code(self) -> ReasonCode {
        match self {
            Self::Full(_) => ReasonCode::LimitReached,
            Self::NoRandomness => ReasonCode::HandshakeRejected,
        }
    }
}

/// The tickets of one server.
#[derive(Debug)]
pub(crate) struct Tickets {
    table: Mutex<Table>,
    capacity: usize,
    lifetime: Duration,
}

#[derive(Debug, Default)]
struct Table {
    live: HashMap<Ticket, Live>,
    issued: u64,
    spent: VecDeque<(Ticket, Refused)>,
}

#[derive(Debug)]
struct Live {
    expires: Instant,
    /// The client's network, if its address is known.
    from: Option<Network>,
    /// Serial number, which orders live tickets by age.
    number: u64,
    /// The identity of the Offer's TCP connection.
    connection: Extensions,
}

impl Tickets {
    /// `lifetime` is cut to [`MAX_LIFETIME`].
    pub(crate) fn new(capacity: usize, lifetime: Duration) -> Self {
        Self { table: Mutex::default(), capacity, lifetime: lifetime.min(MAX_LIFETIME) }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        self.lifetime
    }

    /// Issues a ticket for the client on the other end of `connection`, in the network `from`.
    ///
    /// If the table is full, the network that holds the most tickets loses its oldest one to a
    /// network that holds fewer. So a flood from one network does not exclude the others.
    pub(crate) fn issue(
        &self,
        connection: Extensions,
        from: Option<Network>,
        now: Instant,
    ) -> Result<Ticket, NoTicket> {
        let mut bytes = [0; TICKET_LEN];
        OsRng.try_fill_bytes(&mut bytes).map_err(|_| NoTicket::NoRandomness)?;
        let ticket = Ticket(bytes);
        let mut table = self.lock();
        if table.live.len() >= self.capacity {
            table.expire(now);
        }
        if table.live.len() >= self.capacity && !table.withdraw(from) {
            return Err(NoTicket::Full(self.capacity));
        }
        let number = table.issued;
        table.issued += 1;
        table.live.insert(ticket, Live { expires: now + self.lifetime, from, number, connection });
        Ok(ticket)
    }

    /// Uses a ticket up and returns the extensions that it was issued with.
    pub(crate) fn redeem(&self, ticket: &Ticket, now: Instant) -> Result<Extensions, Refused> {
        let mut table = self.lock();
        match table.live.remove(ticket) {
            Some(live) if now < live.expires => {
                table.spend(*ticket, Refused::Used);
                Ok(live.connection)
            }
            Some(_) => {
                table.spend(*ticket, Refused::Expired);
                Err(Refused::Expired)
            }
            None => Err(table
                .spent
                .iter()
                .find(|(spent, _)| spent == ticket)
                .map_or(Refused::Unknown, |(_, how)| *how)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each change leaves the table consistent, even if a panic interrupts it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn expire(&mut self, now: Instant) {
        let dead: Vec<Ticket> = self
            .live
            .iter()
            .filter(|(_, live)| live.expires <= now)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in dead {
            self.live.remove(&ticket);
            self.spend(ticket, Refused::Expired);
        }
    }

    /// Withdraws the oldest ticket of the network that holds the most, if `in_favour` holds fewer.
    fn withdraw(&mut self, in_favour: Option<Network>) -> bool {
        let mut held: HashMap<Option<Network>, usize> = HashMap::new();
        for live in self.live.values() {
            *held.entry(live.from).or_default() += 1;
        }
        let own = held.get(&in_favour).copied().unwrap_or(0);
        let Some((&most, _)) = held.iter().filter(|(_, n)| **n > own + 1).max_by_key(|(_, n)| **n)
        else {
            return false;
        };
        let of_most = self.live.iter().filter(|(_, live)| live.from == most);
        let Some(oldest) = of_most.min_by_key(|(_, live)| live.number).map(|(ticket, _)| *ticket)
        else {
            return false;
        };
        self.live.remove(&oldest);
        self.spend(oldest, Refused::Withdrawn);
        true
    }

    fn spend(&mut self, ticket: Ticket, how: Refused) {
        if self.spent.len() == SPENT {
            self.spent.pop_front();
        }
        self.spent.push_back((ticket, how));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn tickets() -> (Tickets, Instant) {
        (Tickets::new(3, Duration::from_secs(10)), Instant::now())
    }

    #[tokio::test]
    async fn good_once_and_gives_back_its_connection() {
        let (tickets, now) = tickets();
        let mut connection = Extensions::new();
        connection.insert("alice");
        let ticket = tickets.issue(connection, None, now).unwrap();
        let connection = tickets.redeem(&ticket, now).unwrap();
        assert_eq!(connection.get::<&str>(), Some(&"alice"));
        assert_eq!(tickets.redeem(&ticket, now).unwrap_err(), Refused::Used);
    }

    #[tokio::test]
    async fn wrong_by_any_bit_is_unknown_and_harms_nothing() {
        let (tickets, now) = tickets();
        let ticket = tickets.issue(Extensions::new(), None, now).unwrap();
        for bit in 0..TICKET_LEN * 8 {
            let mut wrong = ticket;
            wrong.0[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(tickets.redeem(&wrong, now).unwrap_err(), Refused::Unknown);
        }
        assert!(tickets.redeem(&ticket, now).is_ok());
    }

    #[tokio::test]
    async fn expires() {
        let (tickets, now) = tickets();
        let ticket = tickets.issue(Extensions::new(), None, now).unwrap();
        let later = now + tickets.lifetime();
        assert_eq!(tickets.redeem(&ticket, later).unwrap_err(), Refused::Expired);
        // It stays expired, even if the clock goes back.
        assert_eq!(tickets.redeem(&ticket, now).unwrap_err(), Refused::Expired);
    }

    #[tokio::test]
    async fn a_full_table_refuses_until_tickets_are_used_or_expire() {
        let (tickets, now) = tickets();
        let first = tickets.issue(Extensions::new(), None, now).unwrap();
        for _ in 0..2 {
            tickets.issue(Extensions::new(), None, now).unwrap();
        }
        assert_eq!(tickets.issue(Extensions::new(), None, now).unwrap_err(), NoTicket::Full(3));
        tickets.redeem(&first, now).unwrap();
        tickets.issue(Extensions::new(), None, now).unwrap();
        assert_eq!(tickets.issue(Extensions::new(), None, now).unwrap_err(), NoTicket::Full(3));
        let later = now + tickets.lifetime();
        for _ in 0..3 {
            tickets.issue(Extensions::new(), None, later).unwrap();
        }
    }

    #[tokio::test]
    async fn a_flood_from_one_address_keeps_nobody_else_out() {
        let (tickets, now) = tickets();
        let [flood, quiet, late, more] = [1, 2, 3, 4].map(|n| IpAddr::from([10, 0, 0, n]));
        let of = |from: IpAddr| tickets.issue(Extensions::new(), Some(from.into()), now);
        let first = of(flood).unwrap();
        let last = [of(flood).unwrap(), of(flood).unwrap()][1];
        assert_eq!(of(flood).unwrap_err(), NoTicket::Full(3));
        let good = of(quiet).unwrap();
        assert_eq!(tickets.redeem(&first, now).unwrap_err(), Refused::Withdrawn);
        // With one ticket each the distribution is fair.
        let other = of(late).unwrap();
        assert_eq!(of(flood).unwrap_err(), NoTicket::Full(3));
        assert_eq!(of(more).unwrap_err(), NoTicket::Full(3));
        for ticket in [last, good, other] {
            tickets.redeem(&ticket, now).unwrap();
        }
    }

    #[tokio::test]
    async fn a_flood_from_all_addresses_of_an_ipv6_64_is_one_flood() {
        let (tickets, now) = tickets();
        let of = |from: &str| {
            let from: IpAddr = from.parse().unwrap();
            tickets.issue(Extensions::new(), Some(from.into()), now)
        };
        let flood: Vec<Ticket> =
            (0..3).map(|n| of(&format!("2001:db8:1:2::{n}")).unwrap()).collect();
        assert_eq!(of("2001:db8:1:2:ffff::1").unwrap_err(), NoTicket::Full(3));
        let good = of("2001:db8:1:3::1").unwrap();
        assert_eq!(tickets.redeem(&flood[0], now).unwrap_err(), Refused::Withdrawn);
        tickets.redeem(&good, now).unwrap();
        // An IPv4 address counts the same in either form.
        of("::ffff:10.0.0.1").unwrap();
        assert_eq!(of("10.0.0.1").unwrap_err(), NoTicket::Full(3));
        of("::ffff:10.0.0.2").unwrap();
    }

    #[tokio::test]
    async fn memory_of_spent_tickets_is_bounded() {
        let (tickets, now) = tickets();
        let first = tickets.issue(Extensions::new(), None, now).unwrap();
        tickets.redeem(&first, now).unwrap();
        for _ in 0..SPENT {
            let ticket = tickets.issue(Extensions::new(), None, now).unwrap();
            tickets.redeem(&ticket, now).unwrap();
        }
        assert_eq!(tickets.lock().spent.len(), SPENT);
        assert_eq!(tickets.redeem(&first, now).unwrap_err(), Refused::Unknown);
    }

    #[tokio::test]
    async fn tickets_differ_and_do_not_show_in_logs() {
        let (tickets, now) = tickets();
        let a = tickets.issue(Extensions::new(), None, now).unwrap();
        let b = tickets.issue(Extensions::new(), None, now).unwrap();
        assert_ne!(a, b);
        assert_eq!(format!("{a:?}"), "Ticket(..)");
    }
}
