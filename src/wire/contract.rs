//! Encodes a [`Contract`] (the arguments of a collective call that must be the same on all ranks): as 64-bit words, which
//! ranks exchange in shared memory, and as bytes, which are a part of the payload of a cause.

use super::reader::Reader;
use crate::types::{Algorithm, Contract, DType, Operation, Rank, ReduceOp};

/// The number of 64-bit words of an encoded contract.
pub const CONTRACT_WORDS: usize = 4;

/// Encodes a contract. Two contracts are equal if and only if their words are equal.
pub fn contract_to_words(contract: &Contract) -> [u64; CONTRACT_WORDS] {
    let Contract { operation, dtype, reduction, algorithm, root, count, layout } = *contract;
    let reduction = reduction.map_or(0, ReduceOp::to_byte);
    let codes = [operation.to_byte(), dtype.to_byte(), reduction, algorithm.to_byte(), 0, 0, 0, 0];
    [u64::from_le_bytes(codes), u64::from(root.get()), count, u64::from(layout)]
}

/// Decodes the contract in the first [`CONTRACT_WORDS`] words. Returns `None` if these words are not a valid
/// contract.
pub fn contract_from_words(words: &[u64]) -> Option<Contract> {
    let &[codes, root, count, layout] = words.first_chunk::<CONTRACT_WORDS>()?;
    let [operation, dtype, reduction, algorithm, 0, 0, 0, 0] = codes.to_le_bytes() else { return None };
    Some(Contract {
        operation: Operation::from_byte(operation)?,
        dtype: DType::from_byte(dtype)?,
        reduction: if reduction == 0 { None } else { Some(ReduceOp::from_byte(reduction)?) },
        algorithm: Algorithm::from_byte(algorithm)?,
        root: Rank::new(u32::try_from(root).ok()?),
        count,
        layout: u32::try_from(layout).ok()?,
    })
}

/// Appends the encoding of a contract in the payload of a cause.
pub(super) fn put_contract(out: &mut Vec<u8>, contract: &Contract) {
    out.push(contract.operation.to_byte());
    out.push(contract.dtype.to_byte());
    out.push(contract.reduction.map_or(0, ReduceOp::to_byte));
    out.push(contract.algorithm.to_byte());
    out.extend_from_slice(&contract.root.get().to_le_bytes());
    out.extend_from_slice(&contract.count.to_le_bytes());
    out.extend_from_slice(&contract.layout.to_le_bytes());
}

/// Reads a contract that [`put_contract`] has written.
pub(super) fn read_contract(reader: &mut Reader<'_>) -> Option<Contract> {
    let [operation, dtype, reduction, algorithm] = reader.array()?;
    Some(Contract {
        operation: Operation::from_byte(operation)?,
        dtype: DType::from_byte(dtype)?,
        reduction: if reduction == 0 { None } else { Some(ReduceOp::from_byte(reduction)?) },
        algorithm: Algorithm::from_byte(algorithm)?,
        root: Rank::new(reader.u32()?),
        count: reader.u64()?,
        layout: reader.u32()?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::frame::tests::contracts;

    proptest! {
        #[test]
        fn a_decoded_contract_equals_the_encoded_one(contract in contracts()) {
            prop_assert_eq!(contract_from_words(&contract_to_words(&contract)), Some(contract));
        }

        #[test]
        fn a_contract_decoded_from_any_words_has_the_same_encoding(words in prop::collection::vec(any::<u64>(), 0..8)) {
            if let Some(contract) = contract_from_words(&words) {
                prop_assert_eq!(&contract_to_words(&contract)[..], &words[..CONTRACT_WORDS]);
            }
        }
    }
}
