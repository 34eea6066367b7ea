//! http heads to and from header blocks.

use std::cell::Cell;

use bytes::{Bytes, BytesMut};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header};
use tonic::Status;
use tonic_rdma_proto::Breach;
use tonic_rdma_proto::headers::{Decoder, encode};

/// Where the calls of a channel go, and who makes them.
#[derive(Debug, Default)]
pub(crate) struct Origin {
    /// Its scheme and authority stand in every request.
    pub(crate) uri: Uri,
    /// Stands behind a user agent that the request has already, as tonic has it.
    pub(crate) user_agent: Option<HeaderValue>,
}

/// Blocks are made in here, many to one allocation.
const ROOM: usize = 4096;

thread_local! {
    static BLOCKS: Cell<BytesMut> = Cell::new(BytesMut::new());
}

/// Makes one block.
fn block(fill: impl FnOnce(&mut BytesMut) -> Result<(), Status>) -> Result<Bytes, Status> {
    let mut room = BLOCKS.take();
    if room.capacity() < ROOM / 8 {
        room.reserve(ROOM);
    }
    let filled = fill(&mut room);
    let block = room.split().freeze();
    BLOCKS.set(room);
    filled.map(|()| block)
}

fn put(block: &mut BytesMut, name: &str, value: &[u8]) -> Result<(), Status> {
    encode(block, name, value).map_err(|e| Status::resource_exhausted(format!("{name}: {e}")))
}

fn put_map(block: &mut BytesMut, map: &HeaderMap) -> Result<(), Status> {
    for (name, value) in map {
        // Of one hop and its framing (RFC 9113 section 8.2.2).
        if *name == header::CONNECTION || *name == header::TRANSFER_ENCODING || *name == header::HOST {
            continue;
        }
        put(block, name.as_str(), value.as_bytes())?;
    }
    Ok(())
}

/// The header block of a request to `origin`.
pub(super) fn encode_request(parts: &http::request::Parts, origin: &Origin) -> Result<Bytes, Status> {
    block(|block| {
        put(block, ":method", parts.method.as_str().as_bytes())?;
        put(block, ":scheme", origin.uri.scheme_str().unwrap_or("http").as_bytes())?;
        if let Some(authority) = origin.uri.authority() {
            put(block, ":authority", authority.as_str().as_bytes())?;
        }
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        put(block, ":path", path.as_bytes())?;
        match (&origin.user_agent, parts.headers.get(header::USER_AGENT)) {
            (Some(agent), None) => put(block, header::USER_AGENT.as_str(), agent.as_bytes())?,
            (Some(agent), Some(own)) => {
                let both = [own.as_bytes(), b" ", agent.as_bytes()].concat();
                put(block, header::USER_AGENT.as_str(), &both)?;
                let mut rest = parts.headers.clone();
                rest.remove(header::USER_AGENT);
                return put_map(block, &rest);
            }
            (None, _) => {}
        }
        put_map(block, &parts.headers)
    })
}

/// The header block of a response.
pub(super) fn encode_response(parts: &http::response::Parts) -> Result<Bytes, Status> {
    block(|block| {
        put(block, ":status", parts.status.as_str().as_bytes())?;
        put_map(block, &parts.headers)
    })
}

/// The header block of trailers.
pub(super) fn encode_trailers(map: &HeaderMap) -> Result<Bytes, Status> {
    block(|block| put_map(block, map))
}

/// What a block says, pseudo-fields apart.
#[derive(Default)]
struct Head {
    method: Option<Bytes>,
    scheme: Option<Bytes>,
    authority: Option<Bytes>,
    path: Option<Bytes>,
    status: Option<Bytes>,
    map: HeaderMap,
}

fn decode(block: Bytes) -> Result<Head, Breach> {
    let mut head = Head::default();
    for field in Decoder::new(block) {
        let field = field?;
        let pseudo = match &field.name[..] {
            b":method" => &mut head.method,
            b":scheme" => &mut head.scheme,
            b":authority" => &mut head.authority,
            b":path" => &mut head.path,
            b":status" => &mut head.status,
            name => {
                let name = HeaderName::from_lowercase(name)
                    .map_err(|_| Breach::Headers("a name with characters that HTTP does not allow"))?;
                let value = HeaderValue::from_maybe_shared(field.value)
                    .map_err(|_| Breach::Headers("a value with characters that HTTP does not allow"))?;
                head.map
                    .try_append(name, value)
                    .map_err(|_| Breach::Headers("more fields than a header map holds"))?;
                continue;
            }
        };
        if pseudo.replace(field.value).is_some() {
            return Err(Breach::Headers("a pseudo-field twice"));
        }
    }
    Ok(head)
}

