//! Random calls, each of which is also made over stock tonic. Both give the same replies, metadata,
//! user agent and statuses. `TONIC_RDMA_TEST_SEED` repeats a run.

use std::fmt::Debug;

use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use tokio_stream::StreamExt;
use tonic::metadata::{KeyAndValueRef, MetadataMap};
use tonic::{Code, Request, Status, Streaming};
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{Client, TestEnv};
use tonic_rdma_tests::pb::{Entry, Failure, Message, Script, Step, step};
use tonic_rdma_tests::service;
use tonic_rdma_tests::service::script::{echo_all, payload, receive_all, send_many, summary};

cases![end_as_over_tonic];

/// Number of calls of a case.
const CALLS: usize = 100;
/// Maximum bytes of metadata, which leave room for tonic's own fields within the 16 KiB that a
/// stock server accepts by default.
const METADATA: usize = 12 << 10;

async fn end_as_over_tonic(env: &TestEnv) {
    let seed = match std::env::var("TONIC_RDMA_TEST_SEED") {
        Ok(text) => text.parse().unwrap(),
        Err(_) => rand::random::<u64>(),
    };
    let mut rng = SmallRng::seed_from_u64(seed);
    let stock = TestEnv::new(Fabric::Stock);
    let (_reference_server, mut reference) = stock.pair().await;
    let (_server, mut client) = env.pair().await;
    for n in 0..CALLS {
        let call = RandomCall::new(&mut rng);
        let (expected, seen) = (call.make(&mut reference).await, call.make(&mut client).await);
        if let Some(difference) = seen.difference(&expected) {
            let (kind, steps) = (call.kind, &call.script.steps);
            panic!("TONIC_RDMA_TEST_SEED={seed}, call {n}, {kind:?} of {steps:?}: {difference}");
        }
    }
}

/// The four kinds of call.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Unary,
    Upload,
    Download,
    Chat,
}

#[derive(Debug)]
struct RandomCall {
    kind: Kind,
    script: Script,
    metadata: Vec<Entry>,
    /// Sizes of the messages of a stream of requests, after the one with the script.
    requests: Vec<usize>,
}

/// Names with their values.
type Fields = Vec<(String, Vec<u8>)>;

/// The part of a call's result that a caller can see.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    head: Option<Fields>,
    /// Seed and length; the bytes have been checked.
    replies: Vec<(u64, usize)>,
    trailers: Option<Fields>,
    failure: Option<(Code, String, Vec<u8>)>,
    failure_metadata: Option<Fields>,
}

impl Outcome {
    fn of(failure: &Status) -> Self {
        let status = (failure.code(), failure.message().to_owned(), failure.details().to_vec());
        let failure_metadata = Some(sorted(failure.metadata()));
        Self { failure: Some(status), failure_metadata, ..Self::default() }
    }

    /// Names the first difference.
    fn difference(&self, expected: &Self) -> Option<String> {
        fn one<T: PartialEq + Debug>(what: &str, seen: &T, expected: &T) -> Option<String> {
            let differ = || format!("{what}: {seen:.500?} instead of {expected:.500?}");
            (seen != expected).then(differ)
        }
        fn fields(what: &str, seen: &Option<Fields>, expected: &Option<Fields>) -> Option<String> {
            let differ = seen.iter().flatten().zip(expected.iter().flatten()).find(|(a, b)| a != b);
            let name = differ.map_or("number or names of fields", |(_, (name, _))| name);
            let of = |all: &Option<Fields>| {
                let all = all.iter().flatten().filter(|field| field.0 == name || differ.is_none());
                all.map(|(name, value)| (name.clone(), value.escape_ascii().to_string()))
                    .collect::<Vec<_>>()
            };
            let differ = || format!("{what}, {name}: {:?} instead of {:?}", of(seen), of(expected));
            (seen != expected).then(differ)
        }
        one("replies", &self.replies, &expected.replies)
            .or_else(|| one("status", &self.failure, &expected.failure))
            .or_else(|| fields("head", &self.head, &expected.head))
            .or_else(|| fields("trailers", &self.trailers, &expected.trailers))
            .or_else(|| fields("status", &self.failure_metadata, &expected.failure_metadata))
    }
}

impl RandomCall {
    fn new(rng: &mut SmallRng) -> Self {
        let kind = [Kind::Unary, Kind::Upload, Kind::Download, Kind::Chat][rng.random_range(0..4)];
        let mut steps = Vec::new();
        for _ in 0..rng.random_range(0..3) {
            let size = length(rng);
            let count = if size > 100_000 { 1 } else { rng.random_range(1..5) };
            steps.push(send_many(rng.random_range(1..1000), size, count));
        }
        match rng.random_range(0..3) {
            0 => steps.push(echo_all()),
            1 => steps.extend([receive_all(), summary()]),
            _ => {}
        }
        let fails = |rng: &mut SmallRng| Step { step: Some(step::Step::Fail(failure(rng))) };
        if rng.random_bool(0.3) {
            steps.push(fails(rng));
        }
        let before = if rng.random_bool(0.1) { vec![fails(rng)] } else { Vec::new() };
        let head = entries(rng, "head-", METADATA / 2);
        let script = Script {
            before,
            head,
            steps,
            echo_metadata: true,
            describe: true,
            ..Script::default()
        };
        let requests = match kind {
            Kind::Upload | Kind::Chat => (0..rng.random_range(0..4)).map(|_| length(rng)).collect(),
            Kind::Unary | Kind::Download => Vec::new(),
        };
        Self { kind, script, metadata: entries(rng, "echo-", METADATA / 2), requests }
    }

