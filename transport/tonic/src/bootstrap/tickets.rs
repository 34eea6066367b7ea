//! The one-time tickets that a server has issued, and the networks that tickets count against.
//!
//! | state | issue | redeem | time |
//! |---|---|---|---|
//! | (none) | live | refused: unknown | |
//! | live | withdrawn if the table is full and its TCP connection holds the most tickets | used | expired |
//! | used | | refused: used | forgotten after [`SPENT`] later tickets are spent |
//! | withdrawn | | refused: withdrawn | forgotten after [`SPENT`] later tickets are spent |
//! | expired | | refused: expired | forgotten after [`SPENT`] later tickets are spent |
//!
//! A ticket is 128 bits from the operating system's random source. The table is keyed by the whole
//! value with a randomly keyed hash, so the duration of a look-up reveals nothing about nearly
//! correct tickets. Every guess costs a connect request.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Extensions;
use tokio::time::Instant;

/// Length of a ticket in bytes.
pub(crate) const TICKET_LEN: usize = 16;
/// Maximum number of live tickets. A ticket is live for a few milliseconds, unless its client is
/// slow or never connects. The limit also bounds the number of connections that are set up at the
/// same time.
pub(crate) const CAPACITY: usize = 1024;
/// Lifetime of a ticket. The connection manager repeats a lost connect request after four seconds,
/// so a client may lose two requests in this time.
pub(crate) const LIFETIME: Duration = Duration::from_secs(10);
/// Number of spent tickets that are remembered, so that a refusal can name its cause.
const SPENT: usize = 1024;

/// A ticket. The bytes of a ticket are secret, so `Debug` does not show them.
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
    #[error(
        "ticket withdrawn: its TCP connection held the most of a full table (the client asks for \
         another)"
    )]
    Withdrawn,
}

/// Why no ticket can be issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the operating system returns no random bytes")]
pub(crate) struct NoRandomness;

/// The client that a ticket counts against.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The number of the client's TCP connection. All holders without a number count as one
    /// connection.
    pub(crate) connection: Option<u64>,
    /// The client's network, if the address is known.
    pub(crate) network: Option<Network>,
}

#[derive(Debug)]
pub(crate) struct Tickets {
    table: Mutex<TicketTable>,
    capacity: usize,
    lifetime: Duration,
}

#[derive(Debug, Default)]
struct TicketTable {
    live: HashMap<Ticket, Live>,
    /// The time of the next search for expired tickets. An Offer after this time removes expired
    /// tickets, even if the table is not full.
    next_search: Option<Instant>,
    issued: u64,
    spent: VecDeque<(Ticket, Refused)>,
}

#[derive(Debug)]
struct Live {
    expires: Instant,
    holder: Holder,
    /// Serial number, which orders live tickets by age.
    number: u64,
    /// The identity of the Offer's TCP connection.
    connection: Extensions,
}

impl Tickets {
    /// Creates an empty table with room for `capacity` live tickets.
    pub(crate) fn new(capacity: usize, lifetime: Duration) -> Self {
        Self { table: Mutex::default(), capacity, lifetime }
    }

    pub(crate) fn lifetime(&self) -> Duration {
        self.lifetime
    }

    /// Issues a ticket to `holder`, the client at the other end of `connection`.
    ///
    /// If the table is full, the TCP connection that holds the most tickets loses its oldest
    /// ticket. So a flood does not exclude other connections, whatever addresses the flood comes
    /// from.
    pub(crate) fn issue(
        &self,
        connection: Extensions,
        holder: Holder,
        now: Instant,
    ) -> Result<Ticket, NoRandomness> {
        let mut bytes = [0; TICKET_LEN];
        getrandom::fill(&mut bytes).map_err(|_| NoRandomness)?;
        let ticket = Ticket(bytes);
        let mut table = self.lock();
        // Remove expired tickets, because a client that sent a second request leaves a ticket
        // unused, and the ticket holds the client's certificates. Unless the table is full, search
        // only once in each lifetime, so that many Offers at a time do not all search.
        let is_full = table.live.len() >= self.capacity;
        if is_full || table.next_search.is_none_or(|next| next <= now) {
            table.expire(now);
            table.next_search = Some(now + self.lifetime);
        }
        if table.live.len() >= self.capacity {
            table.withdraw(holder);
        }
        let number = table.issued;
        table.issued += 1;
        table
            .live
            .insert(ticket, Live { expires: now + self.lifetime, holder, number, connection });
        Ok(ticket)
    }

    /// Uses a ticket, and returns the extensions with which the ticket was issued.
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

