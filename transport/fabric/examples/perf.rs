//! Raw speed of a link: SEND round trips and WRITE bandwidth between two processes.
//!
//! ```text
//! perf serve ADDRESS:PORT       perf ADDRESS:PORT       over RDMA
//! perf serve shm                perf NAME               over shared memory, by the name that the server prints
//! ```

use std::error::Error;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, Fabric, Lending, Link, LinkConfig, LinkError, Posted, ShmAccess,
    ShmAddr, Work, WriteSource,
};
use tonic_rdma_memory::{Pool, PoolConfig};

const TIMEOUT: Duration = Duration::from_secs(10);
const ROUNDS: u32 = 5000;
const WINDOW: usize = 16;
const SIZES: [(usize, u32); 3] = [(4096, 5000), (65536, 1000), (1 << 20, 100)];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", "shm"] => {
            let name = ShmAddr::unique();
            println!("{}", name.name());
            serve(Fabric::shm(ShmAccess::SameUser, Lending::Off)?, name.into()).await
        }
        ["serve", addr] => {
            let addr: SocketAddr = addr.parse()?;
            serve(Fabric::at(addr.ip())?, addr.into()).await
        }
        [addr] => match addr.parse::<SocketAddr>() {
            Ok(addr) => {
                measure(Fabric::toward(addr, None, None, TIMEOUT).await?, addr.into()).await
            }
            Err(_) => {
                measure(
                    Fabric::shm(ShmAccess::SameUser, Lending::Off)?,
                    addr.parse::<ShmAddr>()?.into(),
                )
                .await
            }
        },
        _ => Err("usage: perf [serve] ADDRESS:PORT, perf serve shm, perf NAME".into()),
    }
}

struct Driver {
    link: AnyLink,
    out: Vec<Completion>,
    messages: Vec<Vec<u8>>,
    sent: u64,
    next: u64,
}

impl Driver {
    fn new(link: AnyLink) -> Driver {
        Driver { link, out: Vec::new(), messages: Vec::new(), sent: 0, next: 0 }
    }

    async fn poll(&mut self) -> Result<(), LinkError> {
        poll_fn(|cx| self.link.poll(cx, &mut self.out)).await?;
        for completion in self.out.drain(..) {
            match completion {
                Completion::Sent { id } => self.sent = id,
                Completion::Received { slot, len } => {
                    self.messages.push(self.link.recv_slot(slot, len).to_vec());
                    self.link.repost(slot)?;
                }
            }
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<Vec<u8>, LinkError> {
        while self.messages.is_empty() {
            self.poll().await?;
        }
        Ok(self.messages.remove(0))
    }

    fn queue(&mut self, work: Work) -> Result<(), LinkError> {
        self.next += 1;
        if self.link.queue(self.next, work, false)? == Posted::Done {
            self.sent = self.next;
        }
        Ok(())
    }

    fn send(&mut self, data: &[u8]) -> Result<(), LinkError> {
        let offset = (self.next % 64) as usize * 1024;
        self.link.block_mut()[offset..offset + data.len()].copy_from_slice(data);
        self.queue(Work::Send { offset, len: data.len() })?;
        self.link.ring_doorbell()
    }
}

async fn serve(fabric: Fabric, addr: Addr) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
    let mut listener = fabric.listen(&addr)?;
    let config = LinkConfig::default();
    let link = listener.accept().await?.accept(&config, &pool, b"", TIMEOUT).await?;
    let mut driver = Driver::new(link);
    let landing = pool.landing().alloc(1 << 20, 1 << 20)?.ok_or("no landing memory")?;
    driver.receive().await?;
    driver.link.share(landing.rkey())?;
    let mut grant = landing.addr().to_le_bytes().to_vec();
    grant.extend(landing.rkey().to_le_bytes());
    driver.send(&grant)?;
    while let Ok(message) = driver.receive().await {
        driver.send(&message)?;
    }
    // The connection has ended; so may the memory.
    drop(driver);
    drop(landing);
    Ok(())
}

async fn measure(fabric: Fabric, addr: Addr) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
    let connected = fabric.connect(&addr, &LinkConfig::default(), &pool, b"", TIMEOUT).await?;
    let mut driver = Driver::new(connected.link);
    driver.send(b"grant")?;
    let grant = driver.receive().await?;
    let (remote_addr, rkey) = grant.split_at_checked(8).ok_or("short grant")?;
    let (remote_addr, rkey) =
        (u64::from_le_bytes(remote_addr.try_into()?), u32::from_le_bytes(rkey.try_into()?));

    let start = Instant::now();
    for _ in 0..ROUNDS {
        driver.send(&[7; 64])?;
        driver.receive().await?;
    }
    let each = start.elapsed() / ROUNDS;
    println!("{}: SEND 64 B round trip {:.1} us", fabric.name(), each.as_secs_f64() * 1e6);

    for (size, count) in SIZES {
        let mut buf = pool.try_alloc(size)?;
        buf.resize_zeroed(size);
        let bytes = buf.freeze();
        let start = Instant::now();
        let last = driver.next + u64::from(count);
        while driver.sent < last {
            let room = WINDOW.min(driver.link.send_room());
            let in_flight = (driver.next - driver.sent) as usize;
            for _ in in_flight..room.max(in_flight).min(WINDOW) {
                if driver.next == last {
                    break;
                }
                let src = WriteSource::Bytes(pool.resolve(&bytes).ok_or("not pool memory")?);
                driver.queue(Work::Write { src, remote_addr, rkey })?;
            }
            driver.link.ring_doorbell()?;
            if driver.sent < driver.next {
                driver.poll().await?;
            }
        }
        driver.send(b"end")?;
        driver.receive().await?;
        let rate = size as f64 * f64::from(count) / start.elapsed().as_secs_f64() / 1e6;
        println!("{}: RDMA WRITE {size:7} B x {count}: {rate:.1} MB/s", fabric.name());
    }
    if let AnyLink::Shm(link) = &driver.link {
        println!("{:?}", link.stats());
    }
    Ok(())
}
