//! How a collective reduces elements: with a [`ReduceOp`], also compressed, with a function of the caller, or as a scaled sum.

use std::ops::Mul;

use super::Error;
use super::call::Call;
use super::compressor::Compressor;
use crate::reduce::Kernels;
use crate::runtime::deferred_drop::UserValue;
use crate::types::{Algorithm, Element, Operation, ReduceOp};

/// Reduces elements of type `T`: a [`ReduceOp`], a function of the caller ([`function`]) or a scaled sum ([`scaled_sum`]).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reduction of elements of type `{T}`",
    note = "pass a `ReduceOp`, or your own function as `verbs::function(...)`",
    note = "a function and a factor have the element type of the buffer; a compressed all-reduce takes `f32`"
)]
pub trait Reducer<T: Element> {
    #[doc(hidden)]
    fn set_reduction(&self, call: &mut Call) -> Result<(), Error>;

    /// Returns the built-in reduction, if the reducer does nothing else.
    #[doc(hidden)]
    #[inline]
    fn built_in(&self) -> Option<ReduceOp> {
        None
    }

    /// Changes the input before the call begins.
    #[doc(hidden)]
    fn prepare(&self, _input: &mut [T]) {}
}

/// A reduction with a function of the caller; see [`function`].
#[derive(Clone)]
pub struct Function<T> {
    kernels: Kernels,
    element: std::marker::PhantomData<fn(T) -> T>,
}

/// A sum that multiplies the elements of this rank by a factor; see [`scaled_sum`].
#[derive(Clone, Copy, Debug)]
pub struct ScaledSum<T>(T);

/// A built-in reduction of `f32` that sends compressed elements; see
/// [`AllReduce::compressed`](super::verbs::AllReduce::compressed).
#[derive(Clone, Debug)]
pub struct Compressed {
    pub(super) op: ReduceOp,
    pub(super) compressor: Compressor,
}

/// Returns a reduction with a function of the caller, which must be associative. It must commute only in a reduce-scatter, which
/// reduces each part in a different order. The other verbs call it in rank order, as `function(lower ranks, higher ranks)`.
///
/// An all-reduce with a function uses a pipelined chain through all ranks and back: 2(n-1) hops, and up to 2S bytes per rank.
///
/// ```
/// use ringtrain::Group;
/// use ringtrain::verbs::{AllReduce, function};
///
/// let mut group = Group::from_environment()?;
/// let mut longest = vec![3u32, 5];
/// group.call(AllReduce::new(function(|a: &u32, b: &u32| *a.max(b)))).run(&mut longest)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn function<T: Element>(function: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Function<T> {
    let function = UserValue::new(function);
    let kernels = Kernels::custom(move |lower: &T, higher: &T| function(lower, higher));
    Function { kernels, element: std::marker::PhantomData }
}

/// Returns a sum that first multiplies each element of this rank by `factor` (`ncclRedOpCreatePreMulSum` in NCCL).
///
/// ```
/// use ringtrain::Group;
/// use ringtrain::verbs::{AllReduce, scaled_sum};
///
/// let mut group = Group::solo();
/// let mut gradients = [2.0f32, 4.0];
/// group.call(AllReduce::new(scaled_sum(0.5))).run(&mut gradients)?;
/// assert_eq!(gradients, [1.0, 2.0]);
/// # Ok::<(), ringtrain::Error>(())
/// ```
pub fn scaled_sum<T: Element + Mul<Output = T>>(factor: T) -> ScaledSum<T> {
    ScaledSum(factor)
}

impl<T: Element> Reducer<T> for ReduceOp {
    fn set_reduction(&self, call: &mut Call) -> Result<(), Error> {
        call.set_built_in(*self)
    }

    #[inline]
    fn built_in(&self) -> Option<ReduceOp> {
        Some(*self)
    }
}

impl<T: Element> Reducer<T> for Function<T> {
    fn set_reduction(&self, call: &mut Call) -> Result<(), Error> {
        let contract = &mut call.request.contract;
        contract.reduction = Some(ReduceOp::Custom);
        call.kernels = Some(self.kernels.clone());
        // Scans always reduce in rank order. A reduce-scatter cannot.
        call.in_rank_order = matches!(contract.operation, Operation::AllReduce | Operation::Reduce);
        if call.in_rank_order && !call.uses_shared_memory {
            contract.algorithm = Algorithm::Chain;
        }
        Ok(())
    }
}

impl<T: Element + Mul<Output = T>> Reducer<T> for ScaledSum<T> {
    fn set_reduction(&self, call: &mut Call) -> Result<(), Error> {
        call.set_built_in(ReduceOp::PreMulSum)
    }

    fn prepare(&self, input: &mut [T]) {
        for element in input {
            *element = *element * self.0;
        }
    }
}

impl Reducer<f32> for Compressed {
    fn set_reduction(&self, call: &mut Call) -> Result<(), Error> {
        call.set_built_in(self.op)?;
        call.set_compressor(&self.compressor)
    }
}
