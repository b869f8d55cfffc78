//! Copies that use the caches of the processors well.
//!
//! A processor that writes a part of a cache line first reads the line from memory. A result that is longer than the caches
//! is not in them when the program reads it, so a copy that writes past the caches moves only two thirds of the bytes. The C
//! library does the same only for very long copies, and on virtual machines it often does not know the size of the caches.

use std::ptr::{self, NonNull};

/// The length in bytes from which on the buffers of all ranks of a host together are longer than their caches (ADR 79).
const CACHE_BYTES: usize = 16 << 20;
/// The length of a cache line of most processors.
const LINE_BYTES: usize = 64;
/// The number of bytes that [`copy_from_peer`] copies at a time.
const CHUNK_BYTES: usize = 256;

/// Returns whether buffers with `all_bytes` bytes together are written past the caches.
pub fn exceeds_caches(all_bytes: usize) -> bool {
    all_bytes >= CACHE_BYTES
}

/// Copies `source` to `target`, a part of a buffer. The buffers of all ranks of this host that take part have `all_bytes` bytes
/// together. Writes past the caches if they are longer than the caches. Panics if the two slices have different lengths.
pub fn copy_to_buffer(target: &mut [u8], source: &[u8], all_bytes: usize) {
    assert_eq!(target.len(), source.len(), "the slices have the same length");
    if exceeds_caches(all_bytes) {
        // SAFETY: both slices have the same length, and a `&mut` slice overlaps no other.
        unsafe { copy_past_caches(NonNull::from(source).cast(), target) };
    } else {
        // SAFETY: as above.
        unsafe { copy_from_peer(NonNull::from(source).cast(), target) };
    }
}

/// Fills `target` with the bytes from `source` on. Copies a few lines at a time: for a long copy, the C library may use a single
/// instruction (`rep movsb`), which takes up to twice as long if the lines are in the cache of another processor (ADR 104).
///
/// # Safety
///
/// The same as for [`copy_past_caches`].
pub(super) unsafe fn copy_from_peer(source: NonNull<u8>, target: &mut [u8]) {
    // All chunks but the first one begin at a cache line of the target.
    let first = target.len().min(CHUNK_BYTES - target.as_ptr().addr() % LINE_BYTES);
    let (first, rest) = target.split_at_mut(first);
    let mut source = source.as_ptr().cast_const();
    for chunk in std::iter::once(first).chain(rest.chunks_mut(CHUNK_BYTES)) {
        // SAFETY: the caller guarantees that the bytes are readable and do not overlap the target.
        unsafe {
            ptr::copy_nonoverlapping(source, chunk.as_mut_ptr(), chunk.len());
            source = source.add(chunk.len());
        }
    }
}

/// Fills `target` with the bytes from `source` on, and writes past the caches. Others see the bytes in program order.
///
/// # Safety
///
/// As many bytes as `target` has must be readable at `source`, and must not overlap `target`. Another process may change them
/// meanwhile; then the content of `target` is unspecified.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy_past_caches(source: NonNull<u8>, target: &mut [u8]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    let head = target.as_ptr().align_offset(LINE_BYTES).min(target.len());
    let lines_end = head + (target.len() - head) / LINE_BYTES * LINE_BYTES;
    let (source, length) = (source.as_ptr(), target.len());
    let target = target.as_mut_ptr();
    // SAFETY: all offsets are below `length`, so the caller guarantees that both addresses are valid. The lines of the target are
    // aligned. Every x86-64 processor has these instructions.
    unsafe {
        ptr::copy_nonoverlapping(source, target, head);
        for offset in (head..lines_end).step_by(16) {
            let bytes = _mm_loadu_si128(source.add(offset).cast());
            _mm_stream_si128(target.add(offset).cast(), bytes);
        }
        ptr::copy_nonoverlapping(source.add(lines_end), target.add(lines_end), length - lines_end);
        // Orders the stores above before all later stores.
        _mm_sfence();
    }
}

/// The same for other processors, where the copy does not write past the caches.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy_past_caches(source: NonNull<u8>, target: &mut [u8]) {
    // SAFETY: the caller guarantees that the bytes are readable and do not overlap.
    unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target.as_mut_ptr(), target.len()) }
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