/// Reads a request's head.
pub(super) fn decode_request(block: Bytes) -> Result<http::request::Parts, Breach> {
    let head = decode(block)?;
    if head.status.is_some() {
        return Err(Breach::Headers(":status in a request"));
    }
    let method = head.method.ok_or(Breach::Headers("no :method"))?;
    let path = head.path.ok_or(Breach::Headers("no :path"))?;
    let mut uri = Uri::builder().path_and_query(
        PathAndQuery::from_maybe_shared(path).map_err(|_| Breach::Headers("a :path that is none"))?,
    );
    if let Some(authority) = head.authority {
        let authority = Authority::from_maybe_shared(authority)
            .map_err(|_| Breach::Headers("an :authority that is none"))?;
        let scheme = match head.scheme.as_deref() {
            Some(b"https") => Scheme::HTTPS,
            Some(b"http") | None => Scheme::HTTP,
            Some(other) => Scheme::try_from(other).map_err(|_| Breach::Headers("a :scheme that is none"))?,
        };
        uri = uri.scheme(scheme).authority(authority);
    }
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.method = Method::from_bytes(&method).map_err(|_| Breach::Headers("a :method that is none"))?;
    parts.uri = uri.build().map_err(|_| Breach::Headers("pseudo-fields that make no URI"))?;
    parts.version = Version::HTTP_2;
    parts.headers = head.map;
    Ok(parts)
}

/// Reads a response's head.
pub(super) fn decode_response(block: Bytes) -> Result<http::response::Parts, Breach> {
    let head = decode(block)?;
    if head.method.is_some() || head.path.is_some() || head.authority.is_some() || head.scheme.is_some() {
        return Err(Breach::Headers("a request's pseudo-field in a response"));
    }
    let status = head.status.ok_or(Breach::Headers("no :status"))?;
    let (mut parts, ()) = http::Response::new(()).into_parts();
    parts.status = StatusCode::from_bytes(&status).map_err(|_| Breach::Headers("a :status that is none"))?;
    parts.version = Version::HTTP_2;
    parts.headers = head.map;
    Ok(parts)
}

/// Reads trailers.
pub(super) fn decode_trailers(block: Bytes) -> Result<HeaderMap, Breach> {
    let head = decode(block)?;
    if head.status.is_some() || head.method.is_some() || head.path.is_some() {
        return Err(Breach::Headers("a pseudo-field in trailers"));
    }
    Ok(head.map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_round_trips() {
        let request = http::Request::post("/a.B/C?q")
            .header("te", "trailers")
            .header("x-a", "1")
            .header("x-a", "2")
            .body(())
            .unwrap();
        let (parts, ()) = request.into_parts();
        let origin = Origin { uri: Uri::from_static("https://host:1"), user_agent: None };
        let got = decode_request(encode_request(&parts, &origin).unwrap()).unwrap();
        assert_eq!(got.uri, "https://host:1/a.B/C?q");
        assert_eq!(got.method, parts.method);
        assert_eq!(got.headers, parts.headers);
    }

    #[test]
    fn user_agents_are_appended() {
        let origin =
            Origin { user_agent: Some(HeaderValue::from_static("tonic-rdma/1")), ..Origin::default() };
        let (mut parts, ()) = http::Request::post("/a.B/C").header("x-a", "1").body(()).unwrap().into_parts();
        let sent = |parts: &_| decode_request(encode_request(parts, &origin).unwrap()).unwrap().headers;
        assert_eq!(sent(&parts)[header::USER_AGENT], "tonic-rdma/1");
        parts.headers.insert(header::USER_AGENT, HeaderValue::from_static("mine"));
        let got = sent(&parts);
        assert_eq!(
            (&got[header::USER_AGENT], &got["x-a"]),
            (&"mine tonic-rdma/1".parse().unwrap(), &"1".parse().unwrap())
        );
        assert_eq!(got.len(), 2);
    }

    #[test]
    fn a_response_and_trailers_round_trip() {
        let response = http::Response::builder().status(200).header("grpc-status", "0").body(()).unwrap();
        let (parts, ()) = response.into_parts();
        let got = decode_response(encode_response(&parts).unwrap()).unwrap();
        assert_eq!((got.status, got.headers), (parts.status, parts.headers.clone()));
        assert_eq!(decode_trailers(encode_trailers(&parts.headers).unwrap()).unwrap(), parts.headers);
    }

    #[test]
    fn bad_heads_are_breaches() {
        let mut block = BytesMut::new();
        put(&mut block, ":path", b"/x").unwrap();
        assert_eq!(decode_request(block.clone().freeze()).unwrap_err(), Breach::Headers("no :method"));
        put(&mut block, ":method", b"POST").unwrap();
        put(&mut block, "Upper", b"x").unwrap();
        assert!(decode_request(block.freeze()).is_err());
        let mut block = BytesMut::new();
        put(&mut block, "x", b"a\nb").unwrap();
        assert!(decode_trailers(block.freeze()).is_err());
    }
}
