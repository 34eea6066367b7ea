//! Contenders from other projects. rdma-io-tonic is tonic over a byte stream over RDMA. ruapc is an
//! independent RPC stack. iceoryx2 hands over messages in shared memory. `compare --neighbours`
//! runs this program as the client and as the server of each of these contenders. Each contender is
//! configured as its documentation recommends, with the exceptions that benches/README.md lists.

#[cfg(feature = "rdma")]
mod byte_stream;
#[cfg(feature = "rdma")]
mod rpc_stack;
mod shared_memory;

use anyhow::{Context as _, bail};
use benches::{
    contender::{Contender, Neighbour, Transport},
    role::{Placement, Role},
};
use clap::Parser;
use std::process::ExitCode;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    role: Role,
}

/// The main function of the programs, which differ in their allocators.
pub fn main() -> ExitCode {
    let args = Args::parse();
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("neighbours: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the program as a task, because the future passed to `block_on` is polled only after the
/// runtime has polled for events once more.
fn start(args: Args) -> anyhow::Result<()> {
    let runtime = args.role.runtime(&args.placement)?;
    runtime.block_on(async { tokio::spawn(run(args)).await.context("it has panicked")? })
}

async fn run(args: Args) -> anyhow::Result<()> {
    let Role { serve, client, server_addr, .. } = args.role;
    let transport = |contender: Option<Contender>| contender.map(Contender::transport);
    match (transport(serve), transport(client)) {
        (Some(Transport::Neighbour(neighbour)), _) => match neighbour {
            Neighbour::Iceoryx2 => shared_memory::serve(),
            #[cfg(feature = "rdma")]
            Neighbour::RdmaIoTonic => byte_stream::serve(args.placement.addr).await,
            #[cfg(feature = "rdma")]
            Neighbour::Ruapc => rpc_stack::serve(args.placement.addr).await,
            #[cfg(not(feature = "rdma"))]
            _ => bail!("{neighbour:?} needs the feature `rdma`, which this was built without"),
        },
        (_, Some(Transport::Neighbour(neighbour))) => match neighbour {
            Neighbour::Iceoryx2 => shared_memory::client(server_addr).await,
            #[cfg(feature = "rdma")]
            Neighbour::RdmaIoTonic => byte_stream::client(server_addr).await,
            #[cfg(feature = "rdma")]
            Neighbour::Ruapc => rpc_stack::client(server_addr).await,
            #[cfg(not(feature = "rdma"))]
            _ => bail!("{neighbour:?} needs the feature `rdma`, which this was built without"),
        },
        _ => {
            bail!("compare starts this program, when it is told where it is: see benches/README.md")
        }
    }
}
