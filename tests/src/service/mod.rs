//! The scripted service: every handler executes the script in its request.

use std::future::pending;
use std::pin::Pin;

use prost::Message as _;
use tokio_stream::{Stream, StreamExt, once};
use tonic::metadata::{
    AsciiMetadataKey, BinaryMetadataKey, BinaryMetadataValue, KeyAndValueRef, MetadataMap,
};
use tonic::{Code, Request, Response, Status};

use crate::pb::conformance_server::{Conformance, ConformanceServer};
use crate::pb::step::Step as Kind;
use crate::pb::{Entry, Failure, Message, Script, Step};
use crate::probe::{Guard, Probe};

pub mod pattern;
pub mod script;
mod unary_only;

pub use unary_only::UnaryOnly;

type Messages = Pin<Box<dyn Stream<Item = Result<Message, Status>> + Send>>;

/// The metadata key that carries a script in place of the first message.
pub const SCRIPT_KEY: &str = "script-bin";

/// An extension that layers and interceptors add for the handler to see.
#[derive(Clone, Debug)]
pub struct Tag(pub String);

/// The service. Clones share the probe.
#[derive(Clone, Debug)]
pub struct Scripted {
    probe: Probe,
}

impl Scripted {
    /// A service that reports to `probe`, with no limit on message sizes.
    pub fn server(probe: &Probe) -> ConformanceServer<Scripted> {
        Self::server_with_default_limits(probe)
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    }

    /// A service with tonic's default limits on message sizes.
    pub fn server_with_default_limits(probe: &Probe) -> ConformanceServer<Scripted> {
        ConformanceServer::new(Scripted { probe: probe.clone() })
    }

    /// Finds the script, runs the steps before the head, and creates the head.
    async fn begin(&self, request: Request<Messages>) -> Result<StartedScript, Status> {
        let head = Head::of(&request);
        let in_metadata = request.metadata().get_bin(SCRIPT_KEY).cloned();
        let mut inbound = request.into_inner();
        let script = match in_metadata {
            Some(script) => decode_script(&script)?,
            None => {
                let mut first = inbound
                    .next()
                    .await
                    .ok_or_else(|| Status::invalid_argument("no message, so no script"))??;
                let script = first.script.take().unwrap_or_default();
                inbound = Box::pin(once(Ok(first)).chain(inbound));
                script
            }
        };
        let mut guard = self.probe.guard(&script.id);
        self.probe.report(format!("began:{}", script.id));
        let mut running = RunningScript {
            probe: self.probe.clone(),
            id: script.id.clone(),
            inbound: Some(inbound),
            count: 0,
            total: 0,
        };
        for step in script.before.clone() {
            match running.step(step).await {
                Ok(StepOutput::Nothing) => {}
                Ok(_) => return Err(Status::internal("nothing can be sent before the head")),
                Err(status) => {
                    guard.finish();
                    return Err(status);
                }
            }
        }
        let mut metadata = MetadataMap::new();
        append(&mut metadata, &script.head);
        if script.echo_metadata {
            head.echo(&mut metadata);
        }
        if script.describe {
            head.describe(&mut metadata);
        }
        Ok(StartedScript { steps: script.steps, metadata, running, guard })
    }

    async fn single(&self, request: Request<Messages>) -> Result<Response<Message>, Status> {
        let StartedScript { steps, metadata, running, mut guard } = self.begin(request).await?;
        let mut messages = running.run(steps, None);
        let reply = messages.next().await;
        guard.finish();
        let mut response = Response::new(reply.unwrap_or_else(|| Ok(Message::default()))?);
        *response.metadata_mut() = metadata;
        Ok(response)
    }

    async fn streaming(&self, request: Request<Messages>) -> Result<Response<Messages>, Status> {
        let StartedScript { steps, metadata, running, guard } = self.begin(request).await?;
        let mut response = Response::new(running.run(steps, Some(guard)));
        *response.metadata_mut() = metadata;
        Ok(response)
    }
}

