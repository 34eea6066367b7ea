//! Passes received messages to the protocol, and the protocol's events to their streams.

use tonic_rdma_fabric::{Completion, Lent, Link, LinkError};
use tonic_rdma_memory::{LogThrottle, throttled};
use tonic_rdma_proto::{Breach, CloseCode, Event, Flow, LentBody, LentPlace, StreamId};

use crate::codec::{LentPiece, Part};
use crate::connection::call::stream_io::Fault;
use crate::connection::driver::link_events::copy_message;
use crate::connection::frame_trace::FrameTrace;
use crate::connection::lifecycle::Life;
use crate::connection::receive::unread::{Arrival, PayloadPlace};
use crate::connection::state::ConnectionState;
use crate::path::reason::{MAX_DETAIL_TEXT, MAX_LOG_TEXT, PeerText, Reason, ReasonCode};

/// Number of protocol events that count as much work as one message. A peer can put hundreds of
/// frames into one message.
const EVENTS_UNIT: usize = 16;

/// Throttles log lines about peers that break the protocol, so that a peer that reconnects cannot
/// fill the disk.
static BREACHES: LogThrottle = LogThrottle::new();
/// Throttles log lines about peers that close a connection with an error.
static CLOSED: LogThrottle = LogThrottle::new();

impl ConnectionState {
    /// Handles the link's completions.
    pub(super) fn complete(&mut self, completions: &[Completion]) -> Result<(), LinkError> {
        let mut result = Ok(());
        let (mut received, mut events) = (false, 0);
        let writing = self.link.writing();
        for completion in completions {
            match *completion {
                Completion::Sent { id } => self.link.sent(id),
                Completion::Received { slot, len } if result.is_ok() => {
                    received = true;
                    result = self.receive(slot, len).map(|more| events += more);
                }
                Completion::Received { .. } => {}
                Completion::NotMapped { rkey } => self.conn.cannot_write(rkey),
                Completion::Forgotten { rkey } => self.conn.forget_unwritable(rkey),
                Completion::Answered => {
                    self.conn.peer_exists(self.link.now());
                    self.usage.answered(&self.lifecycle.peer);
                }
            }
        }
        if received
            && events == 0
            && let Some(link) = self.link.get_mut()
        {
            link.wait_goes_on();
        }
        self.link.completed(writing, || self.conn.waits_to_write());
        result
    }

    /// Returns the memory of the SEND slots that only a busy connection needs, after the connection
    /// has been at rest for a while. If earlier work was posted without a report of its completion,
    /// a PING is sent, whose completion covers the earlier work.
    pub(crate) fn spare_sends(&mut self) {
        if self.link.rest() {
            self.conn.send_ping();
        }
        self.link.return_sends();
    }

    /// Gives a message to the protocol. Returns the number of events that the message caused.
    fn receive(&mut self, slot: u32, len: u32) -> Result<usize, LinkError> {
        let Some(link) = self.link.get_mut() else { return Ok(0) };
        let message = copy_message(link.recv_slot(slot, len));
        // Post the RECV again before the protocol can return the credit (R1).
        let posted = link.repost(slot)?;
        if FrameTrace::is_on() {
            self.link.trace.received(&message);
        }
        let received = self.conn.receive(self.link.now(), message);
        if !posted {
            self.conn.recv_gone();
        }
        if self.conn.wants_recvs() {
            self.conn.recvs_posted(self.link.grow_recvs()?);
        }
        let events = self.dispatch();
        if let Err(breach) = received {
            self.breached(&breach);
        }
        Ok(events)
    }

    /// Ends the connection of a peer that broke the protocol.
    pub(crate) fn breached(&mut self, breach: &Breach) {
        let peer = &self.lifecycle.peer;
        throttled!(in BREACHES, warn, %peer, %breach, "the peer broke the protocol; closing the connection");
        let reason =
            Reason::from_peer(ReasonCode::LinkLost, format!("protocol breach: {breach} ({peer})"));
        self.end(Life::Closing(reason));
    }

