//! The output of the ranks. One thread reads the pipes of all ranks. This thread writes whole lines to ringrun's own
//! output, and every byte to the files of `--output-dir`.
//!
//! If ringrun's output is read too slowly, for example by a pager or a stopped terminal, this thread blocks, and the
//! ranks block once their pipes are full. The thread that supervises the job never blocks on output.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::unix::pipe;
use mio::{Events, Interest, Poll, Token, Waker};

use super::lines::{
    ALWAYS_WHOLE_LINE_BYTES, LINE_BYTES_MAX, LastLines, LineEnd, LineSplitter, UNFINISHED_LINES_BYTES_MAX,
};
use super::message::{LaunchMessage, MessageFormat};
use super::outcome::EPIPE;
use super::output_files::OutputFiles;
use super::output_messages::{OutputCommand, OutputCommandSender, OutputEvent, OutputSummary, OutputTarget};
use super::plan::OutputFormat;
use super::rank_processes::RankStreams;
use super::status_line::text_of_finished_line;
use super::streams::OutputStream;
use super::terminal_writer::TerminalWriter;
use crate::types::{Rank, WorldSize};

/// The maximal number of bytes in one read from a rank's pipe: the default capacity of a pipe.
const READ_BYTES_MAX: usize = 64 * 1024;

/// How long ringrun waits, after all ranks have ended, for output from pipes that another process still holds open.
/// Before this wait, ringrun kills every process of the job that it can find.
const DRAIN_SILENCE_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximal number of bytes that are read from one pipe after all ranks have ended. This is the largest capacity
/// of a pipe that Linux allows an ordinary user by default.
const DRAIN_BYTES_MAX: usize = 1024 * 1024;

const WAKE_TOKEN: Token = Token(usize::MAX);

/// The handle of the output thread.
#[derive(Debug)]
pub(super) struct Output {
    command_sender: OutputCommandSender,
    event_receiver: Receiver<OutputEvent>,
}

impl Output {
    /// Starts the output thread. The thread wakes the job's thread with `job_waker` when there is an event.
    pub(super) fn start(world: WorldSize, target: OutputTarget, job_waker: Arc<Waker>) -> io::Result<Self> {
        let (formats, files, credit) = match target {
            OutputTarget::Terminal(formats, files) => (formats, files, None),
            OutputTarget::Launcher(credit) => {
                let formats: (_, MessageFormat) = (OutputFormat::Raw, LaunchMessage::to_text);
                (formats, OutputFiles::default(), Some(credit))
            }
        };
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE_TOKEN)?);
        let (sender, command_receiver) = channel();
        let (event_sender, event_receiver) = channel();
        let wake_at_end = WakeOnDrop(Arc::clone(&job_waker));
        let mut reader = OutputReader {
            poll,
            command_receiver,
            event_sender,
            job_waker,
            pipes: Vec::new(),
            files,
            writer: TerminalWriter::new(formats),
            write_failures: Vec::new(),
            last_lines: (0..world.get()).map(|_| LastLines::default()).collect(),
            is_draining: false,
            forward_credit: credit,
        };
        thread::Builder::new().name("output".to_owned()).spawn(move || {
            reader.read_until_job_ends();
            // Close the channel before waking the job, so that the job sees that the channel is closed. A panic drops
            // `reader` and `wake_at_end` in this order too.
            drop(reader);
            drop(wake_at_end);
        })?;
        Ok(Self { command_sender: OutputCommandSender { sender, waker }, event_receiver })
    }

    /// Tells the output thread to read the streams of a rank.
    pub(super) fn add_streams(&self, rank: Rank, streams: RankStreams) {
        self.command_sender.send(OutputCommand::ReadStreams(rank, streams));
    }

    /// Writes a message of ringrun itself to standard error, between the lines of the ranks.
    pub(super) fn print_message(&self, message: LaunchMessage) {
        self.command_sender.print_message(message);
    }

    /// Returns a sender with which other threads can make the output thread print messages of ringrun.
    pub(super) fn command_sender(&self) -> OutputCommandSender {
        self.command_sender.clone()
    }

    /// Allows the output thread of an agent to pass on this number of further bytes.
    pub(super) fn add_credit(&self, bytes: usize) {
        self.command_sender.send(OutputCommand::AddCredit(bytes));
    }

    /// Tells the output thread that every rank has ended. The output thread then writes the output that is still in
    /// the pipes, and sends [`OutputEvent::Drained`].
    pub(super) fn drain_pipes(&self) {
        self.command_sender.send(OutputCommand::DrainPipes);
    }

    /// Returns the next event. The error is `Empty` if there is no event, and `Disconnected` if the output thread has
    /// ended.
    pub(super) fn next_event(&self) -> Result<OutputEvent, TryRecvError> {
        self.event_receiver.try_recv()
    }
}

