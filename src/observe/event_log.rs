//! A log of events in memory of a fixed size. Writing takes no lock and allocates nothing.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use super::call_sites::CallSites;
use super::event::{Direction, EventNumber, EventStatus, OperationStart, RecordedEvent};
use crate::types::{Algorithm, Contract, DType, Operation, Rank, ReduceOp};

/// The words of an event. With its stamp, an event fills one cache line.
const WORDS: usize = 7;
/// The words of an event that change after it was submitted.
const BEGUN_WORD: usize = 1;
const FINISHED_WORD: usize = 2;
/// The bits of the last word of times that hold the status.
const STATUS_BITS: u32 = 2;
/// The sequence number of an event without one. Sequence numbers have 48 bits.
const NO_SEQUENCE: u64 = (1 << 48) - 1;
/// The rank of an event without a peer or root.
const NO_RANK: u32 = u32::MAX;

/// Which events a log keeps when there are more than fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    First,
    Last,
}

/// A log of events. Each event has a slot, whose words are atomic. A reader detects that a slot was written while it read the
/// slot. Two threads write to one slot at the same time only if one of them is interrupted while the other ones write all other
/// slots. Such an event may then be wrong, but reading it is safe.
pub(super) struct EventLog {
    slots: Box<[Slot]>,
    keep: Keep,
}

