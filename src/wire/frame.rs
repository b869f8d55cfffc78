//! Frames, the messages on a link. A frame is a header of 64 bytes and a payload. The header contains the length of the
//! payload.

use super::reader::Reader;
use crate::types::{Algorithm, Contract, DType, Operation, Rank, ReduceOp};

/// The length of a frame's header in bytes.
pub const HEADER_BYTES: usize = 64;
/// The maximum length of a data frame's payload in bytes. The payload of a data frame is one segment.
pub const SEGMENT_BYTES_MAX: usize = 4 << 20;
/// The maximum length in bytes of the payload of a control frame: an abort frame or a goodbye frame.
pub const CONTROL_BYTES_MAX: usize = 4096;
/// The first two bytes of every header.
const MAGIC: [u8; 2] = *b"RF";
/// The flag for a header that contains the payload's checksum.
const FLAG_PAYLOAD_CRC: u8 = 1;
/// The flag for a segment that was sent on credit, that is, before the sender received a ready frame for the
/// operation. `docs/flow-control.md` describes the limits of credit.
const FLAG_EAGER: u8 = 2;

const _: () = assert!(CONTROL_BYTES_MAX <= SEGMENT_BYTES_MAX);
const _: () = assert!(SEGMENT_BYTES_MAX <= u32::MAX as usize);

/// The kinds of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// The payload is a segment of an operation's data, and may be empty.
    Data = 1,
    /// The job failed; the payload is the root cause.
    Abort = 2,
    /// The sender leaves the job without a failure. A goodbye frame is the last frame that its sender sends.
    Goodbye = 3,
    /// The sender of this frame has begun the operation. The receiver of this frame may now send the data of its first
    /// `offset` steps to the sender of this frame, without using up credit.
    Ready = 4,
    /// The sender of this frame has consumed data that the peer sent on credit. `offset` is the total number of
    /// consumed bytes since the link was opened.
    Credit = 5,
    /// The sender of this frame has data for the operation, but may not send the data on credit.
    Announce = 6,
    /// The sender of this frame has changed the shared memory of the two ranks while the receiver was asleep.
    Wake = 7,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        let all =
            [Self::Data, Self::Abort, Self::Goodbye, Self::Ready, Self::Credit, Self::Announce, Self::Wake];
        all.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Returns the maximum length in bytes of the payload of a frame of this kind.
    const fn payload_bytes_max(self) -> usize {
        match self {
            Self::Data => SEGMENT_BYTES_MAX,
            Self::Abort | Self::Goodbye => CONTROL_BYTES_MAX,
            Self::Ready | Self::Credit | Self::Announce | Self::Wake => 0,
        }
    }
}

/// A frame's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the frame is for.
    pub kind: FrameKind,
    /// The number of the group within the job.
    pub group: u32,
    /// The number of the collective in its group, or of the message on its link.
    pub sequence: u64,
    /// The arguments of the sender's call: operation, element type, count and so on. The receiver compares these
    /// arguments with those of its own call.
    pub contract: Contract,
    /// The number of the step, counted from 0 over those steps of the operation in which this sender sends to this
    /// receiver.
    pub step: u32,
    /// The index of the segment's first element within the data of the step. Ready and credit frames use this field
    /// differently: see [`FrameKind`].
    pub offset: u64,
    /// Whether the segment was sent on credit, before the sender knew that the receiver was ready.
    pub eager: bool,
    /// The length of the payload in bytes.
    pub payload_bytes: u32,
    /// The CRC32C of the payload, if the link has checksums.
    pub payload_crc: Option<u32>,
}

