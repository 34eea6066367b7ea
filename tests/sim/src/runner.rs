//! Many seeds, on all processors.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::figures::Figures;
use crate::run::{Options, Report, run};

thread_local! {
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Panics of this thread, those in tasks too, which tokio would keep to itself.
pub(crate) struct Panics;

impl Panics {
    pub(crate) fn watch() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let watched = PANICS.with(|panics| match &mut *panics.borrow_mut() {
                    Some(panics) => {
                        panics.push(format!("panic: {info}"));
                        true
                    }
                    None => false,
                });
                if !watched {
                    usual(info);
                }
            }));
        });
        PANICS.with(|panics| *panics.borrow_mut() = Some(Vec::new()));
        Panics
    }

    pub(crate) fn seen(self) -> Vec<String> {
        PANICS.with(|panics| panics.borrow_mut().take()).unwrap_or_default()
    }
}

/// A run that takes longer than this by the real clock goes round in circles.
const STUCK: Duration = Duration::from_secs(300);

/// Which seeds to run.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// So many.
    Count(u64),
    /// For so long, by the real clock.
    Time(Duration),
}

/// Runs seeds from `first` on, and calls `failed` with every report that has something wrong. Ends
/// early after `give_up` of those.
pub fn seeds(
    first: u64,
    until: Until,
    options: &Options,
    give_up: u64,
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
                        if over || failures.load(SeqCst) >= give_up {
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
                if let Some((seed, _)) = running.values().find(|(_, since)| since.elapsed() > STUCK)
                    && !done.load(SeqCst)
                {
                    eprintln!(
                        "seed {seed} goes round in circles: it runs for {STUCK:?}\n{}",
                        replay(*seed, options)
                    );
                    std::process::exit(101);
                }
            }
        });
        for worker in workers {
            // A panic of the runner itself shows when the scope ends.
            let _ = worker.join();
        }
        done.store(true, SeqCst);
        watchdog.thread().unpark();
    });
    figures.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The command that runs a seed again.
pub fn replay(seed: u64, options: &Options) -> String {
    let theme =
        options.theme.map_or(String::new(), |theme| format!(" --theme {theme:?}").to_lowercase());
    format!("again, with every event:\n    tests/sim/run replay {seed}{theme} --trace")
}
