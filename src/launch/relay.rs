//! The relay: the ringrun that ssh has started on a host from which ringrun reaches further hosts. The relay starts the agent of
//! its host and an ssh for each further host, and passes on their bytes without reading them. See
//! [the messages](super::relay_messages).
//!
//! The relay decides nothing. If its connection to ringrun ends, or the relay is killed, the standard input of each program that
//! it has started ends. That is the signal to stop for agents and for further relays.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::frame_link::FrameLink;
use super::frames::{AgentFrame, FrameReader, MAGIC, OUTPUT_BYTES_MAX, encode_message, encode_relayed};
use super::outcome::exit_code_of_signal;
use super::pipe_ends::{ReadEnd, WriteEnd};
use super::plan::HOSTS_MAX;
use super::processes;
use super::relay_messages::{FromRelay, OWN_AGENT_CHANNEL, ToRelay};
use super::signals::Signals;
use super::ssh::{AGENT_OPTION, SSH_FAILED, ssh_command};
use super::streams::OutputStream;
use crate::exit::Exit;

/// While ringrun has not taken this number of bytes, the relay reads nothing from its programs, which then block. So hosts that
/// print without end do not fill the memory of the relay.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// How long the programs may take to end after the connection to ringrun has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);

const READ_TOKEN: Token = Token(1 << 16);
const WRITE_TOKEN: Token = Token(READ_TOKEN.0 + 1);
/// Each program has three tokens, for the three pipes.
const FIRST_PROGRAM_TOKEN: usize = READ_TOKEN.0 + 2;
const TOKENS_PER_PROGRAM: usize = 3;
const FIRST_SIGNAL_TOKEN: usize = 1;

/// Runs the relay.
pub(super) fn main() -> ExitCode {
    processes::set_process_name("ring-relay");
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // Standard error is closed if the connection has ended.
            let _ = io::Write::write_all(&mut io::stderr(), format!("ringrun relay: {reason}\n").as_bytes());
            Exit::Failure.into()
        }
    }
}

fn run() -> Result<(), String> {
    let no_pipes = |error: io::Error| format!("only ringrun starts a relay, with pipes: {error}");
    let reader = io::stdin().as_fd().try_clone_to_owned().map_err(no_pipes)?;
    let writer = io::stdout().as_fd().try_clone_to_owned().map_err(no_pipes)?;
    let poll = Poll::new().map_err(no_pipes)?;
    let signals = Signals::register(poll.registry(), FIRST_SIGNAL_TOKEN).map_err(no_pipes)?;
    let mut link = FrameLink::new((reader, writer), FrameReader::of_launcher()).map_err(no_pipes)?;
    link.register(poll.registry(), (READ_TOKEN, WRITE_TOKEN)).map_err(no_pipes)?;
    link.send(MAGIC);
    link.send(&encode_message(&FromRelay::Hello { version: env!("CARGO_PKG_VERSION").to_owned() }));
    let mut relay = Relay {
        poll,
        signals,
        link,
        programs: Vec::new(),
        is_stopped: false,
        buffer: vec![0; OUTPUT_BYTES_MAX],
    };
    let result = relay.pass_bytes();
    relay.end_programs();
    result
}

/// A program that the relay has started, at the end of a channel.
struct RelayedProgram {
    channel: u16,
    child: Child,
    stdin: WriteEnd,
    stdout: ReadEnd,
    stderr: ReadEnd,
    /// How the program has ended; `None` while it runs.
    end: Option<ExitStatus>,
    has_reported_end: bool,
}

/// The relay of one host.
struct Relay {
    poll: Poll,
    signals: Signals,
    /// The connection to ringrun.
    link: FrameLink,
    programs: Vec<RelayedProgram>,
    /// Whether a signal has asked the relay to stop.
    is_stopped: bool,
    /// For the bytes of one read.
    buffer: Vec<u8>,
}

