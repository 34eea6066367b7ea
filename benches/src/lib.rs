//! Side-by-side comparisons, and counted costs.
//!
//! `compare` runs contenders in turns within one run; figures of different runs say little on a shared machine.
//!
//! | module | what |
//! |---|---|
//! | [`contender`] | who is compared |
//! | [`service`] | what is called, and the server process of a contender |
//! | [`client`] | a connection to such a server |
//! | [`raw`] | both, of a bare link: the limit |
//! | [`work`] | the rows: which calls, of which size, how many at a time |
//! | [`measure`] | one round of a row over one connection |
//! | [`cost`] | what a round costs: CPU time, context switches, system calls |
//! | [`costs`] | what does not vary: instructions, allocations, doorbells, held against a record |
//! | [`cpu`] | which processor a process runs on |
//! | [`report`] | medians, ratios, table, JSON, assertions |

pub mod client;
pub mod contender;
pub mod cost;
pub mod costs;
pub mod cpu;
pub mod measure;
pub mod raw;
pub mod report;
pub mod service;
pub mod work;

/// The messages and stubs generated from `proto/bench.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("tonic_rdma.bench.v1");

    /// The same stubs, with the zero-copy codec.
    pub mod zero_copy {
        include!(concat!(env!("OUT_DIR"), "/zero_copy/tonic_rdma.bench.v1.rs"));
    }
}
