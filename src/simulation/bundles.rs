//! A simulated link of several connections between two ends of [`Bundle`]. The connections deliver bytes in random orders and
//! pieces, and are added at random times. All bytes must arrive in order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::rc::Rc;

use mio::Token;
use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::transport::TransferError;
use crate::transport::poller::Event;
use crate::transport::tcp::{Bundle, Connection, SendSpace};

/// One direction of a connection.
#[derive(Default)]
pub(crate) struct Pipe {
    /// The bytes that have been sent and have not arrived.
    pub(crate) in_flight: VecDeque<u8>,
    /// The bytes that have arrived and have not been read.
    pub(crate) arrived: VecDeque<u8>,
    /// The size of the send buffer in bytes.
    pub(crate) capacity: usize,
    /// Whether the sender has closed this direction.
    pub(crate) is_finished: bool,
    /// Whether the connection has failed. After the arrived bytes, a read returns an error.
    pub(crate) has_failed: bool,
    /// Whether the sender waits for an event that reports free space.
    waits_for_space: bool,
    /// The number of bytes that the sender has written.
    pub(crate) written: usize,
}

impl Pipe {
    fn send_space(&self) -> SendSpace {
        let queued = self.in_flight.len() + self.arrived.len();
        SendSpace { queued, free: self.capacity.saturating_sub(queued) }
    }

    fn has_space(&self) -> bool {
        let SendSpace { queued, free } = self.send_space();
        free > 0 && free >= queued / 2
    }
}

/// One end of a connection.
pub(crate) struct PipeEnd {
    outgoing: Rc<RefCell<Pipe>>,
    incoming: Rc<RefCell<Pipe>>,
}

impl Read for PipeEnd {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(bytes)])
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut pipe = self.incoming.borrow_mut();
        if pipe.arrived.is_empty() {
            return match (pipe.has_failed, pipe.is_finished && pipe.in_flight.is_empty()) {
                (true, _) => Err(io::ErrorKind::ConnectionReset.into()),
                (false, true) => Ok(0),
                (false, false) => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let mut count = 0;
        for part in parts {
            for byte in part.iter_mut() {
                let Some(arrived) = pipe.arrived.pop_front() else { return Ok(count) };
                *byte = arrived;
                count += 1;
            }
        }
        Ok(count)
    }
}

