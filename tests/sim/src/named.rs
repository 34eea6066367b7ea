//! Buffers for fields to land in. Their owners write to them once they are back, so any later
//! write, for example by a device, is detected.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tonic_rdma::{FinishError, LandIn, LandRequest};

use crate::load::{CallPlan, Kind};
use crate::pattern::{self, Key};
use crate::world::World;

/// The byte with which an owner fills its buffer.
const OWN: u8 = 0x5a;
/// How long an owner keeps its buffer after it came back. A late WRITE would arrive in that time.
const KEPT: Duration = Duration::from_millis(300);
/// Time between two attempts to get a buffer back while a reader retains the field.
const RETRY: Duration = Duration::from_millis(20);

/// The buffer for a call's response to land in, for a third of the calls whose client has the codec
/// for it. Some buffers are too short.
pub(crate) fn for_response(call: &CallPlan) -> Option<LandIn<Vec<u8>>> {
    let first = *call.responses.first()?;
    let named = call.client_zero_copy && call.kind != Kind::Raw && call.id % 3 == 1;
    let len = if call.id % 9 == 1 { first / 2 } else { first + call.id % 2 };
    // Half of the buffers stay registered until their owners get them back.
    let kept = |land_in: LandIn<Vec<u8>>| match call.id % 2 {
        0 => land_in.keep_registered(),
        _ => land_in,
    };
    named.then(|| kept(LandIn::new(vec![0; len])))
}

/// The buffer for a request to land in, at the servers of some runs.
#[allow(clippy::unnecessary_wraps, reason = "an allocator may refuse")]
pub(crate) fn for_request(request: &LandRequest<'_>) -> Option<Vec<u8>> {
    Some(vec![0; request.field.unwrap_or(100_000).min(1 << 20) as usize])
}

/// Whether the servers of a run have buffers for requests. If so, they give no standing grants.
pub(crate) fn at_servers(seed: u64) -> bool {
    seed % 4 == 3
}

/// Waits until a buffer comes back, checks its content, and checks that nothing else writes to it
/// afterwards. `key` identifies the message that may have landed.
pub(crate) async fn watch(world: &Arc<World>, land_in: LandIn<Vec<u8>>, key: Key) {
    let finished = loop {
        match land_in.finish().await {
            Ok(finished) => break finished,
            Err(FinishError::Viewed(_)) => sleep(RETRY).await,
            Err(error) => return world.wrong(format!("{key:?}: {error}")),
        }
    };
    world.checker.note(|| format!("the buffer of {key:?} is back: {:?}", finished.outcome));
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
        watch(&world, land_in, Key { call, down: false, index: 0 }).await;
        world.watches(false);
    });
}
