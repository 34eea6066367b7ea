//! The network fails for a while, and devices that wait longer for acknowledgements survive it.
//! Soft-RoCE only, because on iWARP TCP decides how long it waits.

use std::sync::Mutex;
use std::time::Duration;

use tonic_rdma::{Channel, Context, ContextBuilder, Path, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{poll_until, wait_for_path, with_timeout};
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{FaultTest, Topology};
use crate::log::Log;
use crate::veth::{clear_netem, netem};

/// An outage that is too long for the default setting is survived with a longer time-out. The
/// outage lasts until the connection with the default setting is lost, whatever the guest's clock
/// says.
pub async fn a_hole_is_survived(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    let hasty = test.endpoint(test.at).connect().await.unwrap();
    let device = test.topology.client_device.clone();
    let with = |set: fn(ContextBuilder) -> ContextBuilder| {
        test.endpoint(test.at).context(set(Context::builder().device(&device)).build())
    };
    let hastier = with(|context| context.ack_retries(1)).connect().await.unwrap();
    // The endpoints hold the contexts, whose devices are closed with the channels.
    let set = |context: ContextBuilder| context.ack_timeout(Duration::from_secs(1));
    let patient = with(set).connect().await.unwrap();
    let call = async |channel: &Channel| {
        client_of(AnyChannel::Rdma(channel.clone())).unary(payload(1, 10)).await
    };
    for channel in [&hasty, &hastier, &patient] {
        assert_eq!(channel.path().path, Path::Verbs);
        call(channel).await.unwrap();
    }

    netem("loss 100%");
    test.count_fault();
    let order = Mutex::new(Vec::new());
    let lost = async |channel: &Channel, name| {
        call(channel).await.unwrap_err();
        order.lock().unwrap().push(name);
        let path = || async { channel.path().reason.map(|reason| reason.code()) };
        let is_lost = |code: &Option<ReasonCode>| *code == Some(ReasonCode::LinkLost);
        poll_until("the connection is not lost", path, is_lost).await;
    };
    let hole = async {
        tokio::join!(lost(&hasty, "six retries"), lost(&hastier, "one retry"));
        clear_netem();
    };
    let (waited, ()) = with_timeout("all", async { tokio::join!(call(&patient), hole) }).await;
    waited.unwrap();
    assert_eq!(*order.lock().unwrap(), ["one retry", "six retries"]);
    let losses = |channel: &Channel| channel.stats().connections_lost;
    assert_eq!([&hastier, &hasty, &patient].map(losses), [1, 1, 0]);
    assert_eq!(patient.stats().calls_tcp, 0);
    for channel in [&hasty, &hastier] {
        wait_for_path(channel, Path::Verbs).await;
    }
    drop((hasty, hastier, patient));
    test.end("a hole that is waited for").await;
}
