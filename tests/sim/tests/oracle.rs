//! Tests of the simulation itself: the same seed gives the same run, and injected bugs are found.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use tonic_rdma_fabric::sim::{EndId, Event, InjectedBug, Observer};
use tonic_rdma_proto::frame::{Composer, Frame};
use tonic_rdma_sim::{Figures, Options, Report, Sabotage, Theme, WireChecker, run};

fn assert_passed(report: &Report) {
    assert!(
        report.wrong.is_empty(),
        "seed {} ({:?}): {:#?}",
        report.seed,
        report.theme,
        report.wrong
    );
}

/// Each seed runs twice: on two threads, at different addresses, and in parallel with other runs.
#[test]
fn the_same_seed_gives_the_same_run() {
    let hashes = |order: Vec<u64>| {
        let mut hashes: Vec<(u64, u64, u64)> = order
            .into_iter()
            .map(|seed| {
                let report = run(seed, &Options::default());
                (seed, report.hash, report.events)
            })
            .collect();
        hashes.sort_unstable();
        hashes
    };
    let seeds = 0..150;
    let (first, second) = std::thread::scope(|scope| {
        let forwards = scope.spawn(|| hashes(seeds.clone().collect()));
        let backwards = scope.spawn(|| hashes(seeds.clone().rev().collect()));
        (forwards.join().unwrap(), backwards.join().unwrap())
    });
    assert_eq!(first, second);
    let mut different: Vec<u64> = first.iter().map(|(_, hash, _)| *hash).collect();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 150, "no two seeds give the same run");
    assert!(first.iter().filter(|(_, _, events)| *events > 100).count() > 100);
}

#[test]
fn every_theme_has_runs_that_are_well() {
    let mut figures = Figures::default();
    for theme in Theme::all() {
        for seed in 0..8 {
            let report = run(seed, &Options { theme: Some(*theme), ..Options::default() });
            assert_passed(&report);
            figures.add(&report);
        }
    }
    assert!(figures.too_long > 0, "no buffer was too short:\n{figures}");
}

/// Injects one bug into the fabric, early and late, and counts the runs in which it occurred and in
/// which it was found.
fn count_runs(injected_bug: InjectedBug) -> (usize, usize, Vec<String>) {
    let (mut broken, mut found, mut what) = (0, 0, Vec::new());
    for seed in 0..12 {
        for after in [0, 3, 20] {
            let theme = Some(if seed % 2 == 0 { Theme::Calm } else { Theme::Latency });
            let report = run(
                seed,
                &Options { theme, injected_bug: Some((injected_bug, after)), ..Options::default() },
            );
            broken += usize::from(report.broken);
            found += usize::from(report.broken && !report.wrong.is_empty());
            what.extend(report.wrong.into_iter().take(1));
        }
    }
    println!("{injected_bug:?}: broken in {broken} runs, found in {found}; {what:#?}");
    (broken, found, what)
}

macro_rules! found {
    ($($name:ident: $injected_bug:ident, $min_percent:literal %)*) => { $(
        #[test]
        fn $name() {
            let (broken, found, what) = count_runs(InjectedBug::$injected_bug);
            assert!(broken >= 10, "broken in {broken} runs only");
            assert!(found * 100 >= broken * $min_percent, "found in {found} of {broken}: {what:#?}");
        }
    )* };
}

// Some bugs have no effect. A changed or late byte may belong to a message that its receiver drops
// unread. A changed SEND may be a PING. A link that sends little may never need a completion.
found! {
    a_write_after_done_is_found: RepeatWrite, 100%
    a_repeated_send_is_found: RepeatSend, 100%
    a_lost_send_is_found: LoseSend, 90%
    a_lost_recv_is_found: LoseRepost, 100%
    a_registration_that_stays_is_found: KeepRegistration, 100%
    a_changed_byte_of_a_write_is_found: FlipWrite, 70%
    a_late_write_is_found: LateWrite, 70%
    a_changed_byte_of_a_send_is_found: FlipSend, 50%
    lost_completions_are_found: LoseCompletions, 70%
}

/// In every third run, pool memory may be lent.
#[test]
fn a_lease_that_is_returned_early_is_found() {
    let (mut broken, mut found, mut what) = (0, 0, Vec::new());
    for seed in (0..90).step_by(3) {
        let injected_bug = Some((InjectedBug::ReturnEarly, 0));
        let options = Options { theme: Some(Theme::Calm), injected_bug, ..Options::default() };
        let report = run(seed, &options);
        broken += usize::from(report.broken);
        found += usize::from(report.broken && !report.wrong.is_empty());
        what.extend(report.wrong.into_iter().take(1));
    }
    assert!(broken >= 10, "broken in {broken} runs only");
    // The reader has often dropped the bytes before the owner learns that the lease was returned.
    assert!(found * 100 >= broken * 30, "found in {found} of {broken}: {what:#?}");
    assert!(what.iter().any(|what| what.contains("while its memory is read")), "{what:#?}");
}

