//! The encoding of the messages between the ranks and the coordinator. Every value that a peer sends is compared with
//! a limit before it is used. Numbers are little-endian. The code uses no serialization library, because reports
//! contain a bit vector, and names and counts have limits.

use std::collections::BTreeSet;
use std::fmt;

use super::error::Violation;
use crate::types::{DType, Rank, ReduceOp, WorldSize};

/// The largest size of a name in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// The largest size of a tensor in bytes. For an all-gather, this limit applies to the result.
pub const TENSOR_BYTES_MAX: u64 = 1 << 34;
/// The largest number of tensors in one message.
pub(super) const REQUESTS_MAX: usize = 1024;
/// The largest number of refusals ([`Instruction::Refuse`]) in one message.
pub(super) const REFUSALS_MAX: usize = 64;
/// The largest size in bytes of the reason of a refusal.
pub(super) const REASON_BYTES_MAX: usize = 2048;
/// The largest number of slots of a response cache.
pub(super) const SLOTS_MAX: u16 = 16_384;
/// The largest size of a message in bytes, from a rank or from the coordinator.
pub(super) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The largest size in bytes of an [`AnnouncedTensor`]: name length, name, operation and argument, type, count, two slots.
const ANNOUNCED_BYTES_MAX: usize = 2 + NAME_BYTES_MAX + 1 + 4 + 1 + 8 + 2 + 2;
const REFUSAL_BYTES_MAX: usize = 2 + 2 + NAME_BYTES_MAX + 2 + REASON_BYTES_MAX;
const _: () = assert!(
    // The longest message has an instruction for each tensor, all refusals, and all retired slots.
    REQUESTS_MAX * (ANNOUNCED_BYTES_MAX + 8) + REFUSALS_MAX * REFUSAL_BYTES_MAX + 3 * SLOTS_MAX as usize + 64
        <= MESSAGE_BYTES_MAX
);

/// The operation on a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum TensorOp {
    AllReduce(ReduceOp),
    Broadcast(Rank),
    /// An all-gather. The tensor's [`Signature`] has the count 0, because the counts of the ranks may differ.
    AllGather,
    ReduceScatter(ReduceOp),
}

/// The properties of a tensor that must be the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Signature {
    pub(super) kind: TensorOp,
    pub(super) dtype: DType,
    /// The number of elements.
    pub(super) count: u64,
}

impl Signature {
    pub(super) fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.dtype.size_bytes() as u64)
    }

    /// Checks that this signature is valid in a group of `world` ranks.
    pub(super) fn check_size_and_operation(&self, world: WorldSize) -> Result<(), Violation> {
        match self.kind {
            TensorOp::AllReduce(op) | TensorOp::ReduceScatter(op)
                if op == ReduceOp::Custom || !op.applies_to(self.dtype) =>
            {
                return Err(Violation(format!("{op} on {} is not defined", self.dtype)));
            }
            TensorOp::Broadcast(root) if !world.contains(root) => {
                return Err(Violation(format!("root {root} is not a rank of this group of {world}")));
            }
            _ => {}
        }
        let copies = if self.kind == TensorOp::AllGather { u64::from(world.get()) } else { 1 };
        if self.bytes().saturating_mul(copies) > TENSOR_BYTES_MAX {
            let Self { count, dtype, .. } = self;
            return Err(Violation(format!("{count} x {dtype} is more than {TENSOR_BYTES_MAX} bytes")));
        }
        Ok(())
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, count } = self;
        match kind {
            TensorOp::AllReduce(op) => write!(f, "all_reduce({op}, {count} x {dtype})"),
            TensorOp::Broadcast(root) => write!(f, "broadcast(root {root}, {count} x {dtype})"),
            TensorOp::AllGather => write!(f, "all_gather({dtype})"),
            TensorOp::ReduceScatter(op) => write!(f, "reduce_scatter({op}, {count} x {dtype})"),
        }
    }
}

/// Returns an error if a name is empty or too long.
pub(super) fn check_tensor_name(name: &str) -> Result<(), Violation> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let length = name.len();
        return Err(Violation(format!("a name must have 1 to {NAME_BYTES_MAX} bytes, not {length}")));
    }
    Ok(())
}

