//! Comparative measurements, and counted costs.
//!
//! `compare` runs all contenders alternately within one run, because on a shared machine the
//! figures of different runs cannot be compared.
//!
//! | module | what |
//! |---|---|
//! | [`contender`] | the contenders |
//! | [`allocator`] | allocators of the contenders |
//! | [`role`] | command line and main function of the processes that `compare` starts |
//! | [`pair`] | controls these processes |
//! | [`service`] | the service, and the server process |
//! | [`session`] | the client process |
//! | [`client`] | a connection to a server |
//! | [`raw`] | both ends of a bare link, as an upper bound |
//! | [`memcpy`] | copies, as another upper bound |
//! | [`own_codec`] | a codec of this program |
//! | [`work`] | the rows: kind, size and concurrency of calls |
//! | [`measure`] | one round of a row |
//! | `open_loop` | one round of a row whose calls start at given times |
//! | [`cost`] | the costs of a round: CPU time, context switches, system calls |
//! | [`instructions`] | instructions, where the machine counts them |
//! | [`machine`] | processor, kernel, C library and allocator, reported with the figures |
//! | [`footprint`] | memory, descriptors and threads of a process |
//! | [`server_figures`] | statistics of a server process: pools and copies |
//! | [`copies`] | counts copied bytes |
//! | `buffers` | buffers for messages to land in |
//! | [`costs`] | counted instructions, allocations and doorbells, compared with a record |
//! | [`cpu`] | processor affinity |
//! | [`scale`] | many clients, connections and streams |
//! | [`report`] | medians, ratios, table, JSON, assertions |
//! | [`sample`] | the result of a round |
//! | [`exit`] | the exit code of a program |
//! | [`remote`] | servers on another host |
//! | [`results`] | recorded runs, and the documents generated from them |
//! | [`plot`] | SVG |

pub mod allocator;
mod buffers;
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
mod open_loop;
pub mod own_codec;
pub mod pair;
pub mod plot;
mod process;
pub mod raw;
pub mod remote;
pub mod report;
pub mod results;
pub mod role;
pub mod sample;
pub mod scale;
pub mod server_figures;
pub mod service;
pub mod session;
pub mod work;

/// The messages and stubs generated from `proto/bench.proto`.
#[allow(missing_docs, unreachable_pub)]
pub mod pb {
    tonic::include_proto!("tonic_rdma.bench.v1");

    /// The same stubs, with the zero-copy codec.
    pub mod zero_copy {
        include!(concat!(env!("OUT_DIR"), "/zero_copy/tonic_rdma.bench.v1.rs"));
    }

    /// The same stubs, with [`OwnCodec`](crate::own_codec::OwnCodec).
    pub mod own {
        include!(concat!(env!("OUT_DIR"), "/own/tonic_rdma.bench.v1.rs"));
    }
}