/// Why 64 bytes are not a valid header.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The checksum does not match the bytes.
    #[error("a frame header is corrupt (its checksum is {found:08x} and should be {expected:08x})")]
    Corrupt {
        /// The checksum that the header contains.
        found: u32,
        /// The checksum that was computed from the header's other bytes.
        expected: u32,
    },
    /// The checksum matches, but a field has a value that this version does not know.
    #[error("a frame header's {field} has the unknown value {value}")]
    Unknown {
        /// The name of the field.
        field: &'static str,
        /// The value of the field.
        value: u64,
    },
    /// The payload is longer than this kind of frame allows.
    #[error("a frame header announces a payload of {claimed} bytes, more than the limit of {limit} bytes")]
    TooLong {
        /// The payload's length according to the header, in bytes.
        claimed: u32,
        /// The maximum length of the payload of this kind of frame, in bytes.
        limit: usize,
    },
}

impl FrameHeader {
    /// A header in which every field has its default value. To create a header, set the fields that the frame uses,
    /// and copy all other fields from this constant.
    pub const EMPTY: Self = Self {
        kind: FrameKind::Goodbye,
        group: 0,
        sequence: 0,
        contract: Contract::NONE,
        step: 0,
        offset: 0,
        eager: false,
        payload_bytes: 0,
        payload_crc: None,
    };

