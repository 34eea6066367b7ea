//! Measures the raw speed of a link between two processes: SENDs there and back, and WRITEs in both
//! directions.
//!
//! ```text
//! perf serve ADDRESS:PORT       perf ADDRESS:PORT [asleep]       over RDMA
//! perf serve shm                perf NAME [asleep]               over shared memory, by the name that the server prints
//! ```
//!
//! With `asleep` the client's end does not poll before it sleeps. The same holds for a server
//! started with `perf serve asleep ADDRESS:PORT`.

use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tonic_rdma_fabric::bare::{self, Bare, BareError, BareLimits, MAX_ECHOES};
use tonic_rdma_fabric::{Addr, Fabric, Lending, LinkConfig, LinkError, ShmAccess, ShmAddr};
use tonic_rdma_memory::{Pool, PoolConfig};

const TIMEOUT: Duration = Duration::from_secs(10);
const ECHOES: usize = 5000;
const WINDOW: usize = 16;
const SIZES: [(usize, usize); 3] = [(4096, 5000), (65536, 1000), (1 << 20, 100)];
const LIMITS: BareLimits = BareLimits {
    places: 8,
    place_len: 1 << 20,
    landing_part: 1,
    source_len: 0,
    requested: u64::MAX,
    requested_writes: u64::MAX,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (asleep, words): (Vec<&str>, Vec<&str>) =
        args.iter().map(String::as_str).partition(|word| *word == "asleep");
    let mut config = bare::config();
    if !asleep.is_empty() {
        config.busy_poll_limit = Duration::ZERO;
    }
    match words[..] {
        ["serve", "shm"] => {
            let name = ShmAddr::unique();
            println!("{}", name.name());
            serve(Fabric::shm(ShmAccess::SameUser, Lending::Off)?, name.into(), &config).await
        }
        ["serve", addr] => {
            let addr: SocketAddr = addr.parse()?;
            serve(Fabric::at(addr.ip())?, addr.into(), &config).await
        }
        [addr] => match addr.parse::<SocketAddr>() {
            Ok(addr) => {
                let fabric = Fabric::toward(addr, None, None, TIMEOUT).await?;
                measure(fabric, addr.into(), &config).await
            }
            Err(_) => {
                let fabric = Fabric::shm(ShmAccess::SameUser, Lending::Off)?;
                measure(fabric, addr.parse::<ShmAddr>()?.into(), &config).await
            }
        },
        _ => Err("usage: perf [serve] ADDRESS:PORT | shm [asleep]".into()),
    }
}

async fn serve(fabric: Fabric, addr: Addr, config: &LinkConfig) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
    let incoming = fabric.listen(&addr)?.accept().await?;
    let link = incoming.accept(config, &pool, b"", TIMEOUT).await?;
    match bare::serve(link, pool, LIMITS).await {
        Err(BareError::Link(LinkError::Disconnected { .. })) => Ok(()),
        ended => Ok(ended?),
    }
}

async fn measure(fabric: Fabric, addr: Addr, config: &LinkConfig) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
    let connected = fabric.connect(&addr, config, &pool, b"", TIMEOUT).await?;
    let mut bare = Bare::open(connected.link, pool, LIMITS).await?;
    bare.echo(64, ECHOES / 10, 1).await?;
    for in_flight in [1, MAX_ECHOES] {
        let began = Instant::now();
        bare.echo(64, ECHOES, in_flight).await?;
        let each = began.elapsed() / ECHOES as u32;
        println!("64 B there and back, {in_flight} in flight: {each:?} each");
    }
    let longest = bare.longest();
    for (len, count) in SIZES.into_iter().filter(|(len, _)| *len <= longest) {
        for (way, name) in [(true, "to the server"), (false, "from the server")] {
            let began = Instant::now();
            match way {
                true => bare.write(len, count, WINDOW).await?,
                false => bare.written(len, count, WINDOW).await?,
            }
            let rate = (len * count) as f64 / began.elapsed().as_secs_f64() / 1e6;
            println!("WRITEs of {len} bytes {name}, {WINDOW} in flight: {rate:.0} MB/s");
        }
    }
    bare.close();
    Ok(())
}
