//! Generates the stubs of Arrow Flight for the message types of the arrow-flight crate, with the
//! codec that does not copy. That crate's own stubs use tonic's codec.

use tonic_build::manual::{Builder, Method, Service};

/// The sides of a method that send a stream.
#[derive(Clone, Copy)]
enum Streams {
    None,
    Reply,
    Both,
}

/// The methods of Flight.proto, format 1.4 and later: name, route, request, reply, streams.
const METHODS: &[(&str, &str, &str, &str, Streams)] = &[
    ("handshake", "Handshake", "HandshakeRequest", "HandshakeResponse", Streams::Both),
    ("list_flights", "ListFlights", "Criteria", "FlightInfo", Streams::Reply),
    ("get_flight_info", "GetFlightInfo", "FlightDescriptor", "FlightInfo", Streams::None),
    ("poll_flight_info", "PollFlightInfo", "FlightDescriptor", "PollInfo", Streams::None),
    ("get_schema", "GetSchema", "FlightDescriptor", "SchemaResult", Streams::None),
    ("do_get", "DoGet", "Ticket", "FlightData", Streams::Reply),
    ("do_put", "DoPut", "FlightData", "PutResult", Streams::Both),
    ("do_exchange", "DoExchange", "FlightData", "FlightData", Streams::Both),
    ("do_action", "DoAction", "Action", "Result", Streams::Reply),
    ("list_actions", "ListActions", "Empty", "ActionType", Streams::Reply),
];

fn main() {
    let mut service = Service::builder().name("FlightService").package("arrow.flight.protocol");
    for &(name, route, request, reply, streams) in METHODS {
        let method = Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("arrow_flight::{request}"))
            .output_type(format!("arrow_flight::{reply}"))
            .codec_path("tonic_rdma::codec::ProstCodec");
        service = service.method(
            match streams {
                Streams::None => method,
                Streams::Reply => method.server_streaming(),
                Streams::Both => method.client_streaming().server_streaming(),
            }
            .build(),
        );
    }
    Builder::new().compile(&[service.build()]);
}
