//! Converts http heads to and from header blocks.

use std::cell::Cell;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header};
use tonic::Status;
use tonic_rdma_memory::PerProcess;
use tonic_rdma_proto::Breach;
use tonic_rdma_proto::headers::{Decoder, Field, NAMES, PAIRS, encode, pair};

/// The destination of a channel's calls, and their user agent.
#[derive(Debug, Default)]
pub(crate) struct Origin {
    /// The URI whose scheme and authority every request carries.
    pub(crate) uri: Uri,
    /// The text that is appended to the user agent of a request, in the same way as in tonic.
    pub(crate) user_agent: Option<HeaderValue>,
}

impl Origin {
    /// The text that is appended to the endpoint's user agent, unless the answer to the Offer
    /// reports the text that tonic appends.
    const USER_AGENT: &str = concat!("tonic-rdma/", env!("CARGO_PKG_VERSION"));

    pub(crate) fn new(uri: Uri, own: Option<&HeaderValue>) -> Self {
        let ours = HeaderValue::from_static(Self::USER_AGENT);
        let user_agent = match own {
            Some(own) => HeaderValue::from_bytes(&[own.as_bytes(), b" ", ours.as_bytes()].concat())
                .unwrap_or(ours),
            None => ours,
        };
        Origin { uri, user_agent: Some(user_agent) }
    }

    /// Returns this origin with `word` in place of the last word of the user agent.
    pub(crate) fn ending_with(self: &Arc<Self>, word: Option<&HeaderValue>) -> Arc<Self> {
        let Some(word) = word else { return self.clone() };
        let agent = self.user_agent.as_ref().map_or(&[][..], HeaderValue::as_bytes);
        let kept = agent.iter().rposition(|byte| *byte == b' ').map_or(0, |space| space + 1);
        let agent = HeaderValue::from_bytes(&[&agent[..kept], word.as_bytes()].concat());
        Arc::new(Origin { uri: self.uri.clone(), user_agent: agent.ok() })
    }
}

/// Bytes of an allocation that several blocks share.
const BLOCK_CHUNK: usize = 4096;
/// Maximum number of bytes that the draft buffer keeps between two blocks.
const MAX_DRAFT: usize = 64 * 1024;

thread_local! {
    static BLOCKS: Cell<(Vec<u8>, BytesMut)> = Cell::new((Vec::new(), BytesMut::new()));
}

/// Builds a block in a vector, where appending short pieces costs less than in a `BytesMut`.
fn block(fill: impl FnOnce(&mut Vec<u8>) -> Result<(), Status>) -> Result<Bytes, Status> {
    let (mut draft, mut room) = BLOCKS.take();
    let filled = fill(&mut draft);
    if room.capacity() < draft.len() {
        room.reserve(BLOCK_CHUNK.max(draft.len()));
    }
    room.put_slice(&draft);
    let block = room.split().freeze();
    draft.clear();
    draft.shrink_to(MAX_DRAFT);
    BLOCKS.set((draft, room));
    filled.map(|()| block)
}

fn put(block: &mut Vec<u8>, name: &str, value: &[u8]) -> Result<(), Status> {
    encode(block, name, value).map_err(|e| Status::resource_exhausted(format!("{name}: {e}")))
}

/// Whether the field is left out of header blocks: a field about one HTTP connection and its
/// framing (RFC 9113 section 8.2.2), or Host, which `:authority` replaces.
fn is_connection_specific(name: &HeaderName) -> bool {
    *name == header::CONNECTION || *name == header::TRANSFER_ENCODING || *name == header::HOST
}

/// The bytes that encode the fields that nearly every call has.
const POST: u8 = pair(":method", "POST");
const OK: u8 = pair(":status", "200");
const GRPC: u8 = pair("content-type", "application/grpc");
const TRAILERS: u8 = pair("te", "trailers");
const STATUS_OK: u8 = pair("grpc-status", "0");

fn put_field(block: &mut Vec<u8>, name: &HeaderName, value: &HeaderValue) -> Result<(), Status> {
    let pair = match value.as_bytes() {
        b"application/grpc" if *name == header::CONTENT_TYPE => GRPC,
        b"trailers" if *name == header::TE => TRAILERS,
        b"0" if name.as_str() == "grpc-status" => STATUS_OK,
        _ if is_connection_specific(name) => return Ok(()),
        value => return put(block, name.as_str(), value),
    };
    block.push(pair);
    Ok(())
}

fn put_map(block: &mut Vec<u8>, map: &HeaderMap) -> Result<(), Status> {
    map.iter().try_for_each(|(name, value)| put_field(block, name, value))
}