/// A tensor that a rank has submitted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) name: String,
    pub(super) signature: Signature,
}

/// A report from a rank to the coordinator.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct RankReport {
    /// The number of messages of the coordinator that the rank had read when it wrote this report.
    pub(super) messages_read: u64,
    /// The cache slots of the submitted tensors that are in the response cache.
    pub(super) slots: BTreeSet<u16>,
    /// The submitted tensors that are not in the response cache.
    pub(super) requests: Vec<Request>,
    /// Whether the rank joins: it has no more data, and waits until all ranks have joined.
    pub(super) joins: bool,
    /// Whether the rank closes: it will submit no more tensors.
    pub(super) closes: bool,
}

/// A message from the coordinator to every rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct CoordinatorMessage {
    /// The instructions, which the rank executes in this order.
    pub(super) instructions: Vec<Instruction>,
    /// The slots that this message retires. A rank that has read this message must not use these slots in reports.
    pub(super) retired: Vec<u16>,
}

/// An instruction of the coordinator to every rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Instruction {
    /// Run these tensors as one operation.
    Run(Vec<AnnouncedTensor>),
    /// Report an error to the handle of this tensor.
    Refuse { name: String, refusal: RefusalKind, reason: String },
    /// All ranks have joined. The field is the rank that joined last.
    Joined(Rank),
    /// All ranks have closed. This is the last instruction.
    End,
}

/// A tensor that is ready on all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum AnnouncedTensor {
    /// The tensor in this slot of the response cache.
    Cached(u16),
    /// The name and signature of an uncached tensor. Every rank stores the name and signature in the slot, if there
    /// is one.
    Named(Request, Option<u16>),
}

/// The reason for a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RefusalKind {
    Disagreement,
    NeedsJoinedRanks,
    RankClosed,
}

/// In a message, this slot number means that there is no slot.
const NO_SLOT: u16 = u16::MAX;

impl RankReport {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bits = vec![0u8; self.slots.last().map_or(0, |&last| usize::from(last) / 8 + 1)];
        for &slot in &self.slots {
            bits[usize::from(slot) / 8] |= 1 << (slot % 8);
        }
        let mut out = self.messages_read.to_le_bytes().to_vec();
        out.push(u8::from(self.joins) | u8::from(self.closes) << 1);
        put_u16(&mut out, bits.len() as u16);
        out.extend(bits);
        put_u16(&mut out, self.requests.len() as u16);
        for request in &self.requests {
            put_request(&mut out, request);
        }
        out
    }

    pub(super) fn decode(bytes: &[u8], world: WorldSize) -> Result<Self, Violation> {
        let mut reader = MessageReader(bytes);
        let messages_read = reader.read_u64()?;
        let flags = reader.read_u8()?;
        if flags > 3 {
            return Err(Violation(format!("it sent unknown flags {flags}")));
        }
        let length = usize::from(reader.read_u16()?);
        if length > usize::from(SLOTS_MAX) / 8 {
            return Err(Violation(format!("its bit vector of {length} bytes is too long")));
        }
        let bits = reader.read_bytes(length)?;
        let is_set = |slot: &u16| bits[usize::from(*slot) / 8] & (1 << (slot % 8)) != 0;
        let slots = (0..length as u16 * 8).filter(is_set).collect();
        let count = reader.read_count("requests", REQUESTS_MAX)?;
        let requests = (0..count).map(|_| reader.read_request(world)).collect::<Result<_, _>>()?;
        reader.expect_end()?;
        Ok(Self { messages_read, slots, requests, joins: flags & 1 != 0, closes: flags & 2 != 0 })
    }
}