impl Relay {
    /// Passes bytes on until the connection to ringrun ends.
    fn pass_bytes(&mut self) -> Result<(), String> {
        loop {
            self.link.flush();
            for frame in self.link.receive()? {
                self.handle_frame(frame)?;
            }
            if self.link.has_ended() || self.is_stopped {
                return Ok(());
            }
            for program in &mut self.programs {
                program.stdin.flush();
                program.pass_output(&mut self.link, &mut self.buffer);
            }
            let is_blocked = self.link.unsent_bytes() >= UNSENT_BYTES_MAX;
            let has_output = !is_blocked && self.programs.iter().any(RelayedProgram::is_readable);
            let has_more = has_output || self.link.is_readable();
            self.wait_for_events(has_more.then_some(Duration::ZERO))?;
        }
    }

    fn handle_frame(&mut self, frame: AgentFrame) -> Result<(), String> {
        let wrong = |what| Err(format!("ringrun sent {what}"));
        match frame {
            AgentFrame::Message(body) => {
                let ToRelay::Open { channel, ssh } = AgentFrame::parse(&body)?;
                if self.programs.len() > HOSTS_MAX || self.find_program(channel).is_some() {
                    return wrong("a channel that is in use, or too many channels");
                }
                self.open_channel(channel, ssh)
            }
            AgentFrame::Relayed { channel, bytes, .. } => {
                match self.find_program(channel) {
                    Some(program) if bytes.is_empty() => program.stdin.close_after_flush(),
                    Some(program) => program.stdin.send(&bytes),
                    // The program did not start, and ringrun did not know that yet.
                    None => {}
                }
                Ok(())
            }
            AgentFrame::Output { .. } | AgentFrame::Input(_) => wrong("a frame that is not for relays"),
        }
    }

    fn find_program(&mut self, channel: u16) -> Option<&mut RelayedProgram> {
        self.programs.iter_mut().find(|program| program.channel == channel)
    }

    /// Starts the program of a channel. If this is impossible, tells ringrun so in the way in which ssh reports failures.
    fn open_channel(&mut self, channel: u16, ssh: Option<Vec<OsString>>) -> Result<(), String> {
        let mut command = match (channel, ssh) {
            (OWN_AGENT_CHANNEL, None) => own_agent_command(),
            (1.., Some(arguments)) => ssh_command(&arguments),
            _ => return Err("ringrun sent a channel for another program than ssh or the agent".to_owned()),
        };
        let program = command.spawn().and_then(|child| RelayedProgram::new(channel, child));
        let registered = program.and_then(|program| {
            program.register(&self.poll, FIRST_PROGRAM_TOKEN + TOKENS_PER_PROGRAM * self.programs.len())?;
            Ok(program)
        });
        match registered {
            Ok(program) => self.programs.push(program),
            Err(error) => {
                let text = format!("cannot start {}: {error}\n", command.get_program().display());
                self.link.send(&encode_relayed(channel, OutputStream::Stderr, text.as_bytes()));
                self.link.send(&encode_message(&FromRelay::Ended { channel, code: Some(SSH_FAILED) }));
            }
        }
        Ok(())
    }

