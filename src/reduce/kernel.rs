//! Kernels, which reduce one segment into another: built-in loops or functions of the caller.

use std::fmt;
use std::sync::Arc;

use crate::types::Element;

type KernelFn = fn(accumulator: &mut [u8], input: &[u8], divisor: u32);
type Function = dyn Fn(&mut [u8], &[u8], FunctionSide) + Send + Sync;

/// Which operand the input is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FunctionSide {
    Left,
    Right,
}

/// Reduces one slice of bytes into another.
#[derive(Clone)]
pub struct Kernel(KernelKind);

#[derive(Clone)]
enum KernelKind {
    Plain(KernelFn),
    Custom(Arc<Function>),
}

impl Kernel {
    pub(super) fn plain(run: KernelFn) -> Self {
        Self(KernelKind::Plain(run))
    }

    /// Reduces `input` into `accumulator`: two slices of the same length in bytes, both holding whole, aligned
    /// elements of the type the kernel was chosen for. If the kernel is the last one of an average, `divisor` divides
    /// the result.
    ///
    /// # Panics
    ///
    /// If the slices' lengths differ, if they are not aligned for the element type, or if a function of the caller
    /// panics.
    pub fn apply(&self, accumulator: &mut [u8], input: &[u8], divisor: u32) {
        match &self.0 {
            KernelKind::Plain(run) => run(accumulator, input, divisor),
            KernelKind::Custom(function) => function(accumulator, input, FunctionSide::Left),
        }
    }

    /// The same with the input as the right operand. This makes a difference only for a function of the caller.
    ///
    /// # Panics
    ///
    /// As [`Kernel::apply`].
    pub fn apply_after(&self, accumulator: &mut [u8], input: &[u8], divisor: u32) {
        match &self.0 {
            KernelKind::Plain(run) => run(accumulator, input, divisor),
            KernelKind::Custom(function) => function(accumulator, input, FunctionSide::Right),
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            KernelKind::Plain(_) => "Kernel::Plain",
            KernelKind::Custom(_) => "Kernel::Custom",
        })
    }
}

/// The two kernels that a reduction of one element type needs.
#[derive(Clone, Debug)]
pub struct Kernels {
    /// The kernel for every contribution but the last.
    pub reduce: Kernel,
    /// The kernel for the last contribution: an average divides here.
    pub reduce_last: Kernel,
}

impl Kernels {
    /// The same kernels for contributions none of which is the last one.
    #[must_use]
    pub fn without_end(&self) -> Self {
        Self { reduce: self.reduce.clone(), reduce_last: self.reduce.clone() }
    }

    /// The kernels of a function of the caller: `accumulator = f(input, accumulator)`, element by element.
    ///
    /// The data that has arrived is the left operand and this rank's data the right one: if a chain of ranks reduces
    /// in rank order, the arriving data comes from the ranks before this one. A function that is associative but not
    /// commutative then gives the reduction in rank order. Both kernels are the same; there is no division at the
    /// end.
    ///
    /// # Panics
    ///
    /// The kernels panic as described at [`Kernel::apply`].
    pub fn custom<T: Element>(f: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Self {
        let function: Arc<Function> = Arc::new(move |accumulator: &mut [u8], input: &[u8], side| {
            assert_eq!(accumulator.len(), input.len(), "a kernel's slices have the same length");
            let accumulator: &mut [T] = bytemuck::cast_slice_mut(accumulator);
            for (own, arrived) in accumulator.iter_mut().zip(bytemuck::cast_slice(input)) {
                *own = if side == FunctionSide::Left { f(arrived, own) } else { f(own, arrived) };
            }
        });
        let kernel = Kernel(KernelKind::Custom(function));
        Self { reduce: kernel.clone(), reduce_last: kernel }
    }
}
