//! Runs many seeds on all processors.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::figures::Figures;
use crate::run::{Options, Report, run};

/// A run that takes longer than this in real time counts as stuck.
const STUCK_LIMIT: Duration = Duration::from_secs(300);

/// Which seeds to run.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// This number of seeds.
    Count(u64),
    /// All seeds whose runs begin within this real time.
    Time(Duration),
}

/// Runs seeds from `first` on, and calls `failed` with the report of every seed that failed. Stops
/// after `max_failures` of those.
pub fn seeds(
    first: u64,
    until: Until,
    options: &Options,
    max_failures: u64,
    failed: impl Fn(&Report) + Sync,
) -> Figures {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let started = Instant::now();
    let (next, failures, done) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let figures = Mutex::new(Figures::default());
    let running = Mutex::new(BTreeMap::<usize, (u64, Instant)>::new());
    let lock = |m: &Mutex<Figures>, report: &Report| {
        m.lock().unwrap_or_else(PoisonError::into_inner).add(report)
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (next, failures, figures, running, failed) =
                    (&next, &failures, &figures, &running, &failed);
                scope.spawn(move || {
                    loop {
                        let n = next.fetch_add(1, SeqCst);
                        let over = match until {
                            Until::Count(count) => n >= count,
                            Until::Time(time) => started.elapsed() >= time,
                        };
                        if over || failures.load(SeqCst) >= max_failures {
                            return;
                        }
                        let seed = first.wrapping_add(n);
                        let note = |what| {
                            running
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .insert(thread, what)
                        };
                        note((seed, Instant::now()));
                        let report = run(seed, options);
                        lock(figures, &report);
                        if !report.wrong.is_empty() {
                            failures.fetch_add(1, SeqCst);
                            failed(&report);
                        }
                    }
                })
            })
            .collect();
        let watchdog = scope.spawn(|| {
            while !done.load(SeqCst) {
                std::thread::park_timeout(Duration::from_secs(1));
                let running = running.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((seed, _)) =
                    running.values().find(|(_, since)| since.elapsed() > STUCK_LIMIT)
                    && !done.load(SeqCst)
                {
                    eprintln!(
                        "seed {seed} makes no progress: it has run for {STUCK_LIMIT:?}\n{}",
                        replay(*seed, options)
                    );
                    std::process::exit(101);
                }
            }
        });
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, SeqCst);
        watchdog.thread().unpark();
        // A run that fails is a result. A panic here is one of the runner itself.
        for end in ends {
            end.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    figures.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The command that runs a seed again, for the report of a failure.
pub fn replay(seed: u64, options: &Options) -> String {
    let theme =
        options.theme.map_or(String::new(), |theme| format!(" --theme {theme:?}").to_lowercase());
    format!("again, with every event:\n    tests/sim/run replay {seed}{theme} --trace")
}