    /// Waits for events, and records them.
    fn wait_for_events(&mut self, timeout: Option<Duration>) -> Result<(), String> {
        let mut events = Events::with_capacity(64);
        if let Err(error) = self.poll.poll(&mut events, timeout)
            && error.kind() != io::ErrorKind::Interrupted
        {
            return Err(format!("cannot wait for events: {error}"));
        }
        for token in events.iter().map(mio::event::Event::token) {
            if token == READ_TOKEN {
                self.link.mark_readable();
            } else if let Some(offset) = token.0.checked_sub(FIRST_PROGRAM_TOKEN) {
                if let Some(program) = self.programs.get_mut(offset / TOKENS_PER_PROGRAM) {
                    program.mark_readable();
                }
            } else {
                match self.signals.take_signal(token) {
                    Some(SIGCHLD) => self.programs.iter_mut().for_each(RelayedProgram::reap),
                    Some(SIGTERM | SIGINT | SIGHUP | SIGQUIT) => self.is_stopped = true,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Ends the standard input of all programs, and waits until they have ended. Kills each ssh that has not ended in time; the
    /// agent of this host stops its ranks and then ends.
    fn end_programs(&mut self) {
        self.programs.iter_mut().for_each(|program| program.stdin.close());
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            self.programs.iter_mut().for_each(|program| program.discard_output(&mut self.buffer));
            let left = deadline.saturating_duration_since(Instant::now());
            let is_over = self.programs.iter().all(|program| program.end.is_some()) || left.is_zero();
            let has_output = self.programs.iter().any(RelayedProgram::is_readable);
            if is_over || self.wait_for_events(Some(if has_output { Duration::ZERO } else { left })).is_err()
            {
                break;
            }
        }
        for program in self.programs.iter_mut().filter(|program| program.channel != OWN_AGENT_CHANNEL) {
            // A program that has been reaped gets no signal.
            let _ = program.child.kill();
        }
    }
}

impl RelayedProgram {
    fn new(channel: u16, mut child: Child) -> io::Result<Self> {
        let stdin = OwnedFd::from(child.stdin.take().expect("stdin was set to a pipe"));
        let stdout = OwnedFd::from(child.stdout.take().expect("stdout was set to a pipe"));
        let stderr = OwnedFd::from(child.stderr.take().expect("stderr was set to a pipe"));
        Ok(Self {
            channel,
            child,
            stdin: WriteEnd::new(stdin)?,
            stdout: ReadEnd::new(stdout)?,
            stderr: ReadEnd::new(stderr)?,
            end: None,
            has_reported_end: false,
        })
    }

    fn register(&self, poll: &Poll, first_token: usize) -> io::Result<()> {
        self.stdout.register(poll.registry(), Token(first_token))?;
        self.stderr.register(poll.registry(), Token(first_token + 1))?;
        self.stdin.register(poll.registry(), Token(first_token + 2))
    }

    fn mark_readable(&mut self) {
        self.stdout.mark_readable();
        self.stderr.mark_readable();
    }

    /// Returns whether there may be bytes to pass on. A process in the background may keep the pipes open after the end of ssh.
    fn is_readable(&self) -> bool {
        !self.has_reported_end && (self.stdout.is_readable() || self.stderr.is_readable())
    }

    /// Records how the program has ended if it has ended.
    fn reap(&mut self) {
        if self.end.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.end = Some(status);
            // The pipes may have bytes that the poll has not reported yet.
            self.mark_readable();
        }
    }

    /// Passes on at most one piece of each stream, and then the end of the program.
    fn pass_output(&mut self, link: &mut FrameLink, buffer: &mut [u8]) {
        if self.has_reported_end {
            return;
        }
        for (end, stream) in
            [(&mut self.stdout, OutputStream::Stdout), (&mut self.stderr, OutputStream::Stderr)]
        {
            if link.unsent_bytes() < UNSENT_BYTES_MAX && end.is_readable() {
                let count = end.read(buffer);
                // No bytes mean the end of the stream.
                if count > 0 || end.has_ended() {
                    link.send(&encode_relayed(self.channel, stream, &buffer[..count]));
                }
            }
        }
        if let Some(status) = self.end
            && !self.is_readable()
        {
            self.has_reported_end = true;
            // ringrun knows the end of an ssh that a signal has killed, but not of another program.
            let killed = status.signal().filter(|_| self.channel == OWN_AGENT_CHANNEL);
            let code = status.code().or(killed.map(|signal| exit_code_of_signal(signal).into()));
            link.send(&encode_message(&FromRelay::Ended { channel: self.channel, code }));
        }
    }

    fn discard_output(&mut self, buffer: &mut [u8]) {
        self.stdout.read(buffer);
        self.stderr.read(buffer);
    }
}

/// Returns the command that starts the agent of this host.
fn own_agent_command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ringrun").arg(AGENT_OPTION);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}
