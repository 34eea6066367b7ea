//! A TCP relay that lets so much of a server's answer through, and then no more: what is under way stays under way.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

pub(crate) struct Relay {
    pub(crate) url: String,
    /// Hears once when the limit is reached.
    pub(crate) stalled: Receiver<()>,
}

impl Relay {
    /// Relays one connection to `port`; passes on `limit` bytes of what the server sends. When the server closes its end,
    /// the client sees it.
    pub(crate) fn start(port: u16, limit: usize) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (stall, stalled) = channel();
        thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || {
                // Ends when either side is gone.
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let mut buffer = vec![0; 64 << 10];
            let mut left = limit;
            let mut told = false;
            while let Ok(read @ 1..) = server.read(&mut buffer) {
                let pass = read.min(left);
                if client.write_all(&buffer[..pass]).is_err() {
                    break;
                }
                left -= pass;
                if left == 0 && !told {
                    told = true;
                    let _ = stall.send(());
                }
            }
            let _ = client.shutdown(Shutdown::Both);
        });
        Relay { url, stalled }
    }
}
