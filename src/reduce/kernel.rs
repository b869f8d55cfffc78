//! Kernels, which reduce one slice into another. A kernel is a built-in loop, or calls a function that the user passed.

use std::fmt;
use std::sync::Arc;

use crate::simd::VectorWidth;
use crate::types::Element;

/// A built-in loop. The slices hold the bytes of elements.
type KernelFn = fn(width: VectorWidth, accumulator: &mut [u8], input: &[u8], average_divisor: u32);
/// A loop that calls a function of the user.
type CustomFn = dyn Fn(&mut [u8], &[u8], InputSide) + Send + Sync;

/// Whether `input` is the left or the right operand of the reduction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InputSide {
    Left,
    Right,
}

/// A function that reduces one slice of bytes into another.
#[derive(Clone)]
pub struct Kernel {
    kind: KernelKind,
    /// The number by which a kernel that ends an average divides each result.
    average_divisor: u32,
}

#[derive(Clone)]
enum KernelKind {
    BuiltIn(VectorWidth, KernelFn),
    Custom(Arc<CustomFn>),
}

impl Kernel {
    pub(super) fn built_in(width: VectorWidth, run: KernelFn) -> Self {
        Self { kind: KernelKind::BuiltIn(width, run), average_divisor: 1 }
    }

    /// Reduces `input` into `accumulator`, with `input` as the left operand. Both slices contain complete, aligned
    /// elements of the kernel's element type.
    ///
    /// # Panics
    ///
    /// If the lengths of the slices differ, if they are not aligned for the element type, or if the user's function
    /// panics.
    pub fn apply(&self, accumulator: &mut [u8], input: &[u8]) {
        match &self.kind {
            KernelKind::BuiltIn(width, run) => run(*width, accumulator, input, self.average_divisor),
            KernelKind::Custom(function) => function(accumulator, input, InputSide::Left),
        }
    }

    /// Reduces `input` into `accumulator` as [`Kernel::apply`] does, but with `input` as the right operand. The side
    /// of `input` matters only for a function that the user passed, because the built-in reductions commute.
    ///
    /// # Panics
    ///
    /// In the same cases as [`Kernel::apply`].
    pub fn apply_as_right_operand(&self, accumulator: &mut [u8], input: &[u8]) {
        match &self.kind {
            KernelKind::BuiltIn(width, run) => run(*width, accumulator, input, self.average_divisor),
            KernelKind::Custom(function) => function(accumulator, input, InputSide::Right),
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            KernelKind::BuiltIn(..) => "Kernel::BuiltIn",
            KernelKind::Custom(_) => "Kernel::Custom",
        })
    }
}

/// The two kernels that a reduction of one element type needs.
#[derive(Clone, Debug)]
pub struct Kernels {
    /// The kernel for every contribution except the last.
    pub reduce: Kernel,
    /// The kernel for the last contribution. For an average, this kernel also divides the result by the number of
    /// [`Kernels::of_contributions`].
    pub reduce_last: Kernel,
}

impl Kernels {
    /// Returns the kernels of a reduction of `count` contributions. An average is divided by this number.
    #[must_use]
    pub fn of_contributions(mut self, count: u32) -> Self {
        self.reduce_last.average_divisor = count;
        self
    }

    /// Returns the same kernels, but `reduce_last` does not divide. If an average is computed in several reductions, all
    /// reductions except the last use these kernels.
    #[must_use]
    pub fn without_division(&self) -> Self {
        Self { reduce: self.reduce.clone(), reduce_last: self.reduce.clone() }
    }

    /// Returns kernels that call the function `f`: `accumulator = f(input, accumulator)`, element by element.
    ///
    /// `input` holds the arriving data and `accumulator` this rank's data. In a chain of ranks, the arriving data
    /// come from the lower ranks, so `f` reduces in rank order. `f` must be associative, and need not be commutative.
    /// `reduce` and `reduce_last` are the same kernel, which does not divide.
    ///
    /// # Panics
    ///
    /// This function does not panic. [`Kernel::apply`] describes when the kernels panic.
    pub fn custom<T: Element>(f: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Self {
        let function: Arc<CustomFn> = Arc::new(move |accumulator: &mut [u8], input: &[u8], side| {
            assert_eq!(accumulator.len(), input.len(), "both slices of a kernel must have the same length");
            let accumulator: &mut [T] = bytemuck::cast_slice_mut(accumulator);
            for (own, arrived) in accumulator.iter_mut().zip(bytemuck::cast_slice(input)) {
                *own = if side == InputSide::Left { f(arrived, own) } else { f(own, arrived) };
            }
        });
        let kernel = Kernel { kind: KernelKind::Custom(function), average_divisor: 1 };
        Self { reduce: kernel.clone(), reduce_last: kernel }
    }
}