impl Write for PipeEnd {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pipe = self.outgoing.borrow_mut();
        let free = pipe.send_space().free;
        let mut count = 0;
        for part in parts {
            let length = part.len().min(free - count);
            pipe.in_flight.extend(&part[..length]);
            count += length;
        }
        pipe.written += count;
        if count < parts.iter().map(|part| part.len()).sum() {
            pipe.waits_for_space = true;
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection for PipeEnd {
    fn send_space(&self) -> io::Result<SendSpace> {
        Ok(self.outgoing.borrow().send_space())
    }

    fn is_writable(&self) -> io::Result<bool> {
        let mut pipe = self.outgoing.borrow_mut();
        pipe.waits_for_space |= !pipe.has_space();
        Ok(pipe.has_space())
    }

    fn close_sending(&self) -> io::Result<()> {
        self.outgoing.borrow_mut().is_finished = true;
        Ok(())
    }
}

/// A simulated link: its two ends and, for each connection, one pipe in each direction. Pipe 0 leads from end 0 to
/// end 1, and pipe 1 leads back.
pub(crate) struct SimulatedLink {
    random: StdRng,
    pub(crate) ends: [Bundle<PipeEnd>; 2],
    pub(crate) pipes: Vec<[Rc<RefCell<Pipe>>; 2]>,
}

pub(crate) fn event(index: usize, is_readable: bool, is_writable: bool) -> Event {
    Event { token: Token(index), is_readable, is_writable, is_ended: false }
}

impl SimulatedLink {
    pub(crate) fn new(seed: u64, stream_count: u8, capacity_max: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut pipe = || {
            let capacity = random.random_range(1..=capacity_max);
            Rc::new(RefCell::new(Pipe { capacity, ..Pipe::default() }))
        };
        let pipes: Vec<_> = (0..stream_count).map(|_| [pipe(), pipe()]).collect();
        let ends = [0, 1].map(|side| Bundle::new(pipe_end(&pipes[0], side), Token(0), stream_count));
        Self { random, ends, pipes }
    }

    /// Adds a further connection to both ends.
    pub(crate) fn add_connection(&mut self, index: usize) {
        for side in 0..2 {
            let end = pipe_end(&self.pipes[index], side);
            self.ends[side].add_connection(index as u8, end, Token(index));
        }
    }

    /// Delivers a random number of bytes in one direction of one connection, and reports events to both ends, as the
    /// kernel would.
    fn deliver_some_bytes(&mut self) {
        let index = self.random.random_range(0..self.pipes.len());
        let to = self.random.random_range(0..2);
        let mut pipe = self.pipes[index][1 - to].borrow_mut();
        let count = self.random.random_range(0..=pipe.in_flight.len());
        let bytes: Vec<u8> = pipe.in_flight.drain(..count).collect();
        pipe.arrived.extend(bytes);
        let has_ended = pipe.is_finished && pipe.in_flight.is_empty();
        let has_space = pipe.waits_for_space && pipe.has_space();
        pipe.waits_for_space &= !has_space;
        drop(pipe);
        self.ends[to]
            .handle_event(Event { is_ended: has_ended, ..event(index, count > 0 || has_ended, false) });
        self.ends[1 - to].handle_event(event(index, false, has_space));
    }
}

fn pipe_end(pipes: &[Rc<RefCell<Pipe>>; 2], side: usize) -> PipeEnd {
    PipeEnd { outgoing: Rc::clone(&pipes[side]), incoming: Rc::clone(&pipes[1 - side]) }
}

/// The frames that one side sends, and the bytes that the other side has received.
struct FrameFlow {
    /// The index of the sending end.
    from: usize,
    /// The frames that have not been sent completely.
    frames: VecDeque<Vec<u8>>,
    /// The number of bytes of the first frame that have been sent.
    sent_of_first: usize,
    sent: Vec<u8>,
    received: Vec<u8>,
    /// The number of bytes of all frames.
    total_bytes: usize,
}

impl FrameFlow {
    /// Creates up to 7 frames. Most frames have less than 200 bytes, and the others have less than `length_max`.
    fn new(from: usize, length_max: usize, random: &mut StdRng) -> Self {
        let frames: VecDeque<Vec<u8>> = (0..random.random_range(1..8))
            .map(|_| {
                let long = random.random_bool(0.4);
                let length = random.random_range(1..if long { length_max } else { 200 });
                let mut frame = vec![0; length];
                random.fill(&mut frame[..]);
                frame
            })
            .collect();
        let total_bytes = frames.iter().map(Vec::len).sum();
        Self { from, frames, sent_of_first: 0, sent: Vec::new(), received: Vec::new(), total_bytes }
    }

    /// Sends and receives once.
    fn step(&mut self, link: &mut SimulatedLink) {
        if let Some(frame) = self.frames.front() {
            let rest = &frame[self.sent_of_first..];
            let header = rest.len().min(64);
            let parts = [IoSlice::new(&rest[..header]), IoSlice::new(&rest[header..])];
            match link.ends[self.from].send(&parts) {
                Ok(count) => {
                    self.sent.extend(&rest[..count]);
                    self.sent_of_first += count;
                    if self.sent_of_first == frame.len() {
                        self.frames.pop_front();
                        self.sent_of_first = 0;
                        if self.frames.is_empty() {
                            link.ends[self.from].close_sending();
                        }
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        let long = link.random.random_bool(0.5);
        let lengths = [link.random.random_range(1..if long { 100_000 } else { 100 }), 64];
        let mut buffers = lengths.map(|length| vec![0; length]);
        let mut parts = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
        let count = link.random.random_range(1..=2);
        match link.ends[1 - self.from].receive(&mut parts[..count]) {
            Ok(count) => self.received.extend(buffers.concat().into_iter().take(count)),
            Err(TransferError::Lost(_)) if self.is_done() => {}
            other => panic!("after {} of {} bytes: {other:?}", self.received.len(), self.total_bytes),
        }
    }

    fn is_done(&self) -> bool {
        self.received.len() == self.total_bytes
    }
}

/// Sends frames in both directions until all have arrived, and checks the received bytes. Connections are added at
/// random times. If `becomes_single` is set, each side begins at a random time to send on a single connection only.
fn exchange_frames(seed: u64, stream_count: u8, capacity_max: usize, becomes_single: bool) -> SimulatedLink {
    let mut link = SimulatedLink::new(seed, stream_count, capacity_max);
    // A small capacity moves only a few bytes in each step, so long frames would take seconds.
    let length_max = (100 * capacity_max).clamp(1000, 200_000);
    let mut flows = [0, 1].map(|from| FrameFlow::new(from, length_max, &mut link.random));
    let mut missing: Vec<usize> = (1..stream_count.into()).collect();
    let mut sides_to_change = if becomes_single { vec![0, 1] } else { Vec::new() };
    let mut idle = 0;
    while !flows.iter().all(FrameFlow::is_done) {
        let before: usize = flows.iter().map(|flow| flow.sent.len() + flow.received.len()).sum();
        match link.random.random_range(0..20) {
            0 if !missing.is_empty() => {
                let which = link.random.random_range(0..missing.len());
                let index = missing.swap_remove(which);
                link.add_connection(index);
            }
            1 if !sides_to_change.is_empty() => {
                if let Some(side) = sides_to_change.pop() {
                    link.ends[side].use_single_connection();
                }
            }
            2..=9 => link.deliver_some_bytes(),
            _ => {
                let which = link.random.random_range(0..2);
                flows[which].step(&mut link);
            }
        }
        let after: usize = flows.iter().map(|flow| flow.sent.len() + flow.received.len()).sum();
        idle = if after == before { idle + 1 } else { 0 };
        assert!(idle < 20_000, "seed {seed}: no data are moved, although all events have been reported");
    }
    for flow in &flows {
        assert!(flow.received == flow.sent, "seed {seed}: the received bytes differ from the sent bytes");
    }
    link
}

proptest! {
    // The number of cases is low, because each case takes tens of milliseconds.
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("TEST_FULL").is_some() { 100 } else { 4 }))]

    #[test]
    fn sent_bytes_arrive_in_order(
        seed: u64,
        stream_count in 1..=8u8,
        capacity in prop_oneof![1..2000usize, 1000..300_000usize],
    ) {
        exchange_frames(seed, stream_count, capacity, false);
    }

    #[test]
    fn a_link_can_change_to_one_connection(seed: u64, stream_count in 2..=8u8, capacity in 100..300_000usize) {
        exchange_frames(seed, stream_count, capacity, true);
    }
}
