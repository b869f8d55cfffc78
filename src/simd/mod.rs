//! Compiles a loop for several vector units, and runs the one for the widest vector unit of the processor.
//!
//! All of them give the same bits: the compiler neither changes the order of additions of floats nor fuses a multiplication
//! and an addition.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all functions that it calls are inlined"
)]

mod half_floats;

pub use self::half_floats::HalfFloat;

/// A loop with its arguments. `run` and all functions that it calls must be `#[inline(always)]`.
pub trait VectorLoop {
    /// The result of the loop.
    type Output;

    /// Runs the loop.
    fn run(self) -> Self::Output;
}

/// The vector instructions with which a loop runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VectorWidth(Instructions);

/// Sets of vector instructions, from the narrowest to the widest. A value of a [`VectorWidth`] exists only if this processor has
/// the instructions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Instructions {
    /// The instructions that every processor of this architecture has.
    Portable,
    /// AVX2, with 256 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512, with 512 bits.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl VectorWidth {
    /// Returns the widest vector unit of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 {
                return Self(Instructions::Avx512);
            }
            if is_x86_feature_detected!("avx2") {
                return Self(Instructions::Avx2);
            }
        }
        Self(Instructions::Portable)
    }

    /// Returns all vector units of this processor, the portable instructions first.
    #[cfg(test)]
    pub fn all_supported() -> Vec<Self> {
        let all = [
            Instructions::Portable,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512,
        ];
        // Every processor with AVX-512 has AVX2.
        all.into_iter().filter(|&instructions| instructions <= Self::detect().0).map(Self).collect()
    }

    /// Runs a loop that is compiled for this vector unit.
    #[inline]
    pub fn run<L: VectorLoop>(self, vector_loop: L) -> L::Output {
        match self.0 {
            Instructions::Portable => vector_loop.run(),
            // SAFETY: `detect` or `all_supported` has found AVX2 or AVX-512 on this processor, and every processor with
            // AVX-512 has AVX2.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { run_compiled_for_avx2(vector_loop) },
            // SAFETY: `detect` or `all_supported` has found AVX-512 on this processor.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { run_compiled_for_avx512(vector_loop) },
        }
    }
}

/// Returns the highest bit of each byte. Bit `i` of the result is that of byte `i`.
#[inline(always)]
pub fn highest_bits(bytes: [u8; 32]) -> u32 {
    // The compiler does not use this instruction for the portable loop.
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_movemask_epi8};
        let [low, high]: [__m128i; 2] = bytemuck::cast(bytes);
        // SAFETY: every x86-64 processor has SSE2.
        let (low, high) = unsafe { (_mm_movemask_epi8(low), _mm_movemask_epi8(high)) };
        low as u32 | (high as u32) << 16
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        bytes.iter().enumerate().fold(0, |bits, (i, byte)| bits | u32::from(byte >> 7) << i)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_compiled_for_avx2<L: VectorLoop>(vector_loop: L) -> L::Output {
    vector_loop.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn run_compiled_for_avx512<L: VectorLoop>(vector_loop: L) -> L::Output {
    vector_loop.run()
}
