//! Reads the standard input of rank 0 on all ranks.
//!
//! Rank 0 reads a block, and broadcasts it. Before each broadcast, the ranks exchange a header in an all-reduce: the
//! length of the block, whether it is the last one, and whether a rank has failed. So no rank waits for a rank that has
//! found an error in its rows.

use std::io::{self, IsTerminal as _, Read};
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::DataError;
use crate::group::{self, Group};
use crate::train::TrainError;
use crate::types::{Rank, ReduceOp};

/// The name of standard input in messages and reports.
pub(crate) const STANDARD_INPUT_NAME: &str = "standard input";

/// The maximum size in bytes of a block.
const BLOCK_BYTES: usize = 1 << 20;
/// The maximum time for which rank 0 waits for data before it sends the data that it has, or an empty block. Without empty
/// blocks, the other ranks would time out while the program that writes the data is slow.
const DATA_WAIT_MAX: Duration = Duration::from_secs(1);

/// Returns whether `path` stands for standard input.
pub(crate) fn is_standard_input(path: &Path) -> bool {
    path == Path::new(STANDARD_INPUT_NAME)
}

/// Returns an error if the standard input of this process is a terminal.
pub(crate) fn check_standard_input_is_no_terminal() -> Result<(), DataError> {
    if io::stdin().is_terminal() {
        let problem =
            "is a terminal; pipe a table into it, as in `cat a.csv | ringtrain --data - --target y`";
        return Err(DataError::malformed(Path::new(STANDARD_INPUT_NAME), problem));
    }
    Ok(())
}

/// Calls `read` with the standard input of rank 0. All ranks must call this function, and `read` must read to the end of
/// the input if it succeeds. Returns the result of `read`, or `None` if `read` failed on another rank but not on this rank.
///
/// # Errors
///
/// If `read` fails on this rank, if standard input is a terminal, or if a collective fails.
pub(crate) fn share_standard_input<T>(
    group: &mut Group,
    read: impl FnOnce(&mut dyn Read) -> Result<T, DataError>,
) -> Result<Option<T>, TrainError> {
    let source = if group.rank() == Rank::ZERO { open_standard_input().map(Some) } else { Ok(None) };
    share_input(group, source, read)
}

/// Returns standard input as a file without a buffer, so that a poll sees all data that are left.
fn open_standard_input() -> Result<OwnedFd, DataError> {
    check_standard_input_is_no_terminal()?;
    let cloned = io::stdin().as_fd().try_clone_to_owned();
    cloned.map_err(|error| DataError::unreadable(Path::new(STANDARD_INPUT_NAME), error))
}

/// Calls `read` with the content of `source`, which is `None` on all ranks except rank 0.
fn share_input<T>(
    group: &mut Group,
    source: Result<Option<OwnedFd>, DataError>,
    read: impl FnOnce(&mut dyn Read) -> Result<T, DataError>,
) -> Result<Option<T>, TrainError> {
    let mut input = SharedInput::new(group);
    let result = source.and_then(|source| {
        input.source = source;
        read(&mut input)
    });
    input.finish(result)
}

/// The input of rank 0, as a stream that all ranks read.
struct SharedInput<'a> {
    group: &'a mut Group,
    /// The input. `None` on all ranks except rank 0.
    source: Option<OwnedFd>,
    /// The current block, in a buffer of [`BLOCK_BYTES`].
    block: Vec<u8>,
    /// The part of `block` that has not been read yet.
    unread: Range<usize>,
    state: InputState,
}

/// Whether more blocks follow.
enum InputState {
    /// More blocks follow.
    Open,
    /// The current block is the last one.
    Ended,
    /// Another rank has failed, so no block follows.
    OtherRankFailed,
    /// A collective has failed, so no block follows.
    GroupFailed(group::Error),
}

/// What rank 0 says about the next block, and whether a rank has failed.
struct BlockHeader {
    has_failed: bool,
    is_last: bool,
    len: usize,
}

impl<'a> SharedInput<'a> {
    fn new(group: &'a mut Group) -> Self {
        Self { group, source: None, block: vec![0; BLOCK_BYTES], unread: 0..0, state: InputState::Open }
    }

