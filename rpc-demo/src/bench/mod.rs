//! `rpc-demo bench` writes and reads objects, in sequential and in random order.

mod pass;
mod report;

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pass::{PASSES, Pass};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngCore, SeedableRng};
use report::{Figures, Report};
use tokio::task::JoinSet;
use tonic_rdma::Pool;

use crate::cli::{Bench, size_shown};
use crate::digest::Digest;
use crate::failure::Failure;
use crate::names::Name;
use crate::net::{self, Connection, Direction, Meter};
use crate::output;
use crate::pb::put_request::Head;
use crate::pb::{GetRequest, ObjectHead, RemoveRequest};
use crate::progress::{Bar, Progress};
use crate::signals::until_signal;
use crate::source::Piece;
use crate::transfer::{Pieces, send};

/// Maximum number of objects of one size.
const OBJECTS_MAX: u64 = 2000;
/// Number of offsets in the pattern at which an object can begin. Consecutive objects begin at
/// different offsets, so that their contents differ.
const SHIFT: usize = 4096;
/// Seed for contents and random order. The seed is constant, so that every run does the same work.
const SEED: u64 = 7;

/// Runs the measurements that the flags select.
pub(crate) async fn run(args: Bench) -> Result<(), Failure> {
    let connection = net::connect(&args.asked.remote.server, &args.asked.remote.path).await?;
    let text = format!("rpc-demo-bench-{:016x}", rand::random::<u64>());
    let dir = Name::parse(&text).map_err(|error| Failure::name(&text, error))?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut measured = pin!(measure(&args, &connection, &dir, &stop));
    let mut report = None;
    let done = until_signal(async {
        report = Some(measured.as_mut().await);
        Ok(())
    });
    let done = done.await;
    if report.is_none() {
        // The command was interrupted. The measurement ends first, because objects in flight could
        // otherwise arrive after the removal.
        stop.store(true, Ordering::Relaxed);
        let _ = until_signal(async { measured.await.map(drop) }).await;
    }
    // The objects are also removed after a failure or a signal, because nobody needs them any more.
    let request = RemoveRequest { name: text.clone(), recursive: true };
    let removed = connection.store().remove(request).await;
    done?;
    let report = report.transpose()?;
    let gone = |status: &tonic::Status| status.code() == tonic::Code::NotFound;
    match removed {
        Err(status) if !gone(&status) => {
            return Err(Failure::status(
                format!("cannot remove the bench's objects in '{dir}'"),
                &status,
            ));
        }
        _ => {}
    }
    let Some(report) = report else { return Ok(()) };
    if args.asked.json { output::json(&report) } else { output::line(format_args!("{report}")) }
}

/// Makes all passes for all sizes. The first failure sets `stop`. Once `stop` is set, the
/// measurement ends after the objects in flight.
async fn measure(
    args: &Bench,
    connection: &Connection,
    dir: &Name,
    stop: &Arc<AtomicBool>,
) -> Result<Report, Failure> {
    let sent = Meter::start(connection, Direction::Sent);
    let received = Meter::start(connection, Direction::Received);
    let mut figures = Vec::new();
    for &size in &args.sizes {
        let set = Arc::new(Set::new(args, connection, dir, size, stop)?);
        for pass in PASSES {
            figures.push(set.clone().pass(pass).await?);
        }
    }
    Ok(Report {
        jobs: args.parallel.jobs(),
        figures,
        sent: sent.route(),
        received: received.route(),
    })
}

/// Returns random bytes to send, so that the measurement includes no reading of files. The bytes
/// lie in pool memory if the pool has room for them.
fn pattern(pool: Option<Pool>, length: usize) -> Bytes {
    let mut random = SmallRng::seed_from_u64(SEED);
    if let Some(Ok(mut pinned)) = pool.map(|pool| pool.try_alloc(length)) {
        pinned.resize_zeroed(length);
        random.fill_bytes(pinned.as_mut_slice());
        return pinned.freeze();
    }
    let mut bytes = vec![0; length];
    random.fill_bytes(&mut bytes);
    bytes.into()
}

/// The objects of one size.
struct Set {
    connection: Connection,
    jobs: u16,
    chunk: usize,
    size: u64,
    names: Vec<Name>,
    /// The pattern has one chunk and `SHIFT` further bytes. Each message of an object is a slice of
    /// this pattern.
    pattern: Bytes,
    stop: Arc<AtomicBool>,
}

