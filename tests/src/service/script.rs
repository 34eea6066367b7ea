//! Builders for the scripts that handlers execute.

use tonic::Code;

use crate::pb::step::Step as Kind;
use crate::pb::{Entry, Failure, Message, Script, Send, Step};
use crate::service::pattern;

fn step(kind: Kind) -> Step {
    Step { step: Some(kind) }
}

/// Send one message of `size` bytes with `seed`.
pub fn send(seed: u64, size: usize) -> Step {
    send_many(seed, size, 1)
}

/// Send `count` messages of `size` bytes with consecutive seeds, starting at `seed`.
pub fn send_many(seed: u64, size: usize, count: u64) -> Step {
    let size = size as u64;
    step(Kind::Send(Send { size, seed, count }))
}

/// Echo `count` messages.
pub fn echo(count: u64) -> Step {
    assert_ne!(count, 0, "echo_all says it better");
    step(Kind::Echo(count))
}

/// Echo until the caller's half-close.
pub fn echo_all() -> Step {
    step(Kind::Echo(0))
}

/// Read `count` messages.
pub fn receive(count: u64) -> Step {
    assert_ne!(count, 0, "receive_all says it better");
    step(Kind::Receive(count))
}

/// Read until the caller's half-close.
pub fn receive_all() -> Step {
    step(Kind::Receive(0))
}

/// Send a summary of the messages received so far.
pub fn summary() -> Step {
    step(Kind::Summary(true))
}

/// Report `gate:NAME` and wait for the gate to open.
pub fn gate(name: impl Into<String>) -> Step {
    step(Kind::Gate(name.into()))
}

/// Report an event.
pub fn report(name: impl Into<String>) -> Step {
    step(Kind::Report(name.into()))
}

/// End with a status.
pub fn fail(code: Code, message: impl Into<String>) -> Step {
    fail_with(code, message, &[], &[])
}

/// End with a status that has details and metadata.
pub fn fail_with(
    code: Code,
    message: impl Into<String>,
    details: &[u8],
    metadata: &[(&str, &[u8])],
) -> Step {
    step(Kind::Fail(Failure {
        code: code as i32,
        message: message.into(),
        details: details.to_vec().into(),
        metadata: entries(metadata),
    }))
}

/// Wait forever.
pub fn hang() -> Step {
    step(Kind::Hang(true))
}

/// A step at which the handler panics.
pub fn panic(text: impl Into<String>) -> Step {
    step(Kind::Panic(text.into()))
}

/// Drop the request stream.
pub fn drop_inbound() -> Step {
    step(Kind::DropInbound(true))
}

/// Metadata entries.
pub fn entries(pairs: &[(&str, &[u8])]) -> Vec<Entry> {
    pairs
        .iter()
        .map(|(key, value)| Entry { key: (*key).to_owned(), value: value.to_vec().into() })
        .collect()
}

/// A message with `size` bytes of the pattern of `seed`, and without a script.
pub fn payload(seed: u64, size: usize) -> Message {
    Message { payload: pattern::make(seed, size), seed, ..Message::default() }
}

/// A message with these steps as its script.
pub fn steps(id: &str, steps: impl Into<Vec<Step>>) -> Message {
    Script { id: id.to_owned(), steps: steps.into(), ..Script::default() }.into()
}

/// A message with a script whose steps run before the response head.
pub fn before(id: &str, before: impl Into<Vec<Step>>) -> Message {
    Script { id: id.to_owned(), before: before.into(), ..Script::default() }.into()
}

impl From<Script> for Message {
    fn from(script: Script) -> Self {
        Message { script: Some(script), ..Message::default() }
    }
}

impl Message {
    /// The message with `size` bytes of the pattern of `seed` as its payload.
    pub fn with_payload(mut self, seed: u64, size: usize) -> Self {
        self.payload = pattern::make(seed, size);
        self.seed = seed;
        self
    }

    /// Checks that the message carries exactly `size` bytes of the pattern of `seed`.
    ///
    /// # Panics
    /// It carries anything else.
    #[track_caller]
    pub fn expect(&self, seed: u64, size: usize) {
        assert_eq!((self.seed, self.payload.len()), (seed, size));
        pattern::check(seed, &self.payload).unwrap();
    }
}