    fn lock(&self) -> MutexGuard<'_, TicketTable> {
        // Ignore poison, because each change leaves the table consistent, even if a panic
        // interrupts it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TicketTable {
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

    /// Withdraws the oldest ticket of the connection that holds the most tickets. If several
    /// connections hold this number, a connection of the network that holds the most tickets is
    /// chosen first, then the connection that asks.
    fn withdraw(&mut self, asking: Holder) {
        let mut connections: HashMap<Option<u64>, usize> = HashMap::new();
        let mut networks: HashMap<Option<Network>, usize> = HashMap::new();
        for Live { holder, .. } in self.live.values() {
            *connections.entry(holder.connection).or_default() += 1;
            *networks.entry(holder.network).or_default() += 1;
        }
        let first = self.live.iter().max_by_key(|(_, Live { holder, number, .. })| {
            let held = (connections.get(&holder.connection), networks.get(&holder.network));
            (held, *holder == asking, Reverse(*number))
        });
        if let Some(ticket) = first.map(|(ticket, _)| *ticket) {
            self.live.remove(&ticket);
            self.spend(ticket, Refused::Withdrawn);
        }
    }

    fn spend(&mut self, ticket: Ticket, how: Refused) {
        if self.spent.len() == SPENT {
            self.spent.pop_front();
        }
        self.spent.push_back((ticket, how));
    }
}

/// Marks a ticket as valid only for a bare connection, over which a diagnosis measures SENDs and
/// WRITEs without calls.
#[cfg(feature = "measure")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareTicket;

/// Maximum time for which a server serves a bare connection. A diagnosis takes less time.
#[cfg(feature = "measure")]
pub(crate) const BARE_LIMIT: Duration = Duration::from_secs(60);

/// Length in bits of the IPv6 prefix that counts as one client network. A host can take any address
/// of its /64.
const IPV6_PREFIX: u32 = 64;

/// An IPv4 address, or the /64 prefix of an IPv6 address. An IPv4-mapped IPv6 address counts as the
/// IPv4 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Network(IpAddr);

impl From<IpAddr> for Network {
    fn from(addr: IpAddr) -> Self {
        Self(match addr.to_canonical() {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => {
                let prefix = v6.to_bits() & (u128::MAX << (u128::BITS - IPV6_PREFIX));
                IpAddr::V6(prefix.into())
            }
        })
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
        let ticket = tickets.issue(connection, Holder::default(), now).unwrap();
        let connection = tickets.redeem(&ticket, now).unwrap();
        assert_eq!(connection.get::<&str>(), Some(&"alice"));
        assert_eq!(tickets.redeem(&ticket, now).unwrap_err(), Refused::Used);
    }

    #[tokio::test]
    async fn wrong_by_any_bit_is_unknown_and_harms_nothing() {
        let (tickets, now) = tickets();
        let ticket = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
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
        let ticket = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
        let later = now + tickets.lifetime();
        assert_eq!(tickets.redeem(&ticket, later).unwrap_err(), Refused::Expired);
        // The ticket stays expired, even if the clock goes back.
        assert_eq!(tickets.redeem(&ticket, now).unwrap_err(), Refused::Expired);
    }

    /// A client at the end of TCP connection `connection`, from `address`.
    fn client(connection: u64, address: &str) -> Holder {
        let address: IpAddr = address.parse().unwrap();
        Holder { connection: Some(connection), network: Some(address.into()) }
    }

    #[tokio::test]
    async fn a_full_table_refuses_nobody() {
        let (tickets, now) = tickets();
        for holder in [Holder::default(), client(1, "10.0.0.1"), client(2, "10.0.0.2")] {
            let issue = || tickets.issue(Extensions::new(), holder, now).unwrap();
            let first = issue();
            let more = [issue(), issue(), issue()];
            assert_eq!(tickets.redeem(&first, now).unwrap_err(), Refused::Withdrawn);
            assert_eq!(tickets.lock().live.len(), 3);
            assert!(more.iter().all(|ticket| tickets.redeem(ticket, now).is_ok()));
        }
    }

    #[tokio::test]
    async fn expired_tickets_go_before_any_is_withdrawn() {
        let (tickets, now) = tickets();
        let issue = |at| tickets.issue(Extensions::new(), Holder::default(), at).unwrap();
        let (first, later) = (issue(now), now + tickets.lifetime());
        let good = [issue(later - Duration::from_nanos(1)), issue(later), issue(later)];
        assert_eq!(tickets.redeem(&first, now).unwrap_err(), Refused::Expired);
        assert!(good.iter().all(|ticket| tickets.redeem(ticket, later).is_ok()));
    }