#[repr(align(64))]
struct Slot {
    /// Twice the number of the event plus 2; 1 less while the slot is written; 0 if it is empty.
    stamp: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl EventLog {
    /// Returns a log of `capacity` events.
    pub(super) fn new(capacity: usize, keep: Keep) -> Self {
        let slot = |_| Slot { stamp: AtomicU64::new(0), words: Default::default() };
        Self { slots: (0..capacity).map(slot).collect(), keep }
    }

    /// Returns the slot of an event; `None` if the log does not keep it.
    fn slot(&self, EventNumber(number): EventNumber) -> Option<&Slot> {
        match self.keep {
            Keep::First => self.slots.get(usize::try_from(number).ok()?),
            Keep::Last => self.slots.get((number % self.slots.len() as u64) as usize),
        }
    }

    /// Stores an event that was submitted.
    pub(super) fn submit(&self, number: EventNumber, words: &EventWords) {
        let Some(slot) = self.slot(number) else { return };
        let stamp = stamp_of(number);
        slot.stamp.store(stamp - 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, &value) in slot.words.iter().zip(&words.0) {
            word.store(value, Ordering::Relaxed);
        }
        slot.stamp.store(stamp, Ordering::Release);
    }

    /// Stores when an event began, unless it has been overwritten.
    pub(super) fn set_begun(&self, number: EventNumber, time: Duration) {
        self.set(number, BEGUN_WORD, nanoseconds(time).max(1));
    }

    /// Stores when and how an event ended, unless it has been overwritten.
    pub(super) fn set_finished(&self, number: EventNumber, time: Duration, status: EventStatus) {
        self.set(number, FINISHED_WORD, nanoseconds(time) << STATUS_BITS | status as u64);
    }

    fn set(&self, number: EventNumber, word: usize, value: u64) {
        if let Some(slot) = self.slot(number)
            && slot.stamp.load(Ordering::Relaxed) == stamp_of(number)
        {
            slot.words[word].store(value, Ordering::Relaxed);
        }
    }

    /// Returns the events of the log, sorted by their numbers. Leaves out events that are written at this moment.
    pub(super) fn read(&self, sites: &CallSites) -> Vec<RecordedEvent> {
        let read_slot = |slot: &Slot| {
            let stamp = slot.stamp.load(Ordering::Acquire);
            let words = std::array::from_fn(|word| slot.words[word].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let is_whole = stamp.is_multiple_of(2) && stamp == slot.stamp.load(Ordering::Relaxed);
            let number = EventNumber((stamp / 2).checked_sub(1)?);
            EventWords(words).decode(number, sites).filter(|_| is_whole)
        };
        let mut events: Vec<RecordedEvent> = self.slots.iter().filter_map(read_slot).collect();
        events.sort_by_key(|event| event.number);
        events
    }
}

fn stamp_of(EventNumber(number): EventNumber) -> u64 {
    2 * number + 2
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// An event as words: when it was submitted, begun and finished; its count, its sequence number and site, its group and layout,
/// and the rest of its contract.
pub(super) struct EventWords([u64; WORDS]);

impl EventWords {
    pub(super) fn encode(start: &OperationStart, sequence: Option<u64>, site: u16) -> Self {
        let OperationStart { group, contract, direction, submitted, .. } = start;
        let Contract { operation, dtype, reduction, algorithm, root, count, layout } = contract;
        let (direction, rank) = match direction {
            Direction::Collective => (0, root.get()),
            Direction::To(rank) => (1, rank.get()),
            Direction::From(rank) => (2, rank.map_or(NO_RANK, Rank::get)),
        };
        let names = [
            operation.to_byte() | direction << 6,
            dtype.to_byte(),
            reduction.map_or(0, |reduction| reduction.to_byte() + 1),
            algorithm.to_byte(),
        ];
        Self([
            nanoseconds(*submitted),
            0,
            0,
            *count,
            sequence.unwrap_or(NO_SEQUENCE) << 16 | u64::from(site),
            u64::from(*group) | u64::from(*layout) << 32,
            u64::from(u32::from_le_bytes(names)) | u64::from(rank) << 32,
        ])
    }

    /// Returns the event; `None` if the words are invalid.
    fn decode(&self, number: EventNumber, sites: &CallSites) -> Option<RecordedEvent> {
        let [submitted, begun, finished, count, sequence_and_site, group_and_layout, names] = self.0;
        let [operation, dtype, reduction, algorithm, ..] = names.to_le_bytes();
        let rank = (names >> 32) as u32;
        let direction = match operation >> 6 {
            0 => Direction::Collective,
            1 => Direction::To(Rank::new(rank)),
            _ => Direction::From(Some(Rank::new(rank)).filter(|_| rank != NO_RANK)),
        };
        let is_collective = direction == Direction::Collective;
        let contract = Contract {
            operation: Operation::from_byte(operation & 0x3f)?,
            dtype: DType::from_byte(dtype)?,
            reduction: match reduction.checked_sub(1) {
                Some(byte) => Some(ReduceOp::from_byte(byte)?),
                None => None,
            },
            algorithm: Algorithm::from_byte(algorithm)?,
            root: if is_collective { Rank::new(rank) } else { Rank::ZERO },
            count,
            layout: (group_and_layout >> 32) as u32,
        };
        let status =
            [EventStatus::Active, EventStatus::Completed, EventStatus::Failed, EventStatus::Cancelled]
                [(finished % (1 << STATUS_BITS)) as usize];
        let ended = (status != EventStatus::Active).then(|| Duration::from_nanos(finished >> STATUS_BITS));
        Some(RecordedEvent {
            number,
            group: group_and_layout as u32,
            sequence: Some(sequence_and_site >> 16).filter(|&sequence| sequence != NO_SEQUENCE),
            contract,
            direction,
            site: sites.get(sequence_and_site as u16),
            submitted: Duration::from_nanos(submitted),
            begun: (begun != 0).then(|| Duration::from_nanos(begun)),
            finished: ended,
            status,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Site;

    fn start(count: u64, direction: Direction, reduction: Option<ReduceOp>) -> OperationStart {
        let operation =
            if direction == Direction::Collective { Operation::AllReduce } else { Operation::Message };
        let contract = Contract {
            operation,
            dtype: DType::F64,
            reduction,
            algorithm: Algorithm::Hierarchy,
            root: if operation == Operation::Message { Rank::ZERO } else { Rank::new(3) },
            count,
            layout: u32::MAX,
        };
        let submitted = Duration::from_nanos(count);
        OperationStart { group: u32::MAX - 1, contract, direction, site: Site::new("a.py", 7), submitted }
    }

    #[test]
    fn a_log_returns_what_was_stored() {
        let (sites, log) = (CallSites::new(), EventLog::new(4, Keep::Last));
        let directions = [
            (Direction::Collective, Some(ReduceOp::Custom)),
            (Direction::To(Rank::new(65_535)), None),
            (Direction::From(None), None),
            (Direction::From(Some(Rank::ZERO)), None),
        ];
        for (number, (direction, reduction)) in directions.into_iter().enumerate() {
            let start = start(u64::MAX - 3, direction, reduction);
            let sequence = (number > 0).then_some(1 << 40);
            let number = EventNumber(number as u64);
            log.submit(number, &EventWords::encode(&start, sequence, sites.index_of(start.site)));
            if number.0 == 1 {
                log.set_begun(number, Duration::ZERO);
                log.set_finished(number, Duration::from_secs(9), EventStatus::Failed);
            }
            let event = log.read(&sites).pop().unwrap();
            let expected = RecordedEvent {
                number,
                group: start.group,
                sequence,
                contract: start.contract,
                direction,
                site: Some(start.site),
                submitted: start.submitted,
                begun: (number.0 == 1).then_some(Duration::from_nanos(1)),
                finished: (number.0 == 1).then_some(Duration::from_secs(9)),
                status: if number.0 == 1 { EventStatus::Failed } else { EventStatus::Active },
            };
            assert_eq!(event, expected);
        }
    }

    #[test]
    fn a_full_log_keeps_the_first_or_the_last_events() {
        let sites = CallSites::new();
        for (keep, kept) in [(Keep::First, 0..3), (Keep::Last, 7..10)] {
            let log = EventLog::new(3, keep);
            for number in 0..10 {
                let words = EventWords::encode(&start(number, Direction::Collective, None), None, 0);
                log.submit(EventNumber(number), &words);
            }
            // An operation that ends after its event was overwritten changes nothing.
            log.set_finished(EventNumber(5), Duration::ZERO, EventStatus::Failed);
            let events = log.read(&sites);
            assert!(events.iter().map(|event| event.number.0).eq(kept));
            assert!(events.iter().all(|event| event.status == EventStatus::Active));
        }
    }

    /// Without the check of the stamp, a reader would return events with words of two events.
    #[test]
    fn readers_see_whole_events_while_a_thread_writes() {
        let (sites, log) = (CallSites::new(), EventLog::new(2, Keep::Last));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0..20_000 {
                    let words =
                        EventWords::encode(&start(number, Direction::Collective, None), Some(number), 0);
                    log.submit(EventNumber(number), &words);
                }
            });
            while !writer.is_finished() {
                for event in log.read(&sites) {
                    let number = event.number.0;
                    assert_eq!((event.contract.count, event.sequence), (number, Some(number)));
                    assert_eq!(event.submitted, Duration::from_nanos(number));
                }
            }
        });
    }
}