/// The fields that are in the head of every request of a connection.
#[derive(Debug, Default)]
pub(crate) struct Caller {
    /// Scheme and authority, encoded for a block.
    origin: Vec<u8>,
    user_agent: Option<HeaderValue>,
}

impl Caller {
    pub(crate) fn new(origin: &Origin) -> Self {
        let mut fields = Vec::new();
        let scheme = origin.uri.scheme_str().unwrap_or("http");
        let authority = origin.uri.authority().map(|authority| (":authority", authority.as_str()));
        for (name, value) in [(":scheme", scheme)].into_iter().chain(authority) {
            // `put` cannot fail, because a URI is never longer than the longest field.
            let _ = put(&mut fields, name, value.as_bytes());
        }
        Caller { origin: fields, user_agent: origin.user_agent.clone() }
    }
}

/// The header block of a request by `caller`.
pub(crate) fn encode_request(
    parts: &http::request::Parts,
    caller: &Caller,
) -> Result<Bytes, Status> {
    block(|block| {
        match parts.method {
            Method::POST => block.push(POST),
            _ => put(block, ":method", parts.method.as_str().as_bytes())?,
        }
        block.extend_from_slice(&caller.origin);
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        put(block, ":path", path.as_bytes())?;
        let mut agent = caller.user_agent.as_ref();
        for (name, value) in &parts.headers {
            if *name == header::USER_AGENT && caller.user_agent.is_some() {
                if let Some(agent) = agent.take() {
                    let both = [value.as_bytes(), b" ", agent.as_bytes()].concat();
                    put(block, name.as_str(), &both)?;
                }
            } else {
                put_field(block, name, value)?;
            }
        }
        agent.map_or(Ok(()), |agent| put(block, header::USER_AGENT.as_str(), agent.as_bytes()))
    })
}

/// The header block of a response.
pub(crate) fn encode_response(parts: &http::response::Parts) -> Result<Bytes, Status> {
    block(|block| {
        match parts.status {
            StatusCode::OK => block.push(OK),
            status => put(block, ":status", status.as_str().as_bytes())?,
        }
        put_map(block, &parts.headers)
    })
}

/// The header block of trailers.
pub(crate) fn encode_trailers(map: &HeaderMap) -> Result<Bytes, Status> {
    block(|block| put_map(block, map))
}

/// The names and pairs of the static tables, parsed once. Pseudo-fields are `None`.
struct Known {
    names: Vec<Option<HeaderName>>,
    pairs: Vec<Option<(HeaderName, HeaderValue)>>,
}

static KNOWN: PerProcess<Known> = PerProcess::new(|| {
    let name = |name: &'static str| (!name.starts_with(':')).then(|| HeaderName::from_static(name));
    Known {
        names: NAMES.into_iter().map(name).collect(),
        pairs: PAIRS
            .into_iter()
            .map(|(n, v)| Some((name(n)?, HeaderValue::from_static(v))))
            .collect(),
    }
});

/// Reads a block. Passes pseudo-fields to `pseudo`, and returns all other fields.
fn decode(
    block: Bytes,
    mut pseudo: impl FnMut(&[u8], Bytes) -> Result<(), Breach>,
) -> Result<HeaderMap, Breach> {
    let mut map = HeaderMap::new();
    let known = &*KNOWN;
    for field in Decoder::new(block) {
        let Field { number, name, value } = field?;
        if name.starts_with(b":") {
            pseudo(&name, value)?;
            continue;
        }
        let (name, value) = match (number, number.checked_sub(128)) {
            (_, Some(pair)) => known.pairs.get(usize::from(pair)).cloned().flatten().unzip(),
            (0, _) => {
                (HeaderName::from_lowercase(&name).ok(), HeaderValue::from_maybe_shared(value).ok())
            }
            (n, _) => (
                known.names.get(usize::from(n) - 1).cloned().flatten(),
                HeaderValue::from_maybe_shared(value).ok(),
            ),
        };
        let name =
            name.ok_or(Breach::Headers("a name with characters that HTTP does not allow"))?;
        let value =
            value.ok_or(Breach::Headers("a value with characters that HTTP does not allow"))?;
        map.try_append(name, value)
            .map_err(|_| Breach::Headers("more fields than a header map holds"))?;
    }
    Ok(map)
}

