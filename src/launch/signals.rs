//! Converts the signals that ringrun receives to events of a `mio` poll.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream as StdStream;

use mio::net::UnixStream;
use mio::{Interest, Registry, Token};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::low_level::pipe;

use super::processes;

/// The signals that ringrun handles. SIGCHLD reports that a process ended; the other signals are passed on to the
/// ranks.
const HANDLED_SIGNALS: [i32; 10] =
    [SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH];

const _: () = assert!(SIGKILL == 9, "ringrun needs the signal numbers of Linux");

/// One socket for each signal. The signal handler writes a byte to the socket of its signal.
#[derive(Debug)]
pub(super) struct Signals {
    streams: Vec<(i32, UnixStream)>,
    first_token: usize,
}

impl Signals {
    /// Installs handlers for the signals. The sockets of the signals have consecutive tokens, beginning with
    /// `first_token`.
    pub(super) fn register(registry: &Registry, first_token: usize) -> io::Result<Self> {
        let mut streams = Vec::new();
        for signal in HANDLED_SIGNALS {
            // ringrun under nohup ignores SIGHUP, so that the job continues when its terminal closes.
            if signal == SIGHUP && processes::is_signal_ignored(SIGHUP) {
                continue;
            }
            let (read, write) = StdStream::pair()?;
            pipe::register(signal, write)?;
            read.set_nonblocking(true)?;
            let mut stream = UnixStream::from_std(read);
            registry.register(&mut stream, Token(first_token + streams.len()), Interest::READABLE)?;
            streams.push((signal, stream));
        }
        Ok(Self { streams, first_token })
    }

    /// Returns the signal of a token if this signal has arrived since the last call. A signal that arrived several
    /// times counts once, as in the kernel.
    pub(super) fn take_signal(&mut self, token: Token) -> Option<i32> {
        let (signal, stream) = self.streams.get_mut(token.0.checked_sub(self.first_token)?)?;
        let mut bytes = [0; 64];
        let mut has_arrived = false;
        while matches!(stream.read(&mut bytes), Ok(count) if count > 0) {
            has_arrived = true;
        }
        has_arrived.then_some(*signal)
    }
}
