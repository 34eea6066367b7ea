//! Side-by-side comparisons, and counted costs.
//!
//! `compare` runs contenders in turns within one run; figures of different runs say little on a
//! shared machine.
//!
//! | module | what |
//! |---|---|
//! | [`contender`] | who is compared |
//! | [`allocator`] | with which allocator |
//! | [`role`] | what the processes of a contender are told, and do |
//! | [`pair`] | those processes, as `compare` sees them |
//! | [`service`] | what is called, and the server process |
//! | [`session`] | the client process |
//! | [`client`] | a connection to a server |
//! | [`raw`] | both, of a bare link: the limit |
//! | [`memcpy`] | the other limit |
//! | [`work`] | the rows: which calls, of which size, how many at a time |
//! | [`measure`] | one round of a row |
//! | [`cost`] | what a round costs: CPU time, context switches, system calls |
//! | [`instructions`] | the same in instructions, where the machine counts them |
//! | [`machine`] | processor, kernel, C library and allocator, beside which figures are told |
//! | [`footprint`] | memory, descriptors and threads of a process |
//! | [`server_figures`] | what a server process says of its pools and copies |
//! | [`copies`] | the same in bytes that are copied |
//! | [`costs`] | what does not vary: instructions, allocations, doorbells, held against a record |
//! | [`cpu`] | which processor a process runs on |
//! | [`scale`] | many clients, connections and streams |
//! | [`threads`] | calls on several threads at a time |
//! | [`report`] | medians, ratios, table, JSON, assertions |
//! | [`sample`] | what a round yields |
//! | [`exit`] | the exit code of a program |
//! | [`results`] | recorded runs, and the documents made of them |
//! | [`plot`] | SVG |

pub mod allocator;
pub mod client;
pub mod contender;
pub mod copies;
pub mod cost;
pub mod costs;
pub mod cpu;
pub mod exit;
pub mod footprint;
pub mod instructions;
pub mod machine;
pub mod measure;
pub mod memcpy;
pub mod pair;
pub mod plot;
pub mod raw;
pub mod report;
pub mod results;
pub mod role;
pub mod sample;
pub mod scale;
pub mod server_figures;
pub mod service;
pub mod session;
pub mod threads;
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