struct StartedScript {
    steps: Vec<Step>,
    metadata: MetadataMap,
    running: RunningScript,
    guard: Guard,
}

fn decode_script(value: &BinaryMetadataValue) -> Result<Script, Status> {
    let bytes =
        value.to_bytes().map_err(|e| Status::invalid_argument(format!("{SCRIPT_KEY}: {e}")))?;
    Script::decode(bytes).map_err(|e| Status::invalid_argument(format!("{SCRIPT_KEY}: {e}")))
}

/// The parts of the call other than messages that the handler can see.
struct Head {
    metadata: MetadataMap,
    seen: Vec<(&'static str, String)>,
}

impl Head {
    fn of<T>(request: &Request<T>) -> Self {
        let mut seen = Vec::new();
        let mut see = |key, value: Option<String>| {
            if let Some(value) = value {
                seen.push((key, value));
            }
        };
        let text = |key: &str| {
            let value = request.metadata().get(key)?;
            value.to_str().ok().map(str::to_owned)
        };
        see("seen-remote-addr", request.remote_addr().map(|a| a.to_string()));
        see("seen-local-addr", request.local_addr().map(|a| a.to_string()));
        see("seen-timeout", text("grpc-timeout"));
        see("seen-user-agent", text("user-agent"));
        see("seen-encoding", text("grpc-encoding"));
        see("seen-tag", request.extensions().get::<Tag>().map(|t| t.0.clone()));
        Self { metadata: request.metadata().clone(), seen }
    }

    fn echo(&self, out: &mut MetadataMap) {
        for entry in self.metadata.iter() {
            match entry {
                KeyAndValueRef::Ascii(key, value) if key.as_str().starts_with("echo-") => {
                    out.append(key.clone(), value.clone());
                }
                KeyAndValueRef::Binary(key, value) if key.as_str().starts_with("echo-") => {
                    out.append_bin(key.clone(), value.clone());
                }
                _ => {}
            }
        }
    }

    fn describe(&self, out: &mut MetadataMap) {
        for (key, value) in &self.seen {
            out.append(*key, value.parse().unwrap());
        }
    }
}

/// Appends entries in order.
pub fn append(metadata: &mut MetadataMap, entries: &[Entry]) {
    for Entry { key, value } in entries {
        if key.ends_with("-bin") {
            let key = BinaryMetadataKey::from_bytes(key.as_bytes()).unwrap();
            metadata.append_bin(key, BinaryMetadataValue::from_bytes(value));
        } else {
            let key = AsciiMetadataKey::from_bytes(key.as_bytes()).unwrap();
            metadata.append(key, std::str::from_utf8(value).unwrap().parse().unwrap());
        }
    }
}

/// A script and the state of its steps.
struct RunningScript {
    probe: Probe,
    id: String,
    inbound: Option<Messages>,
    count: u64,
    total: u64,
}

/// The messages that a step sends.
enum StepOutput {
    Nothing,
    One(Message),
    /// Messages of this number, size and first seed.
    Many(crate::pb::Send),
    /// This number of arriving messages, or all of them if it is zero.
    Echo(u64),
}

impl RunningScript {
    fn run(mut self, steps: Vec<Step>, mut guard: Option<Guard>) -> Messages {
        Box::pin(async_stream::stream! {
            for step in steps {
                let out = match self.step(step).await {
                    Ok(out) => out,
                    Err(status) => {
                        if let Some(guard) = &mut guard {
                            guard.finish();
                        }
                        yield Err(status);
                        return;
                    }
                };
                match out {
                    StepOutput::Nothing => {}
                    StepOutput::One(message) => yield Ok(message),
                    StepOutput::Many(send) => {
                        for seed in (send.seed..).take(send.count as usize) {
                            let payload = pattern::make(seed, send.size as usize);
                            self.probe.report(format!("sent:{}", self.id));
                            yield Ok(Message { payload, seed, ..Message::default() });
                        }
                    }
                    StepOutput::Echo(count) => {
                        let mut left = if count == 0 { u64::MAX } else { count };
                        while left > 0 {
                            match self.receive().await {
                                Ok(Some(mut message)) => {
                                    message.script = None;
                                    yield Ok(message);
                                }
                                Ok(None) if count == 0 => break,
                                Ok(None) => {
                                    yield Err(ended_early());
                                    return;
                                }
                                Err(status) => {
                                    yield Err(status);
                                    return;
                                }
                            }
                            left -= 1;
                        }
                    }
                }
            }
            if let Some(guard) = &mut guard {
                guard.finish();
            }
        })
    }

