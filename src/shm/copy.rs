//! Copies that leave the content of the processor's caches alone.
//!
//! A processor that writes a part of a cache line first reads the line from memory. A result that is longer than the caches
//! is not in them when the program reads it, so it is a waste to read the old lines: a copy that writes past the caches moves
//! two thirds of the bytes. The C library does the same, but only for copies that are themselves very long, and on virtual
//! machines it often does not know the size of the caches.

/// The length in bytes from which on the buffers of all ranks of a host together are longer than their caches. ADR 79 has the
/// measurements.
const CACHE_BYTES: usize = 16 << 20;

/// Returns whether buffers with `all_bytes` bytes together are written past the caches.
pub fn exceeds_caches(all_bytes: usize) -> bool {
    all_bytes >= CACHE_BYTES
}

/// Copies `source` to `target`, a part of a buffer. The buffers of all ranks of this host that take part have `all_bytes` bytes
/// together. Writes past the caches if they are longer than the caches.
///
/// # Panics
///
/// If the two slices have different lengths.
pub fn copy_to_buffer(target: &mut [u8], source: &[u8], all_bytes: usize) {
    if exceeds_caches(all_bytes) {
        copy_past_caches(target, source);
    } else {
        target.copy_from_slice(source);
    }
}

/// Copies `source` to `target` and writes past the caches. Other threads see the bytes in the order of the program, as after a
/// plain copy.
#[cfg(target_arch = "x86_64")]
pub(super) fn copy_past_caches(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE_BYTES: usize = 64;
    assert_eq!(target.len(), source.len(), "the slices have the same length");
    let head = target.as_ptr().align_offset(LINE_BYTES).min(target.len());
    let (target_head, target) = target.split_at_mut(head);
    let (source_head, source) = source.split_at(head);
    target_head.copy_from_slice(source_head);
    let (target_lines, target_tail) = target.as_chunks_mut::<LINE_BYTES>();
    let (source_lines, source_tail) = source.as_chunks::<LINE_BYTES>();
    for (target, source) in target_lines.iter_mut().zip(source_lines) {
        let (target, source) = (target.as_mut_ptr(), source.as_ptr());
        for offset in (0..LINE_BYTES).step_by(16) {
            // SAFETY: the 16 bytes from `offset` on are inside both lines, and the target's line is aligned. Every x86-64
            // processor has these instructions.
            unsafe {
                let bytes = _mm_loadu_si128(source.add(offset).cast());
                _mm_stream_si128(target.add(offset).cast(), bytes);
            }
        }
    }
    target_tail.copy_from_slice(source_tail);
    // SAFETY: every x86-64 processor has this instruction. It orders the stores above before all later stores.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn copy_past_caches(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_copies_copy_every_byte_and_no_other() {
        let source: Vec<u8> = (0..1000u32).map(|index| (index % 251) as u8 + 1).collect();
        for all_bytes in [0, CACHE_BYTES] {
            for (start, length) in
                [(0, 0), (0, 1), (1, 63), (3, 64), (64, 128), (5, 700), (63, 129), (17, 983)]
            {
                let mut target = vec![0; 1000];
                copy_to_buffer(&mut target[start..start + length], &source[start..start + length], all_bytes);
                let expected =
                    |index: usize| if (start..start + length).contains(&index) { source[index] } else { 0 };
                assert!(
                    (0..1000).all(|index| target[index] == expected(index)),
                    "{start} {length} {all_bytes}"
                );
            }
        }
    }
}