impl CoordinatorMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_u16(&mut out, self.instructions.len() as u16);
        for instruction in &self.instructions {
            match instruction {
                Instruction::Run(tensors) => {
                    out.push(1);
                    put_u16(&mut out, tensors.len() as u16);
                    for tensor in tensors {
                        put_announced_tensor(&mut out, tensor);
                    }
                }
                Instruction::Refuse { name, refusal, reason } => {
                    out.extend([2, *refusal as u8]);
                    put_text(&mut out, name, NAME_BYTES_MAX);
                    put_text(&mut out, reason, REASON_BYTES_MAX);
                }
                Instruction::Joined(rank) => {
                    out.push(3);
                    out.extend(rank.get().to_le_bytes());
                }
                Instruction::End => out.push(4),
            }
        }
        put_u16(&mut out, self.retired.len() as u16);
        for &slot in &self.retired {
            put_u16(&mut out, slot);
        }
        out
    }

    pub(super) fn decode(bytes: &[u8], world: WorldSize) -> Result<Self, Violation> {
        let mut reader = MessageReader(bytes);
        let count = reader.read_count("instructions", REQUESTS_MAX + REFUSALS_MAX + 1)?;
        let instructions = (0..count).map(|_| reader.read_instruction(world)).collect::<Result<_, _>>()?;
        let count = reader.read_count("retired slots", usize::from(SLOTS_MAX))?;
        let retired = (0..count).map(|_| reader.read_slot()).collect::<Result<_, _>>()?;
        reader.expect_end()?;
        Ok(Self { instructions, retired })
    }
}

fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend(value.to_le_bytes());
}

/// Appends the length of a text, and then the text. Cuts off a text longer than `bytes_max`.
fn put_text(out: &mut Vec<u8>, text: &str, bytes_max: usize) {
    let end = text.floor_char_boundary(bytes_max);
    put_u16(out, end as u16);
    out.extend(&text.as_bytes()[..end]);
}

fn put_request(out: &mut Vec<u8>, Request { name, signature }: &Request) {
    put_text(out, name, NAME_BYTES_MAX);
    let (kind, argument) = match signature.kind {
        TensorOp::AllReduce(op) => (1, u32::from(op.to_byte())),
        TensorOp::Broadcast(root) => (2, root.get()),
        TensorOp::AllGather => (3, 0),
        TensorOp::ReduceScatter(op) => (4, u32::from(op.to_byte())),
    };
    out.push(kind);
    out.extend(argument.to_le_bytes());
    out.push(signature.dtype.to_byte());
    out.extend(signature.count.to_le_bytes());
}

fn put_announced_tensor(out: &mut Vec<u8>, tensor: &AnnouncedTensor) {
    match tensor {
        AnnouncedTensor::Cached(slot) => put_u16(out, *slot),
        AnnouncedTensor::Named(request, slot) => {
            put_u16(out, NO_SLOT);
            put_request(out, request);
            put_u16(out, slot.unwrap_or(NO_SLOT));
        }
    }
}

/// Reads fields from the bytes of a message that a peer has sent.
struct MessageReader<'a>(&'a [u8]);

