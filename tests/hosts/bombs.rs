//! A short message that is long once it is decompressed, to a server with tonic's limits.

use tonic::codec::CompressionEncoding::Gzip;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::service::script::{echo, steps};

use crate::client::{connect_here, echo_one};
use crate::server::Server;

/// tonic's limit is 4 MiB.
const LENGTH: usize = 64 << 20;

/// The call ends as over tonic's own channel, and the connection survives.
pub async fn far_beyond_the_limit(fabric: Fabric) {
    let mut ends = Vec::new();
    for fabric in [Fabric::Stock, fabric] {
        let server = Server::start(fabric, "", "default-limits").await;
        let (_channel, client) = connect_here(fabric, server.at).await;
        let bomb = steps(&"0".repeat(LENGTH), [echo(1)]).with_payload(1, 10);
        let end = client.clone().send_compressed(Gzip).unary(bomb).await;
        ends.push(end.map(|reply| reply.into_inner().expect(1, 10)).map_err(|end| end.code()));
        echo_one(client, 100_000).await.unwrap();
    }
    println!("{fabric}: {:?}", ends[1]);
    assert_eq!(ends[0], ends[1]);
}
