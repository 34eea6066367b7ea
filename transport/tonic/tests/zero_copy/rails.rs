//! Messages that lie in one device's pool and are sent over another device.

use std::sync::Arc;

use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Context, PoolConfig};

use crate::MIB;
use crate::common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pooled};

#[tokio::test]
async fn memory_of_the_first_rail_is_sent_by_the_second_without_a_copy() {
    let net = SimNet::new(SimConfig::default());
    let contexts = [('s', 11), ('c', 31)].map(|(end, from)| {
        let builder = Context::builder().pool(PoolConfig::default().total(32 << 20));
        let device = |n: u8| net.device(format!("{end}{n}"), [10, 0, 0, from + n].into());
        Some(builder.sim(device(0)).sim(device(1)).build())
    });
    let context = contexts[1].clone().unwrap();
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    let world = World::between(Fabric::Sim, contexts, blobs).await;
    let (first, second) = (world.channel.clone(), world.connect().await);
    assert_ne!(first.path().device, second.path().device, "channels take turns");
    let registrations = || async {
        let stats = context.pool_stats().await;
        stats.iter().map(|(_, stats)| stats.registrations).sum::<u64>()
    };
    for (of, by) in [(&first, &second), (&second, &first)] {
        let mut client = Client::new(by.clone(), Which::Ours, LIMIT);
        let data = pooled(of, MIB, 3).await;
        assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
        let before = registrations().await;
        for _ in 0..5 {
            assert!(client.echo(Blob::of(data.clone())).await.unwrap().data == data);
        }
        assert_eq!(registrations().await, before, "registered once, at its first use");
        assert_eq!(by.stats().copied_fast.staging, 0, "sent from where it lies");
    }
}
