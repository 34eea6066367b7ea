//! The cable between two guests, each with a kernel of its own, is cut. `tests/guest/suite` starts
//! the guests.

use tonic_rdma::ReasonCode;

use crate::fault_test::{FaultTest, Topology};
use crate::log::Log;

pub async fn cut(log: Log) {
    let control = std::env::var("CABLE_CUT").expect("CABLE_CUT names the file that cuts the cable");
    let mut test = FaultTest::with_remote_server(Topology::cable(), log).await;
    for _ in 0..2 {
        let mut load = test.under_load().await;
        load.begin_fault();
        std::fs::write(&control, "").unwrap();
        load.assert_fallback(&[ReasonCode::LinkLost]).await;
        load.wait_for_failed_calls().await;
        std::fs::remove_file(&control).unwrap();
        load.wait_for_recovery().await;
        load.end().await;
    }
    test.end("cable cut between two guests").await;
}