    /// Executes a step, except for the messages that it sends.
    async fn step(&mut self, step: Step) -> Result<StepOutput, Status> {
        let kind = step.step.ok_or_else(|| Status::invalid_argument("an empty step"))?;
        match kind {
            Kind::Send(send) => return Ok(StepOutput::Many(send)),
            Kind::Echo(count) => return Ok(StepOutput::Echo(count)),
            Kind::Receive(0) => while self.receive().await?.is_some() {},
            Kind::Receive(count) => {
                for _ in 0..count {
                    self.receive().await?.ok_or_else(ended_early)?;
                }
            }
            Kind::Summary(_) => {
                return Ok(StepOutput::One(Message {
                    count: self.count,
                    total: self.total,
                    ..Message::default()
                }));
            }
            Kind::Gate(name) => self.probe.pass(&name).await,
            Kind::Report(event) => self.probe.report(event),
            Kind::Fail(failure) => return Err(status(failure)),
            Kind::Hang(_) => pending().await,
            #[allow(clippy::panic)]
            Kind::Panic(text) => panic!("{text}"),
            Kind::DropInbound(_) => self.inbound = None,
        }
        Ok(StepOutput::Nothing)
    }

    /// Receives and checks the next message. `None` after the caller's half-close.
    async fn receive(&mut self) -> Result<Option<Message>, Status> {
        let inbound = self
            .inbound
            .as_mut()
            .ok_or_else(|| Status::failed_precondition("the inbound stream was let go"))?;
        match inbound.next().await {
            None => {
                self.probe.report(format!("half-closed:{}", self.id));
                Ok(None)
            }
            Some(Ok(message)) => {
                pattern::check(message.seed, &message.payload).map_err(Status::data_loss)?;
                self.count += 1;
                self.total += message.payload.len() as u64;
                self.probe.report(format!("received:{}", self.id));
                Ok(Some(message))
            }
            Some(Err(status)) => {
                self.probe.report(format!("inbound-failed:{}", self.id));
                Err(status)
            }
        }
    }
}

fn ended_early() -> Status {
    Status::failed_precondition("the caller half-closed before the script was done")
}

fn status(failure: Failure) -> Status {
    let mut metadata = MetadataMap::new();
    append(&mut metadata, &failure.metadata);
    Status::with_details_and_metadata(
        Code::from(failure.code),
        failure.message,
        failure.details,
        metadata,
    )
}

#[tonic::async_trait]
impl Conformance for Scripted {
    type DownloadStream = Messages;
    type ChatStream = Messages;

    async fn unary(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        self.single(request.map(|m| Box::pin(once(Ok(m))) as Messages)).await
    }

    async fn upload(
        &self,
        request: Request<tonic::Streaming<Message>>,
    ) -> Result<Response<Message>, Status> {
        self.single(request.map(|s| Box::pin(s) as Messages)).await
    }

    async fn download(&self, request: Request<Message>) -> Result<Response<Messages>, Status> {
        self.streaming(request.map(|m| Box::pin(once(Ok(m))) as Messages)).await
    }

    async fn chat(
        &self,
        request: Request<tonic::Streaming<Message>>,
    ) -> Result<Response<Messages>, Status> {
        self.streaming(request.map(|s| Box::pin(s) as Messages)).await
    }
}