    #[tokio::test]
    async fn expired_tickets_stay_for_one_more_lifetime_at_most() {
        let now = Instant::now();
        let tickets = Tickets::new(CAPACITY, LIFETIME);
        let issue = |at| tickets.issue(Extensions::new(), Holder::default(), at).unwrap();
        for second in 0..10 * LIFETIME.as_secs() {
            issue(now + Duration::from_secs(second));
            assert!(tickets.lock().live.len() as u64 <= 2 * LIFETIME.as_secs());
        }
    }

    #[tokio::test]
    async fn the_connection_that_holds_most_loses_its_oldest() {
        let now = Instant::now();
        let tickets = Tickets::new(8, LIFETIME);
        let issue = |holder| tickets.issue(Extensions::new(), holder, now).unwrap();
        let lost =
            |ticket: &Ticket| tickets.redeem(ticket, now).map(drop) == Err(Refused::Withdrawn);
        // All connections come from one host, as through loopback, so addresses cannot tell them
        // apart.
        let (flood, quiet, late) =
            (client(1, "127.0.0.1"), client(2, "127.0.0.1"), client(3, "127.0.0.1"));
        let rails = [issue(quiet), issue(quiet), issue(quiet)];
        let mut flooded = VecDeque::from_iter((0..5).map(|_| issue(flood)));
        // A flood takes tickets only from itself.
        for _ in 0..20 {
            flooded.push_back(issue(flood));
            assert!(lost(&flooded.pop_front().unwrap()));
        }
        // Other connections take tickets from the flood, the oldest first.
        let good = issue(late);
        assert!(lost(&flooded.pop_front().unwrap()));
        for ticket in rails.iter().chain([&good]).chain(&flooded) {
            tickets.redeem(ticket, now).unwrap();
        }
    }

    #[tokio::test]
    async fn a_flood_of_connections_from_one_network_takes_from_that_network() {
        let now = Instant::now();
        let tickets = Tickets::new(16, LIFETIME);
        let issue = |holder| tickets.issue(Extensions::new(), holder, now).unwrap();
        let good = issue(client(0, "2001:db8:1:3::1"));
        // All addresses of an IPv6 /64 are one network, and an IPv4 address is the same in both
        // forms.
        for n in 1..500 {
            issue(client(n, &format!("2001:db8:1:2::{n}")));
        }
        tickets.redeem(&good, now).unwrap();
        let good = issue(client(500, "10.0.0.2"));
        for n in 501..1000 {
            issue(client(n, if n % 2 == 0 { "10.0.0.1" } else { "::ffff:10.0.0.1" }));
        }
        tickets.redeem(&good, now).unwrap();
        // Many tickets of one connection count more than many connections of one network.
        let good = issue(client(1000, "10.0.0.1"));
        for _ in 0..100 {
            issue(client(1001, "10.0.0.3"));
        }
        tickets.redeem(&good, now).unwrap();
    }

    #[tokio::test]
    async fn of_connections_that_hold_the_same_the_asking_one_loses() {
        let (tickets, now) = tickets();
        let issue = |n| tickets.issue(Extensions::new(), client(n, "10.0.0.1"), now).unwrap();
        let [first, _second, _third] = [issue(1), issue(2), issue(3)];
        let second = issue(2);
        let third = issue(3);
        for ticket in [first, second, third] {
            tickets.redeem(&ticket, now).unwrap();
        }
    }

    #[tokio::test]
    async fn memory_of_spent_tickets_is_bounded() {
        let (tickets, now) = tickets();
        let first = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
        tickets.redeem(&first, now).unwrap();
        for _ in 0..SPENT {
            let ticket = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
            tickets.redeem(&ticket, now).unwrap();
        }
        assert_eq!(tickets.lock().spent.len(), SPENT);
        assert_eq!(tickets.redeem(&first, now).unwrap_err(), Refused::Unknown);
    }

    #[tokio::test]
    async fn tickets_differ_and_do_not_show_in_logs() {
        let (tickets, now) = tickets();
        let a = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
        let b = tickets.issue(Extensions::new(), Holder::default(), now).unwrap();
        assert_ne!(a, b);
        assert_eq!(format!("{a:?}"), "Ticket(..)");
    }

    fn network(addr: &str) -> Network {
        Network::from(addr.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn an_ipv6_64_is_one_and_an_ipv4_address_is_one() {
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("::ffff:192.0.2.1"), network("::ffff:192.0.2.2"));
    }
}
