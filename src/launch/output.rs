//! What the ranks print: one thread reads all their pipes, and writes whole lines to ours and every byte to the files.
//!
//! A reader of ours that is slow (a pager, a stopped terminal) holds up this thread and in time the ranks, as any pipe does, but
//! never the thread that watches over the job.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::unix::pipe;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::io::Errno;

use super::OutputFormat;
use super::lines::{LINE_BYTES_MAX, LINE_BYTES_MIN, LastLines, LineEnd, LineSplitter, UNFINISHED_BYTES_MAX};
use super::outcome::EPIPE;
use super::rank_processes::RankStreams;
use crate::types::{Rank, WorldSize};

/// One read from a rank's pipe: what the pipe itself holds.
const READ_BYTES: usize = 64 * 1024;

/// How long the pipes may be silent before they are left although somebody still holds their other end. By then every process
/// that we know of has been killed.
const DRAIN_SILENCE: Duration = Duration::from_secs(1);

/// The most that is read from one pipe after all ranks have ended: the largest pipe that an ordinary user may have.
const DRAIN_BYTES_MAX: usize = 1024 * 1024;

/// How long to wait before writing again to an output that is full and does not block.
const FULL_PAUSE: Duration = Duration::from_millis(5);

const WAKE: Token = Token(usize::MAX);

/// Which of a rank's two streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    const fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

enum OutputCommand {
    Read(Rank, RankStreams),
    Note(String),
    Finish,
}

/// What the output tells the job, which it wakes for it.
#[derive(Debug)]
pub(super) enum OutputEvent {
    /// Our standard output cannot be written any more, for this `errno`.
    Closed(i32),
    /// All is written.
    Drained(OutputSummary),
}

/// What is left of the output once all is written.
#[derive(Default, Debug)]
pub(super) struct OutputSummary {
    /// The last lines of each rank.
    pub(super) tails: Vec<Vec<String>>,
    /// What was to be written to `--output-dir` and could not be, a sentence for each file.
    pub(super) incomplete: Vec<String>,
}

/// The output thread, from the job's side.
#[derive(Debug)]
pub(super) struct Output {
    commands: Sender<OutputCommand>,
    events: Receiver<OutputEvent>,
    waker: Waker,
}

impl Output {
    /// Starts the thread; `job` is woken when there is an event.
    pub(super) fn start(
        world: WorldSize,
        output_format: OutputFormat,
        files: OutputFiles,
        job: Arc<Waker>,
    ) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        let (commands, commands_in) = channel();
        let (events_out, events) = channel();
        let wake_at_end = WakeOnDrop(Arc::clone(&job));
        let mut reader = OutputReader {
            poll,
            commands: commands_in,
            events: events_out,
            job,
            pipes: Vec::new(),
            files,
            sink: TerminalWriter::new(output_format),
            incomplete: Vec::new(),
            tails: (0..world.get()).map(|_| LastLines::default()).collect(),
            finishing: false,
        };
        thread::Builder::new().name("output".to_owned()).spawn(move || {
            reader.run();
            // The channel first, then the call to look at it; a panic keeps that order too.
            drop(reader);
            drop(wake_at_end);
        })?;
        Ok(Self { commands, events, waker })
    }

    /// Reads these from now on.
    pub(super) fn read(&self, rank: Rank, streams: RankStreams) {
        self.send(OutputCommand::Read(rank, streams));
    }

    /// Writes a line of ringrun's own to standard error, between the lines of the ranks.
    pub(super) fn note(&self, text: &str) {
        self.send(OutputCommand::Note(format!("ringrun: {text}\n")));
    }

    /// Every rank has ended: writes what is still in the pipes, then answers with [`OutputEvent::Drained`].
    pub(super) fn finish(&self) {
        self.send(OutputCommand::Finish);
    }

    /// What has happened since: nothing is `Empty`, and `Disconnected` means that nothing will, because the thread has ended.
    pub(super) fn event(&self) -> Result<OutputEvent, TryRecvError> {
        self.events.try_recv()
    }

    fn send(&self, order: OutputCommand) {
        // A thread that has ended needs no commands.
        let _ = self.commands.send(order);
        let _ = self.waker.wake();
    }
}