    /// Passes the protocol's events to their streams. Returns the number of events.
    pub(crate) fn dispatch(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.conn.poll_event() {
            events += 1;
            match event {
                Event::Opened { stream, block, end } => {
                    self.streams.open(stream, block, end);
                }
                Event::Headers { stream, block, end } => {
                    self.streams.change(stream, &mut self.tasks, |io| {
                        if io.head.is_none() && !io.head_taken {
                            io.head = Some((block, end));
                        } else {
                            io.trailers = Some(block);
                        }
                        io.ended |= end;
                    })
                }
                Event::Data { stream, data, end } => {
                    let (part, flow, place) =
                        (Part::Eager(data), Flow::Window, PayloadPlace::Message);
                    self.deliver(stream, Arrival { part, flow, place, end });
                }
                Event::Landed { stream, memory, begin, len, flow, end } => {
                    if let Some((landed, place)) = self.landing.landed(memory, begin, len) {
                        let part = Part::Landed(landed);
                        self.deliver(stream, Arrival { part, flow, place, end });
                    }
                }
                Event::Lent { stream, lent, end } => self.borrow(stream, *lent, end),
                Event::LeaseEnded { lease } => {
                    if let Some(link) = self.link.get_mut() {
                        link.end_lease(lease);
                    }
                }
                Event::Returned { memory } => self.landing.take_back(memory),
                Event::Reset { stream, code } => {
                    self.streams.change(stream, &mut self.tasks, |io| {
                        io.fault.get_or_insert(Fault::Reset(code));
                    })
                }
                Event::Writable { stream } => self.streams.change(stream, &mut self.tasks, |_| ()),
                Event::Refused { stream, unsent } => {
                    self.streams.change(stream, &mut self.tasks, |io| {
                        io.fault.get_or_insert(Fault::Refused(unsent));
                    })
                }
                Event::GoAway { code, text } => {
                    let short = PeerText(&text, MAX_LOG_TEXT);
                    tracing::debug!(peer = %self.lifecycle.peer, %code, text = %short, "the peer sent GOAWAY");
                    if code == CloseCode::Resources {
                        self.lifecycle.leave(
                            limit_of_peer(&PeerText(&text, MAX_DETAIL_TEXT).to_string()),
                            &mut self.conn,
                            &mut self.tasks,
                        );
                    }
                    self.tasks.wake_driver();
                }
                Event::Closed { code: CloseCode::Ok, text } => {
                    let text = PeerText(&text, MAX_LOG_TEXT).to_string();
                    tracing::debug!(peer = %self.lifecycle.peer, text, "the peer closed the connection in good order");
                    self.end(Life::Dead(Reason::from_peer(ReasonCode::GoAway, text)));
                }
                Event::Closed { code, text } => {
                    let text = PeerText(&text, MAX_LOG_TEXT);
                    throttled!(in CLOSED, warn, peer = %self.lifecycle.peer, %code, %text, "the peer closed the connection");
                    let detail =
                        format!("closed by the peer ({code}): {text} ({})", self.lifecycle.peer);
                    let reason = match code {
                        CloseCode::Resources => ReasonCode::PoolExhausted,
                        _ => ReasonCode::LinkLost,
                    };
                    self.end(Life::Dead(Reason::from_peer(reason, detail)));
                }
                Event::Quiet => {
                    match self.link.get_mut().map(Link::shrink) {
                        // Report these RECVs now, because credits must be given in the order in
                        // which RECVs were posted (R1).
                        Some(Ok(posted)) => self.conn.rest_recvs_posted(posted),
                        Some(Err(error)) => {
                            self.tasks.fail(error);
                        }
                        None => {}
                    }
                    self.streams.shrink();
                    self.tasks.driver.quiet();
                }
                Event::Probe => match self.link.get_mut().map(Link::probe) {
                    Some(Ok(true)) => self.usage.asked(),
                    Some(Ok(false)) | None => {}
                    Some(Err(error)) => {
                        self.tasks.fail(error);
                    }
                },
                Event::Dead => {
                    let detail = format!(
                        "the peer's device does not answer: its host or the path is gone ({})",
                        self.lifecycle.peer
                    );
                    self.end(Life::Dead(Reason::new(ReasonCode::LinkLost, detail)));
                }
                Event::KeepAliveTimedOut => {
                    let detail = format!(
                        "keep-alive timed out: the peer's process has not answered a ping ({})",
                        self.lifecycle.peer
                    );
                    self.end(Life::Dead(Reason::new(ReasonCode::LinkLost, detail)));
                }
            }
        }
        self.tasks.work += events / EVENTS_UNIT;
        events
    }

    /// Delivers a piece of a body to its stream.
    fn deliver(&mut self, id: StreamId, arrival: Arrival) {
        let ConnectionState { streams, conn, landing, usage, tasks, .. } = self;
        streams.deliver(id, arrival, conn, landing.relief(), &mut usage.copied, tasks);
    }

    /// Delivers a piece of a body whose main part is lent. A peer that has not lent this memory has
    /// broken the protocol.
    fn borrow(&mut self, stream: StreamId, lent: LentBody, end: bool) {
        let Some(link) = self.link.get_mut() else { return };
        let LentBody { head, place: LentPlace { lease, key, addr }, len, tail } = lent;
        match link.borrow(Lent { lease, key, addr }, len) {
            Ok(lent) => {
                let piece = LentPiece { head, lent: lent.into(), tail };
                let part = Part::Lent(Box::new(piece));
                self.deliver(
                    stream,
                    Arrival { part, flow: Flow::Lent, place: PayloadPlace::Lent, end },
                );
            }
            Err(error) => {
                let text = error.to_string();
                throttled!(warn, peer = %self.lifecycle.peer, %error, "the peer lent unknown memory; closing the connection");
                self.conn.close(CloseCode::Breach, &text);
                self.end(Life::Closing(Reason::from_peer(ReasonCode::LinkLost, text)));
            }
        }
    }
}

/// Returns the reason why a peer that has run out of a resource takes no new calls on the
/// connection. `text` is the peer's own reason, and begins with the reason's code.
fn limit_of_peer(text: &str) -> Reason {
    let named = text.split_once(": ").and_then(|(name, detail)| {
        let code = ReasonCode::from_name(name)?;
        matches!(code, ReasonCode::ProcessLimit | ReasonCode::MemoryFiles).then_some((code, detail))
    });
    let (code, detail) = named.unwrap_or((ReasonCode::ProcessLimit, text));
    Reason::from_peer(code, detail)
}
