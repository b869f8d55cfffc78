//! Copies the standard input of ringrun to ranks of this host through pipes: to all ranks with `--stdin all`, and to rank 0 if
//! ringrun runs on another host.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr, write};

/// The token of all pipes.
const INPUT_TOKEN: Token = Token(1 << 15);

/// The pipes to the ranks, and the bytes that not all of these ranks have taken. The sender of the bytes limits their number.
#[derive(Default, Debug)]
pub(super) struct InputFeed {
    pipes: Vec<RankInput>,
    /// The bytes from the position `start` of the input.
    buffer: Vec<u8>,
    start: u64,
    /// Whether the input ends after the bytes in `buffer`.
    has_ended: bool,
}

/// The pipe to one rank.
#[derive(Debug)]
struct RankInput {
    pipe: OwnedFd,
    /// The number of bytes that the pipe has accepted.
    position: u64,
}

impl InputFeed {
    /// Adds a rank, which starts at the beginning of the input. Returns the end of the pipe that the rank reads.
    pub(super) fn add_rank(&mut self, registry: &Registry) -> io::Result<OwnedFd> {
        let (reader, writer) = io::pipe()?;
        let pipe = OwnedFd::from(writer);
        ioctl_fionbio(&pipe, true)?;
        registry.register(&mut SourceFd(&pipe.as_raw_fd()), INPUT_TOKEN, Interest::WRITABLE)?;
        self.pipes.push(RankInput { pipe, position: 0 });
        Ok(reader.into())
    }

    /// Adds bytes of the input. No bytes mean that the input has ended.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.has_ended |= bytes.is_empty();
        self.buffer.extend_from_slice(bytes);
    }

    /// Writes as many bytes as the pipes accept. Closes the pipes of ranks that have got the whole input, or have ended.
    pub(super) fn advance(&mut self) {
        let Self { pipes, buffer, start, has_ended } = self;
        let end = *start + buffer.len() as u64;
        pipes.retain_mut(|input| {
            while input.position < end {
                match retry_on_intr(|| write(&input.pipe, &buffer[(input.position - *start) as usize..])) {
                    Ok(count) => input.position += count as u64,
                    Err(Errno::AGAIN) => return true,
                    Err(_) => return false,
                }
            }
            !*has_ended
        });
        let taken = pipes.iter().map(|input| input.position).min().unwrap_or(end);
        buffer.drain(..(taken - *start) as usize);
        *start = taken;
    }

    /// Returns the number of bytes that all ranks have taken, or `None` if no rank reads any more.
    pub(super) fn taken(&self) -> Option<u64> {
        (!self.pipes.is_empty()).then_some(self.start)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;

    use mio::Poll;

    use super::*;

    #[test]
    fn each_rank_gets_all_bytes_and_a_rank_that_has_ended_does_not_matter() {
        let poll = Poll::new().unwrap();
        let mut feed = InputFeed::default();
        let [mut first, mut second, third] =
            [(); 3].map(|()| File::from(feed.add_rank(poll.registry()).unwrap()));
        // More than a pipe holds.
        let sent: Vec<u8> = (0..200_000_u32).map(|index| index as u8).collect();
        feed.push(&sent);
        feed.advance();
        drop(third);
        let mut received = [Vec::new(), Vec::new()];
        let mut part = vec![0; 50_000];
        while received[0].len() < sent.len() {
            let count = first.read(&mut part).unwrap();
            received[0].extend_from_slice(&part[..count]);
            feed.advance();
        }
        // The second rank has not read anything, so only what its pipe holds has been taken.
        assert!(feed.taken().is_some_and(|taken| taken < sent.len() as u64));
        while received[1].len() < sent.len() {
            let count = second.read(&mut part).unwrap();
            received[1].extend_from_slice(&part[..count]);
            feed.advance();
        }
        assert_eq!((feed.taken(), feed.buffer.len()), (Some(sent.len() as u64), 0));
        assert!(received.iter().all(|received| *received == sent));
        feed.push(b"");
        feed.advance();
        assert_eq!(
            (feed.taken(), first.read(&mut part).unwrap(), second.read(&mut part).unwrap()),
            (None, 0, 0)
        );
    }
}