/// Reads a request's head.
pub(crate) fn decode_request(block: Bytes) -> Result<http::request::Parts, Breach> {
    let [mut method, mut scheme, mut authority, mut path] = [const { None }; 4];
    let map = decode(block, |name, value| {
        let place = match name {
            b":method" => &mut method,
            b":scheme" => &mut scheme,
            b":authority" => &mut authority,
            b":path" => &mut path,
            b":status" => return Err(Breach::Headers(":status in a request")),
            _ => return Err(Breach::Headers("an unknown pseudo-field")),
        };
        match place.replace(value) {
            Some(_) => Err(Breach::Headers("a duplicate pseudo-field")),
            None => Ok(()),
        }
    })?;
    let method = method.ok_or(Breach::Headers("no :method"))?;
    let path = path.ok_or(Breach::Headers("no :path"))?;
    let mut uri = Uri::builder().path_and_query(
        PathAndQuery::from_maybe_shared(path).map_err(|_| Breach::Headers("an invalid :path"))?,
    );
    if let Some(authority) = authority {
        let authority = Authority::from_maybe_shared(authority)
            .map_err(|_| Breach::Headers("an invalid :authority"))?;
        let scheme = match scheme.as_deref() {
            Some(b"https") => Scheme::HTTPS,
            Some(b"http") | None => Scheme::HTTP,
            Some(other) => {
                Scheme::try_from(other).map_err(|_| Breach::Headers("an invalid :scheme"))?
            }
        };
        uri = uri.scheme(scheme).authority(authority);
    }
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.method =
        Method::from_bytes(&method).map_err(|_| Breach::Headers("an invalid :method"))?;
    parts.uri = uri.build().map_err(|_| Breach::Headers("pseudo-fields that form no URI"))?;
    parts.version = Version::HTTP_2;
    parts.headers = map;
    Ok(parts)
}

/// Reads a response's head.
pub(crate) fn decode_response(block: Bytes) -> Result<http::response::Parts, Breach> {
    let mut status = None;
    let map = decode(block, |name, value| {
        if name != b":status" {
            return Err(Breach::Headers("a request's pseudo-field in a response"));
        }
        let code =
            StatusCode::from_bytes(&value).map_err(|_| Breach::Headers("an invalid :status"))?;
        match status.replace(code) {
            Some(_) => Err(Breach::Headers("a duplicate pseudo-field")),
            None => Ok(()),
        }
    })?;
    let (mut parts, ()) = http::Response::new(()).into_parts();
    parts.status = status.ok_or(Breach::Headers("no :status"))?;
    parts.version = Version::HTTP_2;
    parts.headers = map;
    Ok(parts)
}

pub(crate) fn decode_trailers(block: Bytes) -> Result<HeaderMap, Breach> {
    static ALL_WELL: PerProcess<HeaderMap> = PerProcess::new(|| {
        HeaderMap::from_iter([(
            HeaderName::from_static("grpc-status"),
            HeaderValue::from_static("0"),
        )])
    });
    match block[..] {
        [STATUS_OK] => Ok(ALL_WELL.clone()),
        _ => decode(block, |_, _| Err(Breach::Headers("a pseudo-field in trailers"))),
    }
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
        let caller = Caller::new(&origin);
        let got = decode_request(encode_request(&parts, &caller).unwrap()).unwrap();
        assert_eq!(got.uri, "https://host:1/a.B/C?q");
        assert_eq!(got.method, parts.method);
        assert_eq!(got.headers, parts.headers);
    }

    #[test]
    fn user_agents_are_appended() {
        let origin = Origin {
            user_agent: Some(HeaderValue::from_static("tonic-rdma/1")),
            ..Origin::default()
        };
        let (mut parts, ()) =
            http::Request::post("/a.B/C").header("x-a", "1").body(()).unwrap().into_parts();
        let sent = |parts: &_| {
            let block = encode_request(parts, &Caller::new(&origin)).unwrap();
            decode_request(block).unwrap().headers
        };
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
        let response =
            http::Response::builder().status(200).header("grpc-status", "0").body(()).unwrap();
        let (parts, ()) = response.into_parts();
        let got = decode_response(encode_response(&parts).unwrap()).unwrap();
        assert_eq!((got.status, got.headers), (parts.status, parts.headers.clone()));
        assert_eq!(
            decode_trailers(encode_trailers(&parts.headers).unwrap()).unwrap(),
            parts.headers
        );
    }

    #[test]
    fn bad_heads_are_breaches() {
        let mut block = Vec::new();
        put(&mut block, ":path", b"/x").unwrap();
        assert_eq!(
            decode_request(block.clone().into()).unwrap_err(),
            Breach::Headers("no :method")
        );
        put(&mut block, ":method", b"POST").unwrap();
        put(&mut block, "Upper", b"x").unwrap();
        assert!(decode_request(block.into()).is_err());
        let mut block = Vec::new();
        put(&mut block, "x", b"a\nb").unwrap();
        assert!(decode_trailers(block.into()).is_err());
    }
}