    async fn make(&self, client: &mut Client) -> Outcome {
        let first = Message::from(self.script.clone()).with_payload(7, 10);
        let requests: Vec<Message> = std::iter::once(first.clone())
            .chain(self.requests.iter().map(|size| payload(*size as u64, *size)))
            .collect();
        let requests = tokio_stream::iter(requests);
        match self.kind {
            Kind::Unary => single(client.unary(self.request(first)).await),
            Kind::Upload => single(client.upload(self.request(requests)).await),
            Kind::Download => streamed(client.download(self.request(first)).await).await,
            Kind::Chat => streamed(client.chat(self.request(requests)).await).await,
        }
    }

    fn request<T>(&self, of: T) -> Request<T> {
        let mut request = Request::new(of);
        service::append(request.metadata_mut(), &self.metadata);
        request
    }
}

/// A length of a random order of magnitude, up to just above tonic's limit of 4 MiB.
fn length(rng: &mut SmallRng) -> usize {
    match rng.random_range(0..8) {
        0 => 0,
        1..=3 => rng.random_range(1..2_000),
        4 | 5 => rng.random_range(2_000..100_000),
        6 => rng.random_range(100_000..1_000_000),
        // Close to the limit, on both sides.
        _ => rng.random_range((4 << 20) - 200..(4 << 20) + 200),
    }
}

/// Up to seven entries with keys that begin with `prefix`. Their values have less than `most` bytes
/// together.
fn entries(rng: &mut SmallRng, prefix: &str, most: usize) -> Vec<Entry> {
    let count = rng.random_range(0..8);
    let entry = |_| {
        let mut value = vec![0; rng.random_range(0..most / 16)];
        rng.fill_bytes(&mut value);
        // Keys occur more than once.
        let n = rng.random_range(0..6);
        if rng.random_bool(0.5) {
            return Entry { key: format!("{prefix}{n}-bin"), value: value.into() };
        }
        for byte in &mut value {
            *byte = b'!' + *byte % (b'~' - b'!' + 1);
        }
        Entry { key: format!("{prefix}{n}"), value: value.into() }
    };
    (0..count).map(entry).collect()
}

fn failure(rng: &mut SmallRng) -> Failure {
    let chars = rng.random_range(0..200);
    let mut details = vec![0; rng.random_range(0..1000)];
    rng.fill_bytes(&mut details);
    Failure {
        code: rng.random_range(1..17),
        message: (0..chars).map(|_| rng.random::<char>()).collect(),
        details: details.into(),
        metadata: entries(rng, "trailer-", METADATA / 4),
    }
}

fn single(result: Result<tonic::Response<Message>, Status>) -> Outcome {
    match result {
        Ok(response) => {
            let reply = response.get_ref();
            reply.expect(reply.seed, reply.payload.len());
            let replies = vec![(reply.seed, reply.payload.len())];
            // tonic merges the trailers into the head here.
            Outcome { head: Some(sorted(response.metadata())), replies, ..Outcome::default() }
        }
        Err(status) => Outcome::of(&status),
    }
}

async fn streamed(result: Result<tonic::Response<Streaming<Message>>, Status>) -> Outcome {
    let response = match result {
        Ok(response) => response,
        Err(status) => return Outcome::of(&status),
    };
    let mut outcome = Outcome { head: Some(sorted(response.metadata())), ..Outcome::default() };
    let mut replies = response.into_inner();
    while let Some(reply) = replies.next().await {
        match reply {
            Ok(reply) => {
                reply.expect(reply.seed, reply.payload.len());
                outcome.replies.push((reply.seed, reply.payload.len()));
            }
            Err(status) => {
                let Outcome { head, replies, .. } = outcome;
                return Outcome { head, replies, ..Outcome::of(&status) };
            }
        }
    }
    outcome.trailers = replies.trailers().await.unwrap().map(|trailers| sorted(&trailers));
    outcome
}

/// Returns the fields sorted by name, without the date and the addresses. Fields of the same name
/// keep their order.
fn sorted(metadata: &MetadataMap) -> Fields {
    let mut fields: Fields = metadata
        .iter()
        .map(|field| match field {
            KeyAndValueRef::Ascii(key, value) => (key.to_string(), value.as_bytes().to_vec()),
            KeyAndValueRef::Binary(key, value) => {
                (key.to_string(), value.to_bytes().unwrap().to_vec())
            }
        })
        .filter(|(key, _)| key != "date" && !(key.starts_with("seen-") && key.ends_with("-addr")))
        .collect();
    fields.sort_by(|(a, _), (b, _)| a.cmp(b));
    fields
}