impl<'a> MessageReader<'a> {
    fn read_bytes(&mut self, length: usize) -> Result<&'a [u8], Violation> {
        let (head, tail) =
            self.0.split_at_checked(length).ok_or_else(|| Violation("its message is cut off".into()))?;
        self.0 = tail;
        Ok(head)
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        self.read_bytes(N)?.try_into().map_err(|_| Violation("its message is cut off".into()))
    }

    fn read_u8(&mut self) -> Result<u8, Violation> {
        self.read_array().map(u8::from_le_bytes)
    }

    fn read_u16(&mut self) -> Result<u16, Violation> {
        self.read_array().map(u16::from_le_bytes)
    }

    fn read_u64(&mut self) -> Result<u64, Violation> {
        self.read_array().map(u64::from_le_bytes)
    }

    fn read_rank(&mut self, world: WorldSize) -> Result<Rank, Violation> {
        let rank = Rank::new(self.read_array().map(u32::from_le_bytes)?);
        if world.contains(rank) {
            Ok(rank)
        } else {
            Err(Violation(format!("it named rank {rank} in a group of {world}")))
        }
    }

    fn read_count(&mut self, items: &str, count_max: usize) -> Result<usize, Violation> {
        let count = usize::from(self.read_u16()?);
        let error = || Violation(format!("it sent {count} {items}, and the limit is {count_max}"));
        if count > count_max { Err(error()) } else { Ok(count) }
    }

    fn read_slot(&mut self) -> Result<u16, Violation> {
        let slot = self.read_u16()?;
        if slot >= SLOTS_MAX { Err(Violation(format!("its slot {slot} is too large"))) } else { Ok(slot) }
    }

    fn read_text(&mut self, bytes_max: usize) -> Result<String, Violation> {
        let length = self.read_count("bytes of text", bytes_max)?;
        let text = str::from_utf8(self.read_bytes(length)?);
        text.map(str::to_owned).map_err(|_| Violation("it sent a text that is not UTF-8".into()))
    }

    fn read_name(&mut self) -> Result<String, Violation> {
        let name = self.read_text(NAME_BYTES_MAX)?;
        check_tensor_name(&name).map(|()| name)
    }

    fn read_request(&mut self, world: WorldSize) -> Result<Request, Violation> {
        let name = self.read_name()?;
        let kind = self.read_u8()?;
        let argument = u32::from_le_bytes(self.read_array()?);
        let op = || u8::try_from(argument).ok().and_then(ReduceOp::from_byte);
        let kind = match kind {
            1 => op().map(TensorOp::AllReduce),
            2 => Some(TensorOp::Broadcast(Rank::new(argument))),
            3 => Some(TensorOp::AllGather),
            4 => op().map(TensorOp::ReduceScatter),
            _ => None,
        };
        let kind = kind.ok_or_else(|| Violation(format!("it sent an unknown operation on `{name}`")))?;
        let dtype = self.read_u8()?;
        let dtype = DType::from_byte(dtype)
            .ok_or_else(|| Violation(format!("it sent unknown element type {dtype} of `{name}`")))?;
        let signature = Signature { kind, dtype, count: self.read_u64()? };
        signature.check_size_and_operation(world)?;
        Ok(Request { name, signature })
    }

    fn read_tensor(&mut self, world: WorldSize) -> Result<AnnouncedTensor, Violation> {
        let slot = self.read_u16()?;
        if slot != NO_SLOT {
            return Ok(AnnouncedTensor::Cached(slot));
        }
        let request = self.read_request(world)?;
        let slot = self.read_u16()?;
        if slot != NO_SLOT && slot >= SLOTS_MAX {
            return Err(Violation(format!("its slot {slot} is too large")));
        }
        Ok(AnnouncedTensor::Named(request, Some(slot).filter(|&slot| slot != NO_SLOT)))
    }

    fn read_instruction(&mut self, world: WorldSize) -> Result<Instruction, Violation> {
        match self.read_u8()? {
            1 => {
                let count = self.read_count("tensors", REQUESTS_MAX)?;
                (0..count).map(|_| self.read_tensor(world)).collect::<Result<_, _>>().map(Instruction::Run)
            }
            2 => {
                let refusal = match self.read_u8()? {
                    0 => RefusalKind::Disagreement,
                    1 => RefusalKind::NeedsJoinedRanks,
                    2 => RefusalKind::RankClosed,
                    other => return Err(Violation(format!("it sent unknown refusal {other}"))),
                };
                let name = self.read_name()?;
                Ok(Instruction::Refuse { name, refusal, reason: self.read_text(REASON_BYTES_MAX)? })
            }
            3 => self.read_rank(world).map(Instruction::Joined),
            4 => Ok(Instruction::End),
            other => Err(Violation(format!("it sent unknown instruction {other}"))),
        }
    }

    fn expect_end(&self) -> Result<(), Violation> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Violation(format!("its message has {} bytes too many", self.0.len())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORLD: WorldSize = WorldSize::new(4).unwrap();

    fn request(name: &str) -> Request {
        let signature = Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count: 7 };
        Request { name: name.into(), signature }
    }

    #[test]
    fn decoding_an_encoded_report_or_message_returns_the_original() {
        let kinds =
            [TensorOp::AllReduce(ReduceOp::Average), TensorOp::Broadcast(Rank::new(3)), TensorOp::AllGather];
        let make = |kind| Request { signature: Signature { kind, ..request("x").signature }, ..request("y") };
        let requests = kinds.map(make).to_vec();
        let slots = [0, 7, 8, 1023].into();
        let report = RankReport { messages_read: 9, slots, requests, joins: true, closes: false };
        assert_eq!(RankReport::decode(&report.encode(), WORLD), Ok(report));
        let tensors = vec![
            AnnouncedTensor::Cached(3),
            AnnouncedTensor::Named(request("a"), Some(4)),
            AnnouncedTensor::Named(request("b"), None),
        ];
        let refuse = |refusal| Instruction::Refuse { name: "z".into(), refusal, reason: "why".into() };
        let instructions = vec![
            Instruction::Run(tensors),
            refuse(RefusalKind::Disagreement),
            refuse(RefusalKind::NeedsJoinedRanks),
            refuse(RefusalKind::RankClosed),
            Instruction::Joined(Rank::new(2)),
            Instruction::End,
        ];
        let message = CoordinatorMessage { instructions, retired: vec![5, 6] };
        assert_eq!(CoordinatorMessage::decode(&message.encode(), WORLD), Ok(message));
    }

    #[test]
    fn a_report_of_1024_cached_tensors_has_less_than_150_bytes() {
        let report = RankReport { messages_read: 1000, slots: (0..1024).collect(), ..RankReport::default() };
        assert_eq!(report.encode().len(), 8 + 1 + 2 + 128 + 2);
    }

    #[test]
    fn reports_that_exceed_a_limit_are_refused() {
        let encode = |name: &str, signature| {
            let requests = vec![Request { name: name.into(), signature }];
            RankReport { requests, ..RankReport::default() }.encode()
        };
        let good = request("x").signature;
        let violation = |bytes: &[u8]| RankReport::decode(bytes, WORLD).unwrap_err().0;
        assert!(violation(&encode("", good)).contains("1 to 256 bytes"));
        assert!(violation(&encode("x", Signature { count: u64::MAX, ..good })).contains("is more than"));
        let gather = Signature { kind: TensorOp::AllGather, count: TENSOR_BYTES_MAX / 8, ..good };
        assert!(violation(&encode("x", gather)).contains("is more than"));
        let root = TensorOp::Broadcast(Rank::new(4));
        assert!(violation(&encode("x", Signature { kind: root, ..good })).contains("is not a rank"));
        let custom = TensorOp::AllReduce(ReduceOp::Custom);
        assert!(violation(&encode("x", Signature { kind: custom, ..good })).contains("not defined"));
        let many = RankReport { requests: vec![request("x"); REQUESTS_MAX + 1], ..RankReport::default() };
        assert!(violation(&many.encode()).contains("requests, and the limit is 1024"));
        let long = RankReport { slots: [SLOTS_MAX].into(), ..RankReport::default() };
        assert!(violation(&long.encode()).contains("bit vector"));
        let trailing = [RankReport::default().encode(), vec![0]].concat();
        assert!(violation(&trailing).contains("too many"));
        assert!(violation(&trailing[..5]).contains("cut off"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decoding_any_bytes_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RankReport::decode(&bytes, WORLD);
            let _ = CoordinatorMessage::decode(&bytes, WORLD);
        }

        #[test]
        fn decoding_a_message_with_a_changed_byte_does_not_panic(index in 0usize..60, byte in any::<u8>()) {
            let report = RankReport { requests: vec![request("abc")], slots: [3].into(), ..RankReport::default() };
            let mut bytes = report.encode();
            let index = index % bytes.len();
            bytes[index] = byte;
            let _ = RankReport::decode(&bytes, WORLD);
            let tensors = vec![AnnouncedTensor::Cached(3), AnnouncedTensor::Named(request("a"), Some(4))];
            let mut bytes = CoordinatorMessage { instructions: vec![Instruction::Run(tensors)], retired: vec![1] }.encode();
            let index = index % bytes.len();
            bytes[index] = byte;
            let _ = CoordinatorMessage::decode(&bytes, WORLD);
        }
    }
}
