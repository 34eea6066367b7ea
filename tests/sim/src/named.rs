//! Buffers for fields to land in. Their owners write to them once they are back, so any later
//! write, for example by a device, is detected.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tonic_rdma::{FinishError, LandIn, LandRequest, Outcome, WhyEmpty};

use crate::load::{CALL, CallPlan};
use crate::pattern::{self, Key};
use crate::world::World;

/// The byte with which an owner fills its buffer.
const OWN: u8 = 0x5a;
/// How long an owner keeps its buffer after it came back. A late WRITE would arrive in that time.
const KEPT: Duration = Duration::from_millis(300);
/// Time between two attempts to get a buffer back while a reader retains the field.
const RETRY: Duration = Duration::from_millis(20);

/// The buffer for a call's response to land in, if it has one.
pub(crate) fn for_response(call: &CallPlan) -> Option<LandIn<Vec<u8>>> {
    let first = *call.responses.first()?;
    let (named, len) = (call.has_buffer(), call.buffer_len(first));
    // Half of the buffers stay registered until their owners get them back.
    let kept = |land_in: LandIn<Vec<u8>>| match call.id % 2 {
        0 => land_in.keep_registered(),
        _ => land_in,
    };
    named.then(|| kept(LandIn::new(vec![0; len])))
}

/// The methods with buffers for requests.
pub(crate) const METHODS: [&str; 2] = ["/sim.Planned/UnaryZero", "/sim.Planned/UpZero"];

/// The buffer for a request to land in, at the servers of some runs.
pub(crate) fn for_request(world: &World, request: &LandRequest<'_>) -> Option<Vec<u8>> {
    let id: usize = request.headers.get(CALL)?.to_str().ok()?.parse().ok()?;
    let call = world.plan.calls.get(id)?;
    Some(vec![0; call.buffer_len(*call.requests.first()?)])
}

/// Waits until a buffer comes back, checks its content, and checks that nothing else writes to it
/// afterwards. `key` identifies the message that may have landed. `too_long` says that the call
/// failed because the buffer is too short for this message.
pub(crate) async fn watch(world: &Arc<World>, land_in: LandIn<Vec<u8>>, key: Key, too_long: bool) {
    let finished = loop {
        match land_in.finish().await {
            Ok(finished) => break finished,
            Err(FinishError::Viewed(_)) => sleep(RETRY).await,
            Err(error) => return world.wrong(format!("{key:?}: {error}")),
        }
    };
    world.checker.note(|| format!("the buffer of {key:?} is back: {:?}", finished.outcome));
    let did_not_fit =
        matches!(finished.outcome, Outcome::Empty { why: WhyEmpty::TooLong { .. }, .. });
    if too_long && !did_not_fit {
        world.wrong(format!("{key:?}: it did not fit its buffer: {:?}", finished.outcome));
    }
    let (mut buffer, filled) = (finished.buffer, finished.outcome.filled());
    if filled > 0 {
        world.check(pattern::check(key, filled, &buffer[..filled]));
    }
    buffer.fill(OWN);
    sleep(KEPT).await;
    if buffer.iter().any(|byte| *byte != OWN) {
        world.wrong(format!("{key:?}: its buffer has changed after it came back"));
    }
}

/// Watches the buffer that a request landed in, in its own task.
pub(crate) fn watch_request(world: &Arc<World>, land_in: LandIn<Vec<u8>>, call: usize) {
    let world = world.clone();
    world.watches(true);
    tokio::spawn(async move {
        watch(&world, land_in, Key { call, down: false, index: 0 }, false).await;
        world.watches(false);
    });
}
