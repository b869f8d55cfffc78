//! The checksum of a model file.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// Returns the SHA-256, in hexadecimal, of the description and of all tensors. Each tensor is a name, a shape and bytes. The
/// order of `tensors` does not matter.
pub(crate) fn content_digest(description: &str, tensors: &[(String, Vec<usize>, &[u8])]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(description);
    hasher.update("\n");
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, shape, bytes) in sorted {
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