/// Wakes the job also when the thread ends otherwise than it should.
struct WakeOnDrop(Arc<Waker>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        let _ = self.0.wake();
    }
}

/// The files of `--output-dir`: `DIR/rank.N/stdout` and `stderr`, N with leading zeros, as Horovod lays them out.
#[derive(Default, Debug)]
pub(super) struct OutputFiles {
    /// Those of the ranks that have not yet been started.
    by_rank: BTreeMap<Rank, [File; 2]>,
    directory: Option<PathBuf>,
}

impl OutputFiles {
    /// Creates them all before anything is started; the error comes with its path.
    pub(super) fn create(directory: &Path, world: WorldSize) -> Result<Self, (PathBuf, io::Error)> {
        let mut by_rank = BTreeMap::new();
        for rank in world.ranks() {
            let folder = directory.join(folder(rank, world));
            fs::create_dir_all(&folder).map_err(|error| (folder.clone(), error))?;
            let create = |stream: Stream| {
                let path = folder.join(stream.name());
                File::create(&path).map_err(|error| (path, error))
            };
            by_rank.insert(rank, [create(Stream::Stdout)?, create(Stream::Stderr)?]);
        }
        Ok(Self { by_rank, directory: Some(directory.to_owned()) })
    }
}

fn folder(rank: Rank, world: WorldSize) -> String {
    let width = (world.get() - 1).to_string().len();
    format!("rank.{:0width$}", rank.get())
}

/// One pipe of a rank.
struct RankPipe {
    rank: Rank,
    stream: Stream,
    /// `None` at its end.
    pipe: Option<pipe::Receiver>,
    splitter: LineSplitter,
    file: Option<File>,
    /// Whether a line was printed in pieces, which is said once.
    has_cut_a_line: bool,
    readable: bool,
    /// How much may still be read once the ranks have ended.
    drain_bytes: usize,
}

struct OutputReader {
    poll: Poll,
    commands: Receiver<OutputCommand>,
    events: Sender<OutputEvent>,
    job: Arc<Waker>,
    pipes: Vec<RankPipe>,
    files: OutputFiles,
    sink: TerminalWriter,
    incomplete: Vec<String>,
    tails: Vec<LastLines>,
    finishing: bool,
}

impl OutputReader {
    fn run(&mut self) {
        let mut events = Events::with_capacity(256);
        let mut buffer = vec![0; READ_BYTES];
        let mut silent_since = Instant::now();
        loop {
            let busy = self.pipes.iter().any(|source| source.readable);
            let timeout = match (busy, self.finishing) {
                (true, _) => Some(Duration::ZERO),
                (false, true) => Some(DRAIN_SILENCE.saturating_sub(silent_since.elapsed())),
                (false, false) => None,
            };
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != ErrorKind::Interrupted
            {
                break;
            }
            for token in events.iter().map(mio::event::Event::token).filter(|token| *token != WAKE) {
                if let Some(source) = self.pipes.get_mut(token.0) {
                    source.readable = true;
                }
            }
            let was_finishing = self.finishing;
            if self.take_commands().is_err() {
                break;
            }
            // Each readable pipe in turn, one read each, so that a rank that prints without end leaves room for the others.
            let mut any = false;
            for index in 0..self.pipes.len() {
                any |= self.pipes[index].readable && self.read(index, &mut buffer);
            }
            if any || self.finishing != was_finishing {
                silent_since = Instant::now();
            }
            let open = self.pipes.iter().any(|source| source.pipe.is_some());
            if self.finishing && (!open || silent_since.elapsed() >= DRAIN_SILENCE) {
                break;
            }
        }
        self.close();
    }

    /// Hands over unfinished lines and answers.
    fn close(&mut self) {
        for index in 0..self.pipes.len() {
            self.end(index);
        }
        let tails = self.tails.drain(..).map(LastLines::into_text).collect();
        let incomplete = std::mem::take(&mut self.incomplete);
        self.tell(OutputEvent::Drained(OutputSummary { tails, incomplete }));
    }

