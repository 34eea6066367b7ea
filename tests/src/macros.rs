//! [`serve!`](crate::serve) and [`connect!`](crate::connect) compile their text twice: against
//! `tonic::transport` and against `tonic_rdma`. That it compiles both times is itself a test: the
//! builders carry the same names.

/// Starts a server: `serve!(bed, |server| server.add_service(...))`. The text is compiled for
/// the server builder of `tonic::transport` and for that of `tonic_rdma`.
#[macro_export]
macro_rules! serve {
    ($bed:expr, |$server:ident| $router:expr) => {{
        let listening = $bed.listen().await;
        $crate::serve!($bed, listening, |$server| $router)
    }};
    ($bed:expr, $listening:expr, |$server:ident| $router:expr) => {{
        let bed: &$crate::harness::Bed = $bed;
        let listening: $crate::harness::Listening = $listening;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async move {
            let _ = stopped.await;
        };
        match bed.fabric().stock_server() {
            true => {
                #[allow(unused_mut)]
                let mut $server = tonic::transport::Server::builder().layer(bed.log().layer());
                let router = $router;
                $crate::harness::Server::spawn(
                    listening.addr,
                    stop,
                    router.serve_with_incoming_shutdown(listening.incoming, stopped),
                )
            }
            false => {
                #[allow(unused_mut)]
                let mut $server = bed.rdma_server().layer(bed.log().layer());
                let router = $router;
                $crate::harness::Server::spawn(
                    listening.addr,
                    stop,
                    router.serve_with_incoming_shutdown(listening.incoming, stopped),
                )
            }
        }
    }};
}

/// Connects: `connect!(bed, &server, |endpoint| endpoint.timeout(...))` is an
/// [`AnyChannel`](crate::channel::AnyChannel). The text
/// is compiled for the endpoint of `tonic::transport` and for that of `tonic_rdma`.
#[macro_export]
macro_rules! connect {
    ($bed:expr, $server:expr) => {
        $crate::connect!($bed, $server, |endpoint| endpoint)
    };
    ($bed:expr, $server:expr, |$endpoint:ident| $configured:expr) => {{
        let bed: &$crate::harness::Bed = $bed;
        let uri = $server.uri();
        match bed.fabric().stock_client() {
            true => {
                let $endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
                let $endpoint = $configured;
                $crate::channel::AnyChannel::Stock($endpoint.connect().await.unwrap())
            }
            false => {
                let $endpoint = bed.rdma_endpoint(uri);
                let $endpoint = $configured;
                let channel = $endpoint.connect().await.unwrap();
                bed.check_channel(&channel);
                $crate::channel::AnyChannel::Rdma(channel)
            }
        }
    }};
}