impl Set {
    fn new(
        args: &Bench,
        connection: &Connection,
        dir: &Name,
        size: u64,
        stop: &Arc<AtomicBool>,
    ) -> Result<Set, Failure> {
        let count = (args.amount / size).min(OBJECTS_MAX).max(args.parallel.jobs().into());
        let name = |index| {
            let below = format!("{size}/{index}");
            dir.join(&below).map_err(|error| Failure::name(&below, error))
        };
        let names = (0..count).map(name).collect::<Result<_, _>>()?;
        let pool = connection.pool();
        let chunk = connection.chunk(args.chunks.chunk_size);
        let chunk = usize::try_from(size).map_or(chunk, |size| size.min(chunk));
        Ok(Set {
            connection: connection.clone(),
            jobs: args.parallel.jobs(),
            chunk,
            size,
            names,
            pattern: pattern(pool, chunk + SHIFT),
            stop: stop.clone(),
        })
    }

    async fn pass(self: Arc<Self>, pass: Pass) -> Result<Figures, Failure> {
        let mut order: Vec<usize> = (0..self.names.len()).collect();
        if pass.at_random() {
            order.shuffle(&mut SmallRng::seed_from_u64(SEED));
        }
        let progress = Progress::start(Some(self.size.saturating_mul(order.len() as u64)));
        let queue = Arc::new(Mutex::new(order.into_iter()));
        let mut workers = JoinSet::new();
        let began = Instant::now();
        for _ in 0..self.jobs {
            let (set, queue) = (self.clone(), queue.clone());
            let bar = progress.file(&format!("{pass:?} {}", size_shown(self.size)), 0);
            workers.spawn(async move {
                let mut times = Vec::new();
                while !set.stop.load(Ordering::Relaxed) {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(index) = next else { break };
                    let began = Instant::now();
                    let done = if pass.writes() {
                        set.write(index, &bar).await
                    } else {
                        set.read(index, &bar).await
                    };
                    if done.is_err() {
                        set.stop.store(true, Ordering::Relaxed);
                    }
                    done?;
                    times.push(began.elapsed());
                }
                Ok(times)
            });
        }
        let mut times = Ok(Vec::new());
        while let Some(ended) = workers.join_next().await {
            let ended = ended
                .map_err(|error| Failure::new("the bench failed", error, ""))
                .and_then(|ended| ended);
            match (&mut times, ended) {
                (Ok(times), Ok(more)) => times.extend::<Vec<Duration>>(more),
                (Ok(_), Err(failure)) => times = Err(failure),
                (Err(_), _) => {}
            }
        }
        Ok(Figures::new(pass, self.size, times?, began.elapsed()))
    }

    fn name(&self, index: usize) -> Result<&Name, Failure> {
        self.names.get(index).ok_or_else(|| Failure::new("the bench failed", "it lost count", ""))
    }

    async fn write(&self, index: usize, bar: &Bar) -> Result<(), Failure> {
        let name = self.name(index)?;
        let from = index % SHIFT;
        let head =
            ObjectHead { name: name.as_str().to_owned(), size: Some(self.size), attributes: None };
        let pieces = Pieces::pattern(self.pattern.slice(from..from + self.chunk), self.size);
        send(&self.connection, Head::Object(head), pieces, &format!("cannot write '{name}'"), bar)
            .await?;
        Ok(())
    }

    async fn read(&self, index: usize, bar: &Bar) -> Result<(), Failure> {
        let name = self.name(index)?;
        let what = format!("cannot read '{name}'");
        let chunk_size = u32::try_from(self.chunk).unwrap_or_default();
        let request = GetRequest { name: name.as_str().to_owned(), chunk_size, range: None };
        let (_, mut pieces) = Pieces::get(&self.connection, request, what.clone()).await?;
        let mut arrived = Digest::default();
        loop {
            let Piece { data, end } = pieces.next().await?;
            arrived.add(&data);
            bar.add(data.len());
            match end {
                None => {}
                Some(promised) if promised == arrived && arrived.size == self.size => return Ok(()),
                Some(promised) => {
                    let why = format!("{arrived} came where {promised} was sent");
                    return Err(Failure::new(what, why, "repeat the command"));
                }
            }
        }
    }
}