/// Wakes the job when this value is dropped at the end of the output thread, even if the thread panics.
struct WakeOnDrop(Arc<Waker>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        let _ = self.0.wake();
    }
}

/// One pipe of a rank.
struct RankPipe {
    rank: Rank,
    stream: OutputStream,
    /// `None` after the end of the stream, and if the rank runs on another host.
    pipe: Option<pipe::Receiver>,
    splitter: LineSplitter,
    /// The file of `--output-dir`; `None` without this option, or after a failed write.
    file: Option<File>,
    /// Whether ringrun shows the unfinished line of this pipe in the status line of the terminal.
    has_status: bool,
    /// Whether ringrun has printed a line of this pipe in pieces. ringrun prints a message only for the first such
    /// line of a pipe.
    has_cut_a_line: bool,
    /// Whether the pipe may have bytes to read.
    is_readable: bool,
    /// After all ranks have ended, the output thread reads at most this number of further bytes from the pipe.
    drain_bytes_left: usize,
}

/// The state of the output thread.
struct OutputReader {
    poll: Poll,
    command_receiver: Receiver<OutputCommand>,
    event_sender: Sender<OutputEvent>,
    job_waker: Arc<Waker>,
    pipes: Vec<RankPipe>,
    files: OutputFiles,
    writer: TerminalWriter,
    write_failures: Vec<LaunchMessage>,
    last_lines: Vec<LastLines>,
    /// Whether the job's thread has reported that every rank has ended.
    is_draining: bool,
    /// In an agent: the number of bytes that ringrun allows it to send. `None` in ringrun.
    forward_credit: Option<usize>,
}

impl OutputReader {
    /// Runs the output thread: reads the pipes until all output is written, or until the job's thread has ended.
    fn read_until_job_ends(&mut self) {
        let mut events = Events::with_capacity(256);
        let mut buffer = vec![0; READ_BYTES_MAX];
        let mut silent_since = Instant::now();
        loop {
            let has_readable_pipe = self.pipes.iter().any(|rank_pipe| rank_pipe.is_readable);
            let has_credit = self.forward_credit != Some(0);
            let timeout = match (has_readable_pipe, self.is_draining) {
                (true, _) if has_credit => Some(Duration::ZERO),
                (false, true) => Some(DRAIN_SILENCE_TIMEOUT.saturating_sub(silent_since.elapsed())),
                // If there is no credit, ringrun prints slowly. A command arrives when it has printed something.
                (true, _) | (false, false) => None,
            };
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != ErrorKind::Interrupted
            {
                break;
            }
            for token in events.iter().map(mio::event::Event::token).filter(|token| *token != WAKE_TOKEN) {
                if let Some(rank_pipe) = self.pipes.get_mut(token.0) {
                    rank_pipe.is_readable = true;
                }
            }
            let was_draining = self.is_draining;
            if self.take_commands().is_err() {
                break;
            }
            // Read each readable pipe once, so that a rank that prints without end does not delay the output of other
            // ranks.
            let mut has_read = false;
            for index in 0..self.pipes.len() {
                has_read |= self.pipes[index].is_readable && self.read_pipe(index, &mut buffer);
            }
            if has_read || !has_credit || self.is_draining != was_draining {
                silent_since = Instant::now();
            }
            let has_open_pipe = self.pipes.iter().any(|rank_pipe| rank_pipe.pipe.is_some());
            if self.is_draining && (!has_open_pipe || silent_since.elapsed() >= DRAIN_SILENCE_TIMEOUT) {
                break;
            }
        }
        self.close_all_pipes();
    }

    /// Prints unfinished lines and sends [`OutputEvent::Drained`].
    fn close_all_pipes(&mut self) {
        for index in 0..self.pipes.len() {
            self.close_pipe(index);
        }
        let last_lines = self.last_lines.drain(..).map(LastLines::into_text).collect();
        let write_failures = std::mem::take(&mut self.write_failures);
        self.send_event(OutputEvent::Drained(OutputSummary { last_lines, write_failures }));
    }

