//! Records every call, and checks whether its outcome is allowed.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Status};

use crate::load::{CallPlan, ms};
use crate::plan::{Fault, FaultPlan, MAX_HARMLESS_SILENCE, Plan};

/// How a call ended for its caller.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    Status(Status),
    /// The caller dropped the call after the planned time.
    Dropped,
    /// The caller dropped the call after the planned number of responses.
    DroppedAfterResponses,
    /// The channel was dropped before the call began.
    NotMade,
}

#[derive(Debug, Default, Clone)]
struct CallRecord {
    begun: Option<Instant>,
    head: Option<Instant>,
    ended: Option<(Instant, Outcome)>,
    /// How often a handler received the call.
    served: u32,
    /// The number of requests that a handler read, up to an end without an error.
    read: Option<usize>,
}

/// The record of all calls, and the faults found so far.
#[derive(Debug)]
pub(crate) struct CallLog {
    started: Instant,
    calls: Vec<CallRecord>,
    wrong: Vec<String>,
}

/// Counts for the figures.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) calls: u64,
    pub(crate) well: u64,
    pub(crate) as_planned: u64,
    /// Calls that failed because a buffer was too short, as planned.
    pub(crate) too_long: u64,
    pub(crate) dropped: u64,
    pub(crate) late: u64,
    pub(crate) failed: u64,
}

impl CallLog {
    pub(crate) fn new(calls: usize, started: Instant) -> Self {
        CallLog { started, calls: vec![CallRecord::default(); calls], wrong: Vec::new() }
    }

    pub(crate) fn wrong(&mut self, what: String) {
        // One error is enough to fail the run, and thousands of errors would only hide the first
        // ones.
        if self.wrong.len() < 50 {
            self.wrong.push(what);
        }
    }

    pub(crate) fn begun(&mut self, id: usize) {
        self.calls[id].begun = Some(Instant::now());
    }

    pub(crate) fn head(&mut self, id: usize) {
        self.calls[id].head = Some(Instant::now());
    }

    pub(crate) fn ended(&mut self, id: usize, outcome: Outcome) {
        let before = self.calls[id].ended.replace((Instant::now(), outcome));
        if let Some(before) = before {
            self.wrong(format!("call {id}: ended twice, first {before:?}"));
        }
    }

    pub(crate) fn served(&mut self, id: usize) {
        self.calls[id].served += 1;
        if self.calls[id].served > 1 {
            self.wrong(format!("call {id}: served twice"));
        }
    }

    /// Records that a handler has read its requests to their end, without an error. They may be
    /// fewer than planned if the caller dropped the call: hyper and tonic treat a reset with CANCEL
    /// as the end of the stream.
    pub(crate) fn read_whole(&mut self, call: &CallPlan, count: usize) {
        self.calls[call.id].read = Some(count);
    }