    /// Receives the next block, which may be empty. Rank 0 reads the block from its source and sends it.
    fn receive_block(&mut self) -> io::Result<()> {
        let (len, is_last) = match &self.source {
            Some(source) => {
                read_available(source, &mut self.block, DATA_WAIT_MAX.min(self.group.timeout() / 4))?
            }
            None => (0, false),
        };
        let header = self.exchange_headers(&BlockHeader { has_failed: false, is_last, len });
        let received = header.and_then(|header| {
            if !header.has_failed && header.len > 0 {
                self.group.broadcast(&mut self.block[..header.len], Rank::ZERO)?;
            }
            Ok(header)
        });
        match received {
            Ok(BlockHeader { has_failed: true, .. }) => self.state = InputState::OtherRankFailed,
            Ok(header) => {
                self.unread = 0..header.len;
                if header.is_last {
                    self.state = InputState::Ended;
                }
            }
            Err(error) => self.state = InputState::GroupFailed(error),
        }
        Ok(())
    }

    /// Combines the headers of all ranks. Only rank 0 knows the block, and any rank may have failed.
    fn exchange_headers(&mut self, own: &BlockHeader) -> Result<BlockHeader, group::Error> {
        let mut header = [u64::from(own.has_failed), u64::from(own.is_last), own.len as u64];
        self.group.all_reduce(&mut header, ReduceOp::Max)?;
        let [has_failed, is_last, len] = header;
        // The network may have corrupted the length.
        let len = usize::try_from(len).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
        Ok(BlockHeader { has_failed: has_failed > 0, is_last: is_last > 0, len })
    }

    /// Ends the stream. If this rank has failed before the end of the input, tells the other ranks.
    fn finish<T>(mut self, result: Result<T, DataError>) -> Result<Option<T>, TrainError> {
        match std::mem::replace(&mut self.state, InputState::Ended) {
            InputState::GroupFailed(error) => Err(error.into()),
            InputState::OtherRankFailed => Ok(None),
            InputState::Ended => Ok(Some(result?)),
            InputState::Open => {
                self.exchange_headers(&BlockHeader { has_failed: true, is_last: false, len: 0 })?;
                Ok(Some(result?))
            }
        }
    }
}

impl Read for SharedInput<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.unread.is_empty() {
            match self.state {
                InputState::Open => self.receive_block()?,
                InputState::Ended => return Ok(0),
                // `finish` replaces this error.
                InputState::OtherRankFailed | InputState::GroupFailed(_) => {
                    return Err(io::Error::other("another rank failed"));
                }
            }
        }
        let count = self.unread.len().min(out.len());
        let end = self.unread.start + count;
        out[..count].copy_from_slice(&self.block[self.unread.start..end]);
        self.unread.start = end;
        Ok(count)
    }
}

/// Reads until `block` is full, until the end of the source, or until the source has had no data since `wait_max` passed.
/// Returns the number of bytes, and whether the source has ended.
fn read_available(source: &OwnedFd, block: &mut [u8], wait_max: Duration) -> io::Result<(usize, bool)> {
    let deadline = Instant::now() + wait_max;
    let mut len = 0;
    while len < block.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(source, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => break,
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        match rustix::io::read(source, &mut block[len..]) {
            Ok(0) => return Ok((len, true)),
            Ok(count) => len += count,
            // Another process may have made the source non-blocking, and may have taken its data.
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((len, false))
}

#[cfg(test)]
mod tests {
    use std::io::{Write as _, pipe};

    use super::*;

    #[test]
    fn reading_stops_at_the_deadline_at_a_full_block_and_at_the_end() {
        let (reader, mut writer) = pipe().unwrap();
        let source = OwnedFd::from(reader);
        let mut block = [0; 4];
        let read = |block: &mut [u8; 4]| read_available(&source, block, Duration::ZERO).unwrap();
        assert_eq!(read(&mut block), (0, false));
        writer.write_all(b"abcdefg").unwrap();
        assert_eq!((read(&mut block), block), ((4, false), *b"abcd"));
        assert_eq!((read(&mut block), &block[..3]), ((3, false), &b"efg"[..]));
        drop(writer);
        assert_eq!(read(&mut block), (0, true));
    }

    #[test]
    fn input_of_several_blocks_arrives_in_order() {
        let bytes: Vec<u8> = (0..5 * BLOCK_BYTES / 2).map(|index| (index % 251) as u8).collect();
        let (reader, mut writer) = pipe().unwrap();
        let written = bytes.clone();
        let thread = std::thread::spawn(move || writer.write_all(&written).unwrap());
        let mut group = Group::solo();
        let shared = share_input(&mut group, Ok(Some(reader.into())), |input| {
            let mut found = Vec::new();
            input.read_to_end(&mut found).unwrap();
            // At the end, another read does not wait for more blocks.
            assert_eq!(input.read(&mut [0]).unwrap(), 0);
            Ok(found)
        });
        thread.join().unwrap();
        assert!(shared.unwrap().unwrap() == bytes, "the bytes differ");
    }
}
