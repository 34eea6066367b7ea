//! Messages of up to 4 GiB - 1, the longest that the header of a gRPC message can state. Each
//! message repeats the bytes of one block, and nobody copies the bytes.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;

use super::super::*;
use crate::config::Config;
use crate::payload::Payload;

/// Bytes of a message's header: a flag, and the length as four bytes.
const HEADER: usize = 5;
const BLOCK: usize = 1 << 20;

/// A driver without real landing memory: it only counts grants, each of up to `most` bytes.
struct Numbers {
    most: u32,
    granted: BTreeMap<usize, u32>,
    next: usize,
    /// Bytes that WRITEs have carried.
    written: u64,
    /// Body bytes received, pieces landed, and the maximum of bytes granted at a time.
    landed: (u64, usize, u64),
    ended: bool,
}

impl Numbers {
    fn new(most: u32) -> Self {
        let (granted, landed) = (BTreeMap::new(), (0, 0, 0));
        Numbers { most, granted, next: 0, written: 0, landed, ended: false }
    }

    fn drive(&mut self, conn: &mut Connection) {
        while let Some(event) = conn.poll_event() {
            match event {
                Event::Landed { stream, memory, len, flow, end, .. } => {
                    self.granted.remove(&memory).unwrap();
                    (self.landed.0, self.landed.1) =
                        (self.landed.0 + u64::from(len), self.landed.1 + 1);
                    self.ended |= end;
                    conn.consume(stream, len, flow);
                }
                Event::Returned { memory } => drop(self.granted.remove(&memory)),
                Event::Data { stream, data, end } => {
                    self.landed.0 += data.len() as u64;
                    self.ended |= end;
                    conn.consume(stream, data.len() as u32, Flow::Window);
                }
                _ => {}
            }
        }
        while let Some(want) = conn.poll_landing(|_| true) {
            let len = want.want.min(self.most);
            assert!(len >= want.min);
            (self.next, _) = (self.next + 1, self.granted.insert(self.next, len));
            let granted = self.granted.values().map(|len| u64::from(*len)).sum();
            self.landed.2 = self.landed.2.max(granted);
            let addr = (self.next as u64) << 32;
            let memory = GrantMemory { key: self.next - 1, addr, rkey: 1, len };
            conn.provide_landing(want.key, memory);
        }
    }
}

/// Sends a message of `len` bytes from the client, and returns what the server has counted.
fn send(config: Config, len: u64, most: u32) -> Numbers {
    let now = Instant::now();
    let mut client = Connection::client(config.clone(), config.settings(), now);
    let server = Connection::server(config.clone(), config.settings(), now);
    let block = Bytes::from(vec![7; BLOCK]);
    let mut payload = Payload::new();
    payload.push(Bytes::from(vec![0; HEADER]), false);
    let mut left = len;
    while left > 0 {
        let piece = block.slice(..BLOCK.min(left as usize));
        left -= piece.len() as u64;
        payload.push(piece, true);
    }
    let id = client.open(Bytes::from_static(b"head"), false).unwrap();
    client.send_payload(id, payload, true).unwrap();
    let mut sides = [(client, Numbers::new(most)), (server, Numbers::new(most))];
    let mut slot = vec![0; config.slot_size as usize];
    let room = Room { write: 1 << 20, staging: 1 << 20, chunk: 0 };
    loop {
        let mut idle = true;
        for at in 0..2 {
            let (conn, numbers) = &mut sides[at];
            numbers.drive(conn);
            while let Some(work) = sides[at].0.poll_transmit(Some(&mut slot), room) {
                idle = false;
                match work {
                    Transmit::Send(len) => {
                        let message = Bytes::copy_from_slice(&slot[..len]);
                        sides[1 - at].0.receive(now, message).unwrap();
                    }
                    Transmit::Write(write) => sides[at].1.written += write.src.len() as u64,
                }
            }
        }
        if idle {
            let [(_, client), (_, mut server)] = sides;
            server.written = client.written;
            return server;
        }
    }
}

#[test]
fn the_longest_message_of_grpc_lands_in_parts() {
    let longest = u64::from(u32::MAX);
    for (whole, most) in [(0, u32::MAX), (256 << 20, u32::MAX), (256 << 20, 3 << 20)] {
        let config = Config { whole, standing_grants: 0, ..Config::default() };
        // The window includes the unused bytes in front of the address at which a part begins.
        let window = u64::from(config.bulk_window.max(whole)) + 4096;
        let server = send(config, longest, most);
        let (bytes, pieces, peak) = server.landed;
        assert!(server.ended && server.granted.is_empty());
        assert_eq!((bytes, server.written), (longest + HEADER as u64, longest + HEADER as u64));
        assert!(pieces > 16 && peak <= window, "{pieces} pieces, {peak} of {window} bytes granted");
    }
}