    /// Executes the commands that the job's thread has sent. Returns an error if the job's thread has ended.
    fn take_commands(&mut self) -> Result<(), TryRecvError> {
        loop {
            match self.command_receiver.try_recv() {
                Ok(OutputCommand::ReadStreams(rank, streams)) => {
                    self.add_pipe(rank, OutputStream::Stdout, streams.stdout.into());
                    self.add_pipe(rank, OutputStream::Stderr, streams.stderr.into());
                }
                Ok(OutputCommand::PrintMessage(message)) if self.forward_credit.is_some() => {
                    self.send_event(OutputEvent::Note(message));
                }
                Ok(OutputCommand::PrintMessage(message)) => self.writer.write_message(&message),
                Ok(OutputCommand::PrintRemoteBytes { agent, rank, stream, bytes }) => {
                    self.print_remote_bytes(rank, stream, &bytes);
                    self.send_event(OutputEvent::RemotePrinted { agent, count: bytes.len() });
                }
                Ok(OutputCommand::AddCredit(bytes)) => {
                    self.forward_credit = self.forward_credit.map(|credit| credit.saturating_add(bytes));
                }
                Ok(OutputCommand::DrainPipes) => self.is_draining = true,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(disconnected) => return Err(disconnected),
            }
        }
    }

    /// Starts to read one pipe of a rank.
    fn add_pipe(&mut self, rank: Rank, stream: OutputStream, mut pipe: pipe::Receiver) {
        let token = Token(self.pipes.len());
        let registered = pipe
            .set_nonblocking(true)
            .and_then(|()| self.poll.registry().register(&mut pipe, token, Interest::READABLE));
        if let Err(error) = registered {
            let text = format!("cannot read {} of rank {rank}: {error}", stream.name());
            self.writer.write_message(&LaunchMessage::error(text).about(rank));
        }
        self.push_pipe(rank, stream, Some(pipe));
    }

    /// Prints bytes of a rank on another host. No bytes mean that the stream has ended.
    fn print_remote_bytes(&mut self, rank: Rank, stream: OutputStream, bytes: &[u8]) {
        let found = self.pipes.iter().position(|pipe| pipe.rank == rank && pipe.stream == stream);
        let index = found.unwrap_or_else(|| {
            self.push_pipe(rank, stream, None);
            self.pipes.len() - 1
        });
        if bytes.is_empty() {
            self.close_pipe(index);
        } else {
            self.print_bytes(index, bytes);
        }
    }

    fn push_pipe(&mut self, rank: Rank, stream: OutputStream, pipe: Option<pipe::Receiver>) {
        let is_progress_stream = rank == Rank::ZERO && stream == OutputStream::Stderr;
        let rank_pipe = RankPipe {
            rank,
            stream,
            pipe,
            splitter: LineSplitter::default(),
            file: self.files.by_stream.remove(&(rank, stream)),
            has_status: is_progress_stream && self.writer.shows_status(),
            has_cut_a_line: false,
            is_readable: false,
            drain_bytes_left: DRAIN_BYTES_MAX,
        };
        self.pipes.push(rank_pipe);
    }

