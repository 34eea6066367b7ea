//! Frames of peers that a test implements itself.

use bytes::BytesMut;
use tonic_rdma_proto::frame::Frame;
use tonic_rdma_proto::headers;

/// The head of a call to this method of the conformance service.
#[must_use]
pub fn head(stream: u32, method: &str) -> Frame {
    let mut block = BytesMut::new();
    let path = format!("/tonic_rdma.conformance.v1.Conformance/{method}");
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", &path),
        ("content-type", "application/grpc"),
    ] {
        headers::encode(&mut block, name, value.as_bytes()).unwrap();
    }
    Frame::Headers {
        stream,
        end: false,
        more: false,
        indexed: false,
        lands: false,
        block: block.freeze(),
    }
}
