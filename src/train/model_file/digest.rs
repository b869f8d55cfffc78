//! The checksum in a model file. The metadata of checkpoints uses the same checksum.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// A tensor of f32 numbers in a model file.
#[derive(Debug)]
pub(crate) struct StoredTensor<'a> {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
}

/// Returns the SHA-256, in hexadecimal, of the description and of all tensors. The digest does not depend on the order
/// of `tensors`.
pub(crate) fn content_digest(description: &str, tensors: &[StoredTensor<'_>]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(description);
    hasher.update("\n");
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    for StoredTensor { name, shape, bytes } in sorted {
        let lengths: Vec<String> = shape.iter().map(usize::to_string).collect();
        hasher.update(format!("{name} F32 {}\n", lengths.join("x")));
        hasher.update(bytes);
    }
    let digest: [u8; 32] = hasher.finalize().into();
    digest.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string succeeds");
        text
    })
}