    /// An error means that the job has gone.
    fn take_commands(&mut self) -> Result<(), TryRecvError> {
        loop {
            match self.commands.try_recv() {
                Ok(OutputCommand::Read(rank, streams)) => {
                    let files = self.files.by_rank.remove(&rank);
                    let (stdout, stderr) = files.map_or((None, None), |[out, err]| (Some(out), Some(err)));
                    self.add(rank, Stream::Stdout, streams.stdout.into(), stdout);
                    self.add(rank, Stream::Stderr, streams.stderr.into(), stderr);
                }
                Ok(OutputCommand::Note(text)) => self.sink.write(Stream::Stderr, text.as_bytes()),
                Ok(OutputCommand::Finish) => self.finishing = true,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(gone) => return Err(gone),
            }
        }
    }

    fn add(&mut self, rank: Rank, stream: Stream, mut pipe: pipe::Receiver, file: Option<File>) {
        let token = Token(self.pipes.len());
        let registered = pipe
            .set_nonblocking(true)
            .and_then(|()| self.poll.registry().register(&mut pipe, token, Interest::READABLE));
        if let Err(error) = registered {
            let text = format!("ringrun: cannot read {} of rank {rank}: {error}\n", stream.name());
            self.sink.write(Stream::Stderr, text.as_bytes());
        }
        let splitter = LineSplitter::default();
        let source = RankPipe {
            rank,
            stream,
            pipe: Some(pipe),
            splitter,
            file,
            has_cut_a_line: false,
            readable: false,
            drain_bytes: DRAIN_BYTES_MAX,
        };
        self.pipes.push(source);
    }

    /// One read; whether it brought anything.
    fn read(&mut self, index: usize, buffer: &mut [u8]) -> bool {
        let unfinished: usize = self.pipes.iter().map(|pipe| pipe.splitter.unfinished_bytes()).sum();
        let source = &mut self.pipes[index];
        let Some(pipe) = &mut source.pipe else {
            source.readable = false;
            return false;
        };
        match pipe.read(buffer) {
            Ok(0) => self.end(index),
            Ok(count) => {
                let (sink, bytes) = (&mut self.sink, &buffer[..count]);
                if let Some(file) = &mut source.file
                    && let Err(error) = file.write_all(bytes)
                {
                    source.file = None;
                    let (rank, stream) = (source.rank, source.stream.name());
                    let place = self.files.directory.as_deref().unwrap_or(Path::new("")).display();
                    let sentence = format!("{stream} of rank {rank} in {place} is not complete: {error}");
                    sink.write(Stream::Stderr, format!("ringrun: {sentence}\n").as_bytes());
                    self.incomplete.push(sentence);
                }
                let mut text = Vec::with_capacity(count + count / 4 + 32);
                let tail = &mut self.tails[source.rank.index()];
                let spare =
                    UNFINISHED_BYTES_MAX.saturating_sub(unfinished) + source.splitter.unfinished_bytes();
                let limit = spare.clamp(LINE_BYTES_MIN, LINE_BYTES_MAX);
                let mut cuts_a_line = false;
                source.splitter.push_limited(bytes, limit, |line, end| {
                    cuts_a_line |= end == LineEnd::Open;
                    tail.push(line);
                    sink.format(&mut text, source.rank, source.stream, line, end);
                });
                if cuts_a_line && !std::mem::replace(&mut source.has_cut_a_line, true) {
                    let (rank, stream, limit) = (source.rank, source.stream.name(), LINE_BYTES_MAX >> 20);
                    let text = format!(
                        "ringrun: {stream} of rank {rank} has a line of more than {limit} MiB, or all ranks together have \
                         unfinished lines of more than {} MiB: such lines are printed in pieces\n",
                        UNFINISHED_BYTES_MAX >> 20
                    );
                    sink.write(Stream::Stderr, text.as_bytes());
                }
                if self.finishing {
                    source.drain_bytes = source.drain_bytes.saturating_sub(count);
                }
                let exhausted = source.drain_bytes == 0;
                let stream = source.stream;
                self.write(stream, &text);
                if exhausted {
                    self.end(index);
                }
                return true;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => source.readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => self.end(index),
        }
        false
    }

    fn end(&mut self, index: usize) {
        let source = &mut self.pipes[index];
        (source.pipe, source.file, source.readable) = (None, None, false);
        let (sink, tail) = (&self.sink, &mut self.tails[source.rank.index()]);
        let mut text = Vec::new();
        source.splitter.finish(|line, end| {
            tail.push(line);
            sink.format(&mut text, source.rank, source.stream, line, end);
        });
        let stream = source.stream;
        self.write(stream, &text);
    }

    fn write(&mut self, stream: Stream, text: &[u8]) {
        let was_open = self.sink.stdout.is_ok();
        self.sink.write(stream, text);
        // With files, the terminal is only a copy: the job goes on without it.
        if let Err(errno) = self.sink.stdout
            && was_open
        {
            if self.files.directory.is_none() {
                self.tell(OutputEvent::Closed(errno));
            } else if errno != EPIPE {
                self.incomplete.push(stdout_is_incomplete(errno));
            }
        }
    }

    fn tell(&self, event: OutputEvent) {
        let _ = self.events.send(event);
        let _ = self.job.wake();
    }
}

/// Our own standard output and error.
struct TerminalWriter {
    output_format: OutputFormat,
    /// Whether it can be written; if not, why, as an `errno`.
    stdout: Result<(), i32>,
    stderr: Result<(), i32>,
}

impl TerminalWriter {
    fn new(output_format: OutputFormat) -> Self {
        Self { output_format, stdout: Ok(()), stderr: Ok(()) }
    }

