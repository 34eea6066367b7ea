//! Counters of what went which way.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a channel has carried since it was made, over all its clones and reconnects.
///
/// Bytes are payload bytes: the data of gRPC messages with their 5-byte prefix, without headers,
/// framing and control. The counters are read one by one, so that a snapshot taken while calls
/// run may be off by what moved meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TransportStats {
    /// Calls begun on a fast path.
    pub calls_fast: u64,
    /// Calls begun on TCP.
    pub calls_tcp: u64,
    /// Payload bytes sent by RDMA WRITE.
    pub bytes_sent_write: u64,
    /// Payload bytes sent eagerly, inside SENDs.
    pub bytes_sent_send: u64,
    /// Payload bytes sent over TCP.
    pub bytes_sent_tcp: u64,
    /// Payload bytes that the peer sent by RDMA WRITE.
    pub bytes_received_write: u64,
    /// Payload bytes that the peer sent eagerly, inside SENDs.
    pub bytes_received_send: u64,
    /// Payload bytes received over TCP.
    pub bytes_received_tcp: u64,
}

impl TransportStats {
    /// All payload bytes of both directions.
    pub fn payload_bytes(&self) -> u64 {
        self.bytes_sent_write
            + self.bytes_sent_send
            + self.bytes_sent_tcp
            + self.bytes_received_write
            + self.bytes_received_send
            + self.bytes_received_tcp
    }

    /// The part of the payload that went by RDMA WRITE, 0.0 to 1.0; 0.0 when nothing went at all.
    pub fn write_share(&self) -> f64 {
        let all = self.payload_bytes();
        if all == 0 {
            return 0.0;
        }
        (self.bytes_sent_write + self.bytes_received_write) as f64 / all as f64
    }
}

macro_rules! counters {
    ($($field:ident),* $(,)?) => {
        /// The live counters behind [`TransportStats`]; one field for each of its.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $field: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> TransportStats {
                TransportStats { $($field: self.$field.get(),)* }
            }
        }
    };
}

counters!(
    calls_fast,
    calls_tcp,
    bytes_sent_write,
    bytes_sent_send,
    bytes_sent_tcp,
    bytes_received_write,
    bytes_received_send,
    bytes_received_tcp,
);

/// A count.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Undoes an `add` of the same amount.
    pub(crate) fn take_back(&self, n: u64) {
        self.0.fetch_sub(n, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_of_all_payload() {
        let counters = Counters::default();
        assert_eq!(counters.snapshot().write_share(), 0.0);
        counters.bytes_sent_write.add(3);
        counters.bytes_received_tcp.add(1);
        let stats = counters.snapshot();
        assert_eq!(stats.payload_bytes(), 4);
        assert_eq!(stats.write_share(), 0.75);
    }
}