fn is_found(sabotage: Sabotage, words: &str) {
    let mut found = 0;
    for seed in 0..6 {
        let options =
            Options { theme: Some(Theme::Calm), sabotage: Some(sabotage), ..Options::default() };
        let report = run(seed, &options);
        found += usize::from(report.wrong.iter().any(|wrong| wrong.contains(words)));
    }
    assert!(found >= 3, "{sabotage:?}: found in {found} of 6 runs");
}

#[test]
fn a_program_that_is_wrong_is_found() {
    is_found(Sabotage::HoldBytes, "in use");
    is_found(Sabotage::LeaveTask, "1 tasks are left");
    is_found(Sabotage::RepeatCall, "twice");
    is_found(Sabotage::Hang, "hang");
    is_found(Sabotage::Panic, "as told");
}

/// A connection between two devices.
struct Wire(Arc<WireChecker>);

const CLIENT: EndId = EndId(0);
const SERVER: EndId = EndId(1);

impl Wire {
    fn new() -> Self {
        let checker = Arc::new(WireChecker::new(false));
        for (end, peer, device) in [(CLIENT, SERVER, "c"), (SERVER, CLIENT, "s")] {
            checker.event(Event::Made { end, device, recv_slots: 4, bytes: 512 });
            checker.event(Event::Joined { end, peer, connecting: end == CLIENT });
        }
        Wire(checker)
    }

    fn send(&self, end: EndId, credits: u16, frames: &[Frame]) -> &Self {
        self.send_full(end, credits, false, frames)
    }

    /// Like [`send`](Self::send). `full` says whether the credits are for full slots.
    fn send_full(&self, end: EndId, credits: u16, full: bool, frames: &[Frame]) -> &Self {
        let peer = if end == CLIENT { SERVER } else { CLIENT };
        let mut slot = [0; 1024];
        let mut composer = Composer::new(&mut slot);
        assert!(frames.iter().all(|frame| composer.add(frame)));
        if full {
            composer.full();
        }
        let len = composer.finish(credits);
        self.0.event(Event::Queued { end, id: 0, write: false, addr: 0, len });
        self.0.event(Event::Completed { end, id: 0 });
        self.0.event(Event::Sent { end, peer, message: &slot[..len] });
        self
    }

    /// Creates a connection on which the server has granted 1000 bytes at address 5000.
    fn with_grant() -> Self {
        let wire = Wire::new();
        wire.send(CLIENT, 0, &[]).send(SERVER, 0, &[GRANT]);
        wire
    }

    fn write(&self, addr: u64, rkey: u32, len: usize) -> &Self {
        self.0.event(Event::Written { end: CLIENT, peer: SERVER, addr, rkey, len });
        self
    }

    fn take(&self, end: EndId) -> &Self {
        self.0.event(Event::Received { end, len: 8 });
        self.0.event(Event::Reposted { end, bytes: 512 });
        self
    }

    fn wrong(&self, rule: &str) {
        let wrong = self.0.wrong();
        assert!(wrong.iter().any(|w| w.starts_with(rule)), "{rule}: {wrong:?}");
    }

    fn right(&self) {
        assert_eq!(self.0.wrong(), Vec::<String>::new());
    }
}

const GRANT: Frame = Frame::Grant { stream: 1, id: 7, rkey: 9, len: 1000, addr: 5000 };
const DONE: Frame = Frame::Done { stream: 1, end: true, id: 7, len: 600, begin: 0 };

#[test]
fn the_wire_checker_lets_pass_what_is_right() {
    let wire = Wire::with_grant();
    wire.write(5000, 9, 500).write(5500, 9, 100).send(CLIENT, 0, &[DONE]);
    wire.take(SERVER).take(SERVER).send(
        SERVER,
        2,
        &[Frame::Grant { stream: 0, id: 7, rkey: 9, len: 64, addr: 5100 }],
    );
    wire.send(CLIENT, 0, &[Frame::Abort { id: 7 }]).right();
}

#[test]
fn the_wire_checker_knows_the_rules_of_credits() {
    let wire = Wire::new();
    wire.send(SERVER, 0, &[]).wrong("R3");
    let wire = Wire::new();
    wire.send(CLIENT, 1, &[]).wrong("R1");
    let wire = Wire::new();
    (0..4).for_each(|_| _ = wire.send(CLIENT, 0, &[]));
    wire.wrong("R2: end 0 spends its last credit");
    let wire = Wire::new();
    (0..5).for_each(|_| _ = wire.send(CLIENT, 0, &[]));
    wire.wrong("R2: end 0 has sent 5 messages on 4 credits");
    let wire = Wire::new();
    wire.0.event(Event::Reposted { end: CLIENT, bytes: 512 });
    wire.wrong("R1");
}

