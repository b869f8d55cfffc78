//! Reads the standard input of ringrun for ranks that cannot inherit it. A thread reads, because the standard input may be a
//! file, which no poll reports, and because it must stay in its blocking mode, which other programs share.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use mio::Waker;

/// The most bytes of one chunk.
const CHUNK_BYTES_MAX: usize = 64 << 10;

/// The most chunks that have been read and that not all ranks have taken.
const CHUNKS_MAX: usize = 4;

/// The chunks that a thread reads from standard input.
#[derive(Debug)]
pub(super) struct InputReader {
    chunks: Receiver<io::Result<Vec<u8>>>,
    /// Each message allows the thread to read one chunk.
    permits: Sender<()>,
    /// The positions in the input at which the chunks end that not all ranks have taken.
    chunk_ends: VecDeque<u64>,
    /// The number of bytes read.
    position: u64,
}

impl InputReader {
    /// Starts the thread. It wakes the job with `waker` after each chunk.
    pub(super) fn start(waker: Arc<Waker>) -> io::Result<Self> {
        let mut stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        let (permits, receiver) = channel();
        let (sender, chunks) = channel();
        // The thread may still wait for input when the job has ended. It then ends with the process.
        thread::Builder::new().name("stdin".to_owned()).spawn(move || {
            for () in receiver {
                let chunk = read_chunk(&mut stdin);
                let is_last = chunk.as_ref().map_or(true, Vec::is_empty);
                if sender.send(chunk).is_err() || waker.wake().is_err() || is_last {
                    break;
                }
            }
        })?;
        let reader = Self { chunks, permits, chunk_ends: VecDeque::new(), position: 0 };
        (0..CHUNKS_MAX).for_each(|_| reader.allow_chunk());
        Ok(reader)
    }

    /// Returns a chunk that has been read. An empty chunk is the end of the input.
    pub(super) fn next_chunk(&mut self) -> Option<io::Result<Vec<u8>>> {
        let chunk = self.chunks.try_recv().ok()?;
        self.position += chunk.as_ref().map_or(0, Vec::len) as u64;
        self.chunk_ends.push_back(self.position);
        Some(chunk)
    }

    /// Allows the thread to read further chunks, after all ranks have taken the first `taken` bytes of the input.
    pub(super) fn release(&mut self, taken: u64) {
        while self.chunk_ends.front().is_some_and(|&end| end <= taken) {
            self.chunk_ends.pop_front();
            self.allow_chunk();
        }
    }

    fn allow_chunk(&self) {
        // The thread has ended if the input has ended. It then needs no permission.
        let _ = self.permits.send(());
    }
}

fn read_chunk(stdin: &mut File) -> io::Result<Vec<u8>> {
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    loop {
        match stdin.read(&mut chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => {
                chunk.truncate(result?);
                return Ok(chunk);
            }
        }
    }
}
