//! Two guests, each with a kernel of its own, and the cable between them is cut: `tests/guest/two`.

use tonic_rdma::ReasonCode;

use crate::log::Log;
use crate::world::{Place, World};

pub async fn cut(log: Log) {
    let control = std::env::var("CABLE_CUT").expect("CABLE_CUT names the file that cuts the cable");
    let mut world = World::elsewhere(Place::cable(), log).await;
    for _ in 0..2 {
        let mut load = world.under_load().await;
        load.strikes();
        std::fs::write(&control, "").unwrap();
        load.noticed(&[ReasonCode::LinkLost]).await;
        load.calls_fail().await;
        std::fs::remove_file(&control).unwrap();
        load.returns().await;
        load.end().await;
    }
    world.end("cable cut between two guests").await;
}