    /// Adds a line as the terminal is to show it.
    fn format(&self, text: &mut Vec<u8>, rank: Rank, stream: Stream, line: &[u8], end: LineEnd) {
        if self.output_format == OutputFormat::Tagged {
            text.extend_from_slice(format!("[{rank}]<{}>:", stream.name()).as_bytes());
        }
        text.extend_from_slice(line);
        // Untagged output is the ranks' own, byte for byte; a tagged piece always is a line.
        if end == LineEnd::Newline || self.output_format == OutputFormat::Tagged {
            text.push(b'\n');
        }
    }

    fn write(&mut self, stream: Stream, text: &[u8]) {
        match stream {
            Stream::Stdout if self.stdout.is_ok() => {
                self.stdout = write_all(&mut io::stdout().lock(), text);
            }
            Stream::Stderr if self.stderr.is_ok() => {
                self.stderr = write_all(&mut io::stderr().lock(), text);
            }
            _ => {}
        }
    }
}

/// What is told at the end of a job that has not been stopped for it.
pub(super) fn stdout_is_incomplete(errno: i32) -> String {
    format!("standard output is not complete: {}", io::Error::from_raw_os_error(errno))
}

/// Writes all of it, or says as an `errno` why not. A terminal or pipe that another program has made non-blocking is waited for.
fn write_all(out: &mut impl Write, mut text: &[u8]) -> Result<(), i32> {
    loop {
        let result = if text.is_empty() { out.flush().map(|()| 0) } else { out.write(text) };
        match result {
            Ok(0) if text.is_empty() => return Ok(()),
            Ok(0) => return Err(Errno::IO.raw_os_error()),
            Ok(count) => text = &text[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(FULL_PAUSE),
            Err(error) => return Err(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_sort_as_their_ranks_do() {
        for (rank, world, expected) in
            [(0, 1, "rank.0"), (9, 10, "rank.9"), (9, 11, "rank.09"), (7, 1000, "rank.007")]
        {
            assert_eq!(folder(Rank::new(rank), WorldSize::new(world).unwrap()), expected);
        }
    }

    #[test]
    fn how_a_line_is_shown() {
        for (terminal, end, expected) in [
            (OutputFormat::Tagged, LineEnd::Newline, "[3]<stderr>:hello\n"),
            (OutputFormat::Tagged, LineEnd::Open, "[3]<stderr>:hello\n"),
            (OutputFormat::Raw, LineEnd::Newline, "hello\n"),
            (OutputFormat::Raw, LineEnd::Open, "hello"),
        ] {
            let mut text = Vec::new();
            let sink = TerminalWriter::new(terminal);
            sink.format(&mut text, Rank::new(3), Stream::Stderr, b"hello", end);
            assert_eq!(text, expected.as_bytes());
        }
    }
}
