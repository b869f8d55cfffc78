//! PLACEHOLDER for `crate::rendezvous`: the same names, but a server that answers nobody.

use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use crate::types::WorldSize;

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on 127.0.0.1: {0}")]
pub struct StartError(#[from] io::Error);

pub(super) struct Secret([u8; 32]);

impl Secret {
    pub(super) fn random() -> Self {
        Self(rand::random())
    }

    pub(super) fn to_hex(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

pub(super) struct Server {
    _listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    pub(super) fn start(_: WorldSize, _: &Secret, _: Duration) -> Result<Self, StartError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        Ok(Self { _listener: listener, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}
