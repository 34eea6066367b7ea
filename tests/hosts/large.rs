//! Messages that are longer than a piece of landing memory can be, in both directions, with either
//! codec.

use tonic_rdma_tests::fabric::Fabric;

use crate::client::Client;
use crate::server::Server;

/// Lets only one test at a time have messages of this length in memory.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

async fn echoed(fabric: Fabric, size: usize) {
    let _alone = ALONE.lock().await;
    let server = Server::start(fabric, "", "").await;
    for codec in ["", "plain"] {
        let mut client = Client::start(&server, fabric, "", codec).await;
        client.echo(&[size, 10]).await;
        client.is_on_its_path().await;
        let [fast, over_tcp, lost] = client.counts().await;
        let expected = match fabric {
            Fabric::Stock => (0, 0, 0),
            Fabric::Tcp => (0, 2, 0),
            _ => (2, 0, 0),
        };
        assert_eq!((fast, over_tcp, lost), expected);
    }
}

pub async fn three_hundred_mebibytes(fabric: Fabric) {
    echoed(fabric, 300 << 20).await;
}

/// `make test-large` runs this test.
pub async fn one_gibibyte(fabric: Fabric) {
    echoed(fabric, 1 << 30).await;
}