    /// The outcome of each call: its number, the time of its end in milliseconds, its status code.
    pub(crate) fn results(&self) -> impl Iterator<Item = (usize, u128, i32)> + '_ {
        self.calls.iter().enumerate().filter_map(|(id, seen)| {
            let (at, outcome) = seen.ended.as_ref()?;
            let code = match outcome {
                Outcome::Status(status) => i32::from(status.code()),
                Outcome::Dropped => -1,
                Outcome::DroppedAfterResponses => -2,
                Outcome::NotMade => -3,
            };
            Some((id, at.duration_since(self.started).as_millis(), code))
        })
    }

    /// Everything that is wrong with the calls.
    pub(crate) fn check_calls(&mut self, plan: &Plan) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.wrong);
        for (call, seen) in plan.calls.iter().zip(&self.calls) {
            if let Err(why) = self.check_call(plan, call, seen) {
                wrong.push(format!(
                    "call {} ({:?} over channel {}): {why}",
                    call.id, call.kind, call.channel
                ));
            }
        }
        wrong
    }

    fn check_call(&self, plan: &Plan, call: &CallPlan, seen: &CallRecord) -> Result<(), String> {
        let (ended, outcome) = seen.ended.as_ref().ok_or("it has no end")?;
        let Outcome::Status(status) = outcome else { return Ok(()) };
        let begun = seen.begun.ok_or("it ended and had not begun")?;
        let took = ended.duration_since(begun);
        if let (Some(deadline), Some(head)) = (call.deadline, seen.head)
            && head.duration_since(begun) > deadline + ms(10)
        {
            return Err(format!(
                "its head came after {:?}, the deadline was {deadline:?}",
                head - begun
            ));
        }
        let well = status.code() == Code::Ok && call.code == Code::Ok;
        if well || (status.code() == call.code && status.message() == "as planned") {
            let all = call.requests.len();
            return match (seen.served, seen.read) {
                (0, _) => Err("it was answered and not served".into()),
                (_, Some(read)) if read != all => {
                    Err(format!("its handler saw a good end after {read} of {all} requests"))
                }
                _ => Ok(()),
            };
        }
        if may_be_too_long(plan, call, status) {
            return Ok(());
        }
        let late = matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded);
        if late && call.deadline.is_some_and(|deadline| took + ms(2) >= deadline) {
            return Ok(());
        }
        let window = (begun - self.started, *ended - self.started);
        // A wake-up that is never delivered looks like a dead peer.
        if plan.net.lost_wakeups > 0
            && status.code() == Code::Unavailable
            && status.message().contains("link-lost")
        {
            return Ok(());
        }
        let served = seen.served > 0;
        if plan.faults.iter().any(|f| allows(plan, call, f, window, status, served)) {
            return Ok(());
        }
        Err(format!(
            "{:?} ({}) from {:?} to {:?}",
            status.code(),
            status.message(),
            window.0,
            window.1
        ))
    }

    pub(crate) fn counts(&self, plan: &Plan) -> Counts {
        let mut counts = Counts::default();
        for (call, seen) in plan.calls.iter().zip(&self.calls) {
            let Some((_, outcome)) = &seen.ended else { continue };
            counts.calls += 1;
            *match outcome {
                Outcome::Status(status) if status.code() == Code::Ok => &mut counts.well,
                Outcome::Status(status) if status.code() == call.code => &mut counts.as_planned,
                Outcome::Status(status) if may_be_too_long(plan, call, status) => {
                    &mut counts.too_long
                }
                Outcome::Status(status)
                    if matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded) =>
                {
                    &mut counts.late
                }
                Outcome::Status(_) => &mut counts.failed,
                _ => &mut counts.dropped,
            } += 1;
        }
        counts
    }
}

/// Whether a call ended because a field is longer than its buffer.
pub(crate) fn is_too_long(status: &Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("does not fit a buffer")
}

/// Whether a call ended because a field is longer than its buffer, as the plan lets it.
fn may_be_too_long(plan: &Plan, call: &CallPlan, status: &Status) -> bool {
    is_too_long(status)
        && (call.response_is_too_long() || call.request_is_too_long(plan.buffers_at_servers()))
}

/// Within this time a dead peer is detected, and calls that began before that have ended.
const DETECTION_LIMIT: Duration = Duration::from_secs(12);

/// Whether a fault may give this status to a call that ran in this window.
fn allows(
    plan: &Plan,
    call: &CallPlan,
    &FaultPlan { at, lasts, ref fault }: &FaultPlan,
    (begun, ended): (Duration, Duration),
    status: &Status,
    served: bool,
) -> bool {
    let unavailable = status.code() == Code::Unavailable;
    // The status codes that stock tonic gives for a broken TCP connection.
    let broken = matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled
    );
    // hyper closed the TCP connection before it sent the call. Stock tonic fails such a call too.
    let unsent = broken && !served;
    let channel = &plan.channels[call.channel];
    let concerns = |host: &usize| *host == channel.host || *host == channel.server;
    let within = |after: Duration| ended >= at && begun <= at + lasts + after;
    match fault {
        Fault::Cut(host) => unavailable && concerns(host) && within(DETECTION_LIMIT),
        // A link made during the fault may outlive it by far.
        Fault::KillAfter(host, _) => unavailable && concerns(host) && ended >= at,
        Fault::Freeze(host) => {
            let all: Duration = plan
                .faults
                .iter()
                .filter(|f| matches!(f.fault, Fault::Freeze(_)))
                .map(|f| f.lasts)
                .sum();
            unavailable && concerns(host) && all >= MAX_HARMLESS_SILENCE && within(DETECTION_LIMIT)
        }
        // These faults end no call. For example, data that cannot land comes by control messages.
        Fault::FailRegistrations(..)
        | Fault::Pause(_)
        | Fault::LoseConnects(_)
        | Fault::LoseDisconnects(_)
        | Fault::Drop(_) => false,
        Fault::Remove(host) => unavailable && concerns(host) && within(DETECTION_LIMIT),
        Fault::TcpReset | Fault::TcpRefuse | Fault::TcpStall => broken && within(ms(200)),
        Fault::Stop(host) => unsent && *host == channel.server && ended >= at,
        // The new server takes the calls that the old one has not seen.
        Fault::Replace(_) => false,
    }
}