#[test]
fn the_wire_checker_knows_the_sizes_of_recvs() {
    let long = Frame::Data { stream: 1, end: false, data: vec![0; 600].into() };
    let frames = [long];
    let grown = || {
        let wire = Wire::new();
        wire.send(CLIENT, 0, &[]).take(SERVER);
        wire.0.event(Event::Grown { end: SERVER, recv_slots: 2, bytes: 1024 });
        wire.send(SERVER, 1, &[]);
        wire
    };
    // Four short RECVs are posted before the long RECVs.
    let wire = grown();
    wire.send_full(SERVER, 2, true, &[]).right();
    (0..4).for_each(|_| _ = wire.send(CLIENT, 0, &[]));
    wire.send(CLIENT, 0, &frames).right();
    let wire = grown();
    wire.send_full(SERVER, 2, true, &[])
        .send(CLIENT, 0, &frames)
        .wrong("R2: end 0 sends 616 bytes");
    grown().send(SERVER, 1, &[]).wrong("R1: end 1 returns credits for RECVs of another length");
    let wire = Wire::new();
    wire.send(CLIENT, 0, &[]).take(SERVER).send_full(SERVER, 1, true, &[]).wrong("R1");
}

#[test]
fn the_wire_checker_knows_the_rules_of_memory() {
    let done = |len| Frame::Done { stream: 1, end: false, id: 7, len, begin: 0 };
    Wire::with_grant().write(5001, 9, 10).wrong("R9");
    Wire::with_grant().write(5000, 9, 10).write(5000, 9, 10).wrong("R9");
    Wire::with_grant().write(5000, 9, 1001).wrong("R9");
    Wire::with_grant().write(4999, 9, 10).wrong("R9");
    Wire::with_grant().write(5000, 8, 10).wrong("R12");
    Wire::with_grant().write(5000, 9, 10).send(CLIENT, 0, &[done(11)]).wrong("R4");
    Wire::with_grant()
        .write(5000, 9, 10)
        .send(CLIENT, 0, &[done(10)])
        .write(5010, 9, 1)
        .wrong("R9");
    Wire::with_grant()
        .send(CLIENT, 0, &[Frame::Abort { id: 7 }, Frame::Abort { id: 7 }])
        .wrong("R9");
    let other = Frame::Done { stream: 3, end: false, id: 7, len: 1, begin: 0 };
    Wire::with_grant().write(5000, 9, 1).send(CLIENT, 0, &[other]).wrong("R9");

    // WRITEs may begin anywhere in a standing grant, leave no gaps, and DONE says where they began.
    let standing = || {
        let wire = Wire::with_grant();
        wire.send(SERVER, 0, &[Frame::Grant { stream: 0, id: 8, rkey: 9, len: 100, addr: 7000 }]);
        wire
    };
    let done = |begin| Frame::Done { stream: 1, end: false, id: 8, len: 20, begin };
    standing().write(7042, 9, 10).write(7052, 9, 10).send(CLIENT, 0, &[done(42)]).right();
    standing().write(7042, 9, 10).write(7052, 9, 10).send(CLIENT, 0, &[done(41)]).wrong("R4");
    standing().write(7042, 9, 10).write(7053, 9, 10).wrong("R9");
    standing().write(7042, 9, 59).wrong("R9");

    let again = Frame::Grant { stream: 1, id: 8, rkey: 9, len: 10, addr: 5990 };
    Wire::with_grant().send(SERVER, 0, &[again]).wrong("R8");
    let wire = Wire::with_grant();
    wire.0.event(Event::Queued { end: SERVER, id: 0, write: true, addr: 5999, len: 1 });
    wire.wrong("R8");
    let wire = Wire::with_grant();
    wire.0.event(Event::Queued { end: CLIENT, id: 0, write: true, addr: 5999, len: 1 });
    wire.right();
    let wire = Wire::with_grant();
    wire.0.event(Event::Deregistered { device: "s", addr: 0, len: 8192 });
    wire.wrong("R9");
    let wire = Wire::with_grant();
    wire.0.event(Event::Destroyed { end: SERVER });
    wire.0.event(Event::Deregistered { device: "s", addr: 0, len: 8192 });
    wire.right();
}

#[test]
fn the_wire_checker_sees_what_is_left() {
    let head = |end| Frame::Headers {
        stream: 1,
        end,
        more: false,
        indexed: false,
        lands: false,
        block: "x".into(),
    };
    let wire = Wire::new();
    wire.send(CLIENT, 0, &[head(true)]).take(SERVER);
    assert_eq!(wire.0.quiet().len(), 2, "the server's half, on both ends: {:?}", wire.0.quiet());
    wire.send(SERVER, 1, &[head(false), Frame::Reset { stream: 1, code: 8 }]);
    assert_eq!(wire.0.quiet().len(), 1, "a RECV: {:?}", wire.0.quiet());
    wire.take(CLIENT);
    assert_eq!(wire.0.quiet(), Vec::<String>::new());
    assert_eq!(
        Wire::with_grant().0.quiet().iter().filter(|left| left.starts_with("R9")).count(),
        1
    );
}