    /// Encodes the header. The last four bytes of the header are the checksum.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let Contract { operation, dtype, reduction, algorithm, root, count, layout } = self.contract;
        let mut flags = if self.payload_crc.is_some() { FLAG_PAYLOAD_CRC } else { 0 };
        flags |= if self.eager { FLAG_EAGER } else { 0 };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&MAGIC);
        bytes[2] = self.kind as u8;
        bytes[3] = flags;
        bytes[4] = operation.to_byte();
        bytes[5] = dtype.to_byte();
        bytes[6] = reduction.map_or(0, ReduceOp::to_byte);
        bytes[7] = algorithm.to_byte();
        bytes[8..12].copy_from_slice(&self.group.to_le_bytes());
        bytes[12..16].copy_from_slice(&root.get().to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&count.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.payload_crc.unwrap_or(0).to_le_bytes());
        bytes[48..52].copy_from_slice(&layout.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.step.to_le_bytes());
        let crc = crate::wire::crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// [`HeaderError`] if the bytes are corrupt, a field has an unknown value, or the payload's length is above its
    /// limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let (body, crc) = bytes.split_at(HEADER_BYTES - 4);
        let found = u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]]);
        let expected = crate::wire::crc32c(body);
        if found != expected {
            return Err(HeaderError::Corrupt { found, expected });
        }
        let mut reader = Reader(body);
        Self::read(&mut reader)
            .unwrap_or(Err(HeaderError::Unknown { field: "size", value: body.len() as u64 }))
    }

    /// Reads the fields of a header in their order. Returns `None` only if `reader` has too few bytes for all fields.
    fn read(reader: &mut Reader<'_>) -> Option<Result<Self, HeaderError>> {
        let magic: [u8; 2] = reader.array()?;
        let [kind, flags, operation, dtype, reduction, algorithm] = reader.array()?;
        let group = reader.u32()?;
        let root = Rank::new(reader.u32()?);
        let (sequence, count, offset) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (payload_bytes, payload_crc) = (reader.u32()?, reader.u32()?);
        let (layout, step) = (reader.u32()?, reader.u32()?);
        let unknown = |field, value: u8| HeaderError::Unknown { field, value: value.into() };
        let read = || {
            if magic != MAGIC {
                return Err(HeaderError::Unknown {
                    field: "first bytes",
                    value: u16::from_le_bytes(magic).into(),
                });
            }
            let kind = FrameKind::from_byte(kind).ok_or(unknown("kind", kind))?;
            if flags & !(FLAG_PAYLOAD_CRC | FLAG_EAGER) != 0 {
                return Err(unknown("flags", flags));
            }
            let limit = kind.payload_bytes_max();
            if payload_bytes as usize > limit {
                return Err(HeaderError::TooLong { claimed: payload_bytes, limit });
            }
            let contract = Contract {
                operation: Operation::from_byte(operation).ok_or(unknown("operation", operation))?,
                dtype: DType::from_byte(dtype).ok_or(unknown("element type", dtype))?,
                reduction: match reduction {
                    0 => None,
                    byte => Some(ReduceOp::from_byte(byte).ok_or(unknown("reduction", byte))?),
                },
                algorithm: Algorithm::from_byte(algorithm).ok_or(unknown("algorithm", algorithm))?,
                root,
                count,
                layout,
            };
            let payload_crc = (flags & FLAG_PAYLOAD_CRC != 0).then_some(payload_crc);
            let eager = flags & FLAG_EAGER != 0;
            Ok(Self { kind, group, sequence, contract, step, offset, eager, payload_bytes, payload_crc })
        };
        Some(read())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates contracts.
    pub(crate) fn contracts() -> impl Strategy<Value = Contract> {
        (
            0..Operation::ALL.len(),
            0..DType::ALL.len(),
            proptest::option::of(0..ReduceOp::ALL.len()),
            0..Algorithm::ALL.len(),
            any::<u32>(),
            any::<u64>(),
            any::<u32>(),
        )
            .prop_map(|(operation, dtype, reduction, algorithm, root, count, layout)| Contract {
                operation: Operation::ALL[operation],
                dtype: DType::ALL[dtype],
                reduction: reduction.map(|index| ReduceOp::ALL[index]),
                algorithm: Algorithm::ALL[algorithm],
                root: Rank::new(root),
                count,
                layout,
            })
    }

    fn headers() -> impl Strategy<Value = FrameHeader> {
        (
            (1..=7u8, any::<u32>(), any::<u64>()),
            contracts(),
            (any::<u32>(), any::<u64>(), any::<bool>()),
            0..=CONTROL_BYTES_MAX as u32,
            any::<Option<u32>>(),
        )
            .prop_map(
                |((kind, group, sequence), contract, (step, offset, eager), payload, payload_crc)| {
                    let kind = FrameKind::from_byte(kind).unwrap();
                    let payload_bytes = payload.min(kind.payload_bytes_max() as u32);
                    FrameHeader {
                        kind,
                        group,
                        sequence,
                        contract,
                        step,
                        offset,
                        eager,
                        payload_bytes,
                        payload_crc,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn a_decoded_header_equals_the_encoded_one(header in headers()) {
            prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_is_detected(header in headers(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_corrupt = matches!(FrameHeader::decode(&bytes), Err(HeaderError::Corrupt { .. }));
            prop_assert!(is_corrupt);
        }

        #[test]
        fn decoding_any_bytes_does_not_panic(mut bytes in proptest::array::uniform32(any::<u8>())
            .prop_flat_map(|a| proptest::array::uniform32(any::<u8>()).prop_map(move |b| {
                let mut bytes = [0; HEADER_BYTES];
                bytes[..32].copy_from_slice(&a);
                bytes[32..].copy_from_slice(&b);
                bytes
            }))) {
            let crc = crate::wire::crc32c(&bytes[..60]);
            bytes[60..].copy_from_slice(&crc.to_le_bytes());
            let _ = FrameHeader::decode(&bytes);
        }
    }

    #[test]
    fn a_payload_above_the_limit_of_its_kind_is_an_error() {
        let contract = Contract {
            operation: Operation::AllReduce,
            dtype: DType::F32,
            reduction: Some(ReduceOp::Sum),
            algorithm: Algorithm::Ring,
            root: Rank::ZERO,
            count: u64::MAX,
            layout: 0,
        };
        let mut header = FrameHeader {
            kind: FrameKind::Abort,
            group: 0,
            sequence: 0,
            contract,
            step: 0,
            offset: 0,
            eager: false,
            payload_bytes: CONTROL_BYTES_MAX as u32 + 1,
            payload_crc: None,
        };
        assert!(matches!(FrameHeader::decode(&header.encode()), Err(HeaderError::TooLong { .. })));
        header.kind = FrameKind::Data;
        assert!(FrameHeader::decode(&header.encode()).is_ok());
    }
}
