//! Signals to ringrun as readiness of a poll.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream as StdStream;

use mio::net::UnixStream;
use mio::{Interest, Registry, Token};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::low_level::pipe;

use super::processes;

/// SIGCHLD tells us of ranks; the others are told to them.
const HANDLED: [i32; 10] =
    [SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH];

const _: () = assert!(SIGKILL == 9, "the numbers of Linux");

/// A socket per signal, into which the signal's handler writes a byte.
#[derive(Debug)]
pub(super) struct Signals {
    streams: Vec<(i32, UnixStream)>,
    first: usize,
}

impl Signals {
    /// Takes over the signals; they wake the poll with tokens from `first` on.
    pub(super) fn register(registry: &Registry, first: usize) -> io::Result<Self> {
        let mut streams = Vec::new();
        for signal in HANDLED {
            // A job under nohup outlives its terminal.
            if signal == SIGHUP && processes::is_ignored(SIGHUP) {
                continue;
            }
            let (read, write) = StdStream::pair()?;
            pipe::register(signal, write)?;
            read.set_nonblocking(true)?;
            let mut stream = UnixStream::from_std(read);
            registry.register(&mut stream, Token(first + streams.len()), Interest::READABLE)?;
            streams.push((signal, stream));
        }
        Ok(Self { streams, first })
    }

    /// The signal behind a token. Several of the same count as one, as they do in the kernel.
    pub(super) fn take(&mut self, token: Token) -> Option<i32> {
        let (signal, stream) = self.streams.get_mut(token.0.checked_sub(self.first)?)?;
        let mut bytes = [0; 64];
        let mut any = false;
        while matches!(stream.read(&mut bytes), Ok(count) if count > 0) {
            any = true;
        }
        any.then_some(*signal)
    }
}
