//! A proxy in front of the port of a rank. The proxy damages the bytes that it forwards.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

/// The damage that the proxy does to the forwarded bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Damage {
    /// The proxy forwards all bytes unchanged.
    None,
    /// The proxy flips one bit in the middle of the next read of more than 4 KiB, and then forwards all bytes
    /// unchanged.
    FlipBit,
    /// The proxy resets every connection.
    Reset,
    /// The proxy discards the bytes that the accepting rank of each connection sends.
    BlockOneWay,
}

/// A proxy that forwards connections until the test program ends.
pub struct Proxy {
    damage: Arc<AtomicU8>,
}

impl Proxy {
    /// Starts a proxy that listens on `listen` and forwards connections to `target`.
    pub fn start(listen: SocketAddr, target: SocketAddr) -> Self {
        let damage = Arc::new(AtomicU8::new(Damage::None as u8));
        let listener = TcpListener::bind(listen).expect("the proxy's address is free");
        let shared = Arc::clone(&damage);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // If the rank does not listen yet, `continue` closes the client's connection, and the client connects
                // again.
                let Ok(server) = TcpStream::connect(target) else { continue };
                for (from, to, is_reply) in [(&client, &server, false), (&server, &client, true)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let damage = Arc::clone(&shared);
                    thread::spawn(move || forward_bytes(from, to, is_reply, &damage));
                }
            }
        });
        Self { damage }
    }

    pub fn set(&self, damage: Damage) {
        self.damage.store(damage as u8, Ordering::SeqCst);
    }
}

/// Forwards bytes in one direction of a connection. `is_reply` is true if the accepting rank sends these bytes.
fn forward_bytes(mut from: TcpStream, mut to: TcpStream, is_reply: bool, damage: &AtomicU8) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if damage.load(Ordering::SeqCst) == Damage::Reset as u8 {
            for stream in [&from, &to] {
                let socket = socket2::SockRef::from(stream);
                let _ = socket.set_linger(Some(std::time::Duration::ZERO));
                let _ = stream.shutdown(Shutdown::Read);
            }
            return;
        }
        if is_reply && damage.load(Ordering::SeqCst) == Damage::BlockOneWay as u8 {
            continue;
        }
        let flip = (Damage::FlipBit as u8, Damage::None as u8);
        if count > 4096 && damage.compare_exchange(flip.0, flip.1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            bytes[count / 2] ^= 1;
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    if damage.load(Ordering::SeqCst) != Damage::Reset as u8 {
        let _ = to.shutdown(Shutdown::Write);
    }
}