    /// Reads once from a pipe. Returns whether bytes were read.
    fn read_pipe(&mut self, index: usize, buffer: &mut [u8]) -> bool {
        let credit = self.forward_credit.unwrap_or(usize::MAX).min(buffer.len());
        if credit == 0 {
            return false;
        }
        let rank_pipe = &mut self.pipes[index];
        let Some(pipe) = &mut rank_pipe.pipe else {
            rank_pipe.is_readable = false;
            return false;
        };
        match pipe.read(&mut buffer[..credit]) {
            Ok(0) => self.close_pipe(index),
            Ok(count) => {
                if self.is_draining {
                    rank_pipe.drain_bytes_left = rank_pipe.drain_bytes_left.saturating_sub(count);
                }
                let exhausted = rank_pipe.drain_bytes_left == 0;
                if let Some(credit) = &mut self.forward_credit {
                    *credit -= count;
                    let (rank, stream, bytes) = (rank_pipe.rank, rank_pipe.stream, buffer[..count].to_vec());
                    self.send_event(OutputEvent::Forwarded { rank, stream, bytes });
                } else {
                    self.print_bytes(index, &buffer[..count]);
                }
                if exhausted {
                    self.close_pipe(index);
                }
                return true;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => rank_pipe.is_readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => self.close_pipe(index),
        }
        false
    }

    /// Writes bytes of a rank to its file, and prints the lines that they complete.
    fn print_bytes(&mut self, index: usize, bytes: &[u8]) {
        let unfinished_bytes: usize = self.pipes.iter().map(|pipe| pipe.splitter.unfinished_bytes()).sum();
        let rank_pipe = &mut self.pipes[index];
        let writer = &mut self.writer;
        if let Some(file) = &mut rank_pipe.file
            && let Err(error) = file.write_all(bytes)
        {
            rank_pipe.file = None;
            let (rank, stream) = (rank_pipe.rank, rank_pipe.stream.name());
            let directory = self.files.directory.as_deref().unwrap_or(Path::new("")).display();
            let sentence = format!("{stream} of rank {rank} in {directory} is not complete: {error}");
            let message = LaunchMessage::error(sentence).about(rank);
            writer.write_message(&message);
            self.write_failures.push(message);
        }
        let mut text = Vec::with_capacity(bytes.len() + bytes.len() / 4 + 32);
        let rank_lines = &mut self.last_lines[rank_pipe.rank.index()];
        let spare_bytes = UNFINISHED_LINES_BYTES_MAX.saturating_sub(unfinished_bytes)
            + rank_pipe.splitter.unfinished_bytes();
        let line_bytes_max = spare_bytes.clamp(ALWAYS_WHOLE_LINE_BYTES, LINE_BYTES_MAX);
        let mut cuts_a_line = false;
        rank_pipe.splitter.push_limited(bytes, line_bytes_max, |line, end| {
            cuts_a_line |= end == LineEnd::Unfinished;
            let Some(line) = printed_text(line, rank_pipe.has_status) else { return };
            rank_lines.push(line);
            writer.format_line(&mut text, rank_pipe.rank, rank_pipe.stream, line, end);
        });
        if rank_pipe.has_status {
            let unfinished = rank_pipe.splitter.remove_replaced_text();
            writer.set_status(rank_pipe.rank, unfinished);
        }
        if cuts_a_line && !std::mem::replace(&mut rank_pipe.has_cut_a_line, true) {
            let (rank, stream, line_mib_max) =
                (rank_pipe.rank, rank_pipe.stream.name(), LINE_BYTES_MAX >> 20);
            let text = format!(
                "{stream} of rank {rank} has a line of more than {line_mib_max} MiB, or the unfinished lines of all ranks \
                 together exceed {} MiB: ringrun prints such lines in pieces",
                UNFINISHED_LINES_BYTES_MAX >> 20
            );
            writer.write_message(&LaunchMessage::warning(text).about(rank));
        }
        let stream = rank_pipe.stream;
        self.write_to_terminal(stream, &text);
    }

    /// Closes a pipe and prints its unfinished line.
    fn close_pipe(&mut self, index: usize) {
        let rank_pipe = &mut self.pipes[index];
        let was_open = rank_pipe.pipe.is_some();
        (rank_pipe.pipe, rank_pipe.file, rank_pipe.is_readable) = (None, None, false);
        if self.forward_credit.is_some() {
            if was_open {
                let (rank, stream) = (rank_pipe.rank, rank_pipe.stream);
                self.send_event(OutputEvent::Forwarded { rank, stream, bytes: Vec::new() });
            }
            return;
        }
        let (writer, rank_lines) = (&mut self.writer, &mut self.last_lines[rank_pipe.rank.index()]);
        if rank_pipe.has_status {
            writer.set_status(rank_pipe.rank, b"");
        }
        let mut text = Vec::new();
        rank_pipe.splitter.emit_unfinished_line(|line, end| {
            let Some(line) = printed_text(line, rank_pipe.has_status) else { return };
            rank_lines.push(line);
            writer.format_line(&mut text, rank_pipe.rank, rank_pipe.stream, line, end);
        });
        let stream = rank_pipe.stream;
        self.write_to_terminal(stream, &text);
    }

    /// Writes lines of the ranks to ringrun's own output. Reports the first failed write to standard output.
    fn write_to_terminal(&mut self, stream: OutputStream, text: &[u8]) {
        let was_open = self.writer.stdout_result.is_ok();
        self.writer.write_lines(stream, text);
        // With --output-dir, the files contain all output, so the job continues without standard output.
        if let Err(errno) = self.writer.stdout_result
            && was_open
        {
            if self.files.directory.is_none() {
                self.send_event(OutputEvent::StdoutFailed(errno));
            } else if errno != EPIPE {
                self.write_failures.push(stdout_incomplete_message(errno));
            }
        }
    }

    fn send_event(&self, event: OutputEvent) {
        let _ = self.event_sender.send(event);
        let _ = self.job_waker.wake();
    }
}

/// Returns the part of `line` that ringrun prints: the whole line, or, for the pipe whose unfinished line is shown as a
/// status line, only the newest text of the line, or `None` if this text is invisible (see [`text_of_finished_line`]).
fn printed_text(line: &[u8], has_status: bool) -> Option<&[u8]> {
    if has_status { text_of_finished_line(line) } else { Some(line) }
}

/// Returns the message about incomplete standard output, which ringrun prints at the end of a job.
pub(super) fn stdout_incomplete_message(errno: i32) -> LaunchMessage {
    LaunchMessage::error(format!("standard output is not complete: {}", io::Error::from_raw_os_error(errno)))
}
