//! The verbs of collectives, which [`Group::call`](super::Group::call) takes. A method of [`Collective`] runs them.
//!
//! | verb | input of a rank | result of a rank | in place |
//! |---|---|---|---|
//! | [`AllReduce`] | the buffer | the reduction of all buffers | replaces the buffer |
//! | [`Reduce`] | the buffer | on the root: the reduction of all buffers | replaces the root's buffer |
//! | [`ReduceScatter`] | the buffer | the rank's part of the reduction | replaces the rank's part of the buffer |
//! | [`Scan`], [`Exscan`] | the buffer | the reduction up to this rank, or of the lower ranks | replaces the buffer |
//! | [`AllGather`] | the rank's part | the parts of all ranks | the rank's part is in its place in the buffer |
//! | [`Gather`] | the rank's part | on the root: the parts of all ranks | the rank's part is in its place in the buffer |
//! | [`Broadcast`] | on the root: the buffer | the root's buffer | replaces the buffers of the other ranks |
//! | [`Scatter`] | on the root: all parts | the rank's part | goes to its place in the buffer |
//! | [`AllToAll`] | one part for each rank | one part of each rank | replaces the buffer |
//!
//! The rank's part of a buffer is [`Group::chunk`](super::Group::chunk), or has the length in `counts`. Combinations that have
//! no meaning do not compile. For example, a broadcast into a new vector needs a count, because only the root has an input:
//!
//! ```compile_fail
//! # use ringtrain::{Group, Rank, verbs::Broadcast};
//! # let mut group = Group::solo();
//! group.call(Broadcast::from(Rank::ZERO)).run_from(&[1.0f32]);
//! ```
//!
//! An exchange of uneven parts has an output of another length than the input, so it does not work in place:
//!
//! ```compile_fail
//! # use ringtrain::{Group, verbs::AllToAll};
//! # let mut group = Group::solo();
//! group.call(AllToAll::new().counts(&[1], &[1])).run(&mut [1.0f32]);
//! ```
//!
//! Only `f32` can be compressed:
//!
//! ```compile_fail
//! # use ringtrain::{Compression, Group, ReduceOp, verbs::AllReduce};
//! # let mut group = Group::solo();
//! group.call(AllReduce::new(ReduceOp::Sum).compressed(Compression::Bf16)).run(&mut [1.0f64]);
//! ```
//!
//! A function has the element type of the buffer:
//!
//! ```compile_fail
//! # use ringtrain::{Group, verbs::{AllReduce, function}};
//! # let mut group = Group::solo();
//! group.call(AllReduce::new(function(|a: &u32, b: &u32| a + b))).run(&mut [1u64]);
//! ```

use crate::types::{Rank, ReduceOp};

pub use super::collective::Collective;
use super::compressor::Compressor;
pub use super::plan::{InPlace, OutOfPlace};
pub use super::reducers::{Compressed, Function, Reducer, ScaledSum, function, scaled_sum};

macro_rules! reducing_verbs {
    ($($(#[$docs:meta])* $verb:ident;)+) => { $(
        $(#[$docs])*
        #[derive(Clone, Debug)]
        #[must_use = "pass the verb to `Group::call`"]
        pub struct $verb<R> {
            pub(super) reducer: R,
        }

        impl<R> $verb<R> {
            /// Creates the verb with a [`Reducer`].
            pub fn new(reducer: R) -> Self {
                Self { reducer }
            }
        }
    )+ };
}

reducing_verbs! {
    /// Every rank gets the reduction of all ranks' buffers; see [`Group::all_reduce`](super::Group::all_reduce).
    ///
    /// ```
    /// use ringtrain::verbs::AllReduce;
    /// use ringtrain::{Compression, Group, ReduceOp};
    ///
    /// let mut group = Group::solo();
    /// let input = [1.0f32, 2.0];
    /// let sum = group.call(AllReduce::new(ReduceOp::Sum)).run_from(&input)?;
    /// assert_eq!(sum, [1.0, 2.0]);
    /// // An asynchronous all-reduce owns its buffer. This one sends `bf16`.
    /// let verb = AllReduce::new(ReduceOp::Average).compressed(Compression::Bf16);
    /// let handle = group.call(verb).start(sum)?;
    /// println!("{:?}", handle.wait()?);
    /// # Ok::<(), ringtrain::Error>(())
    /// ```
    AllReduce;
    /// Each rank gets the reduction of the buffers up to and including its own; see [`Group::scan`](super::Group::scan).
    Scan;
    /// Each rank gets the reduction of the buffers of all lower ranks. Rank 0 has no result: it gets an empty vector, and its
    /// buffer or output does not change. [`ReduceOp::Average`] is not defined.
    ///
    /// ```
    /// use ringtrain::verbs::Exscan;
    /// use ringtrain::{Group, ReduceOp};
    ///
    /// let mut group = Group::from_environment()?;
    /// let mut first_sample = [0u64];
    /// group.call(Exscan::new(ReduceOp::Sum)).run_into(&[100u64], &mut first_sample)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    Exscan;
}

impl AllReduce<ReduceOp> {
    /// Encodes the elements that the ranks send to other hosts. `compressor` is a [`Compression`](crate::Compression), or a
    /// [`Compressor`] for error feedback. All ranks get the same bits. Each contribution and each result is rounded once.
    ///
    /// Codecs other than `fp16` and `bf16` need [`ReduceOp::Sum`] or [`ReduceOp::Average`].
    pub fn compressed(self, compressor: impl Into<Compressor>) -> AllReduce<Compressed> {
        AllReduce { reducer: Compressed { op: self.reducer, compressor: compressor.into() } }
    }
}

impl ReduceScatter<ReduceOp> {
    /// Encodes what the ranks send over links, as [`AllReduce::compressed`] does. The result of a rank is not rounded again.
    pub fn compressed(self, compressor: impl Into<Compressor>) -> ReduceScatter<Compressed> {
        let reducer = Compressed { op: self.reducer, compressor: compressor.into() };
        ReduceScatter { reducer, counts: self.counts }
    }
}

/// The root gets the reduction of all ranks' buffers. The other ranks have no result, and their buffers in place then hold
/// partial results; see [`Group::reduce`](super::Group::reduce).
#[derive(Clone, Debug)]
#[must_use = "pass the verb to `Group::call`"]
pub struct Reduce<R> {
    pub(super) reducer: R,
    pub(super) root: Rank,
}

impl<R> Reduce<R> {
    /// Creates the verb with a [`Reducer`]. The root gets the result.
    pub fn to(root: Rank, reducer: R) -> Self {
        Self { reducer, root }
    }
}

/// Each rank gets its part of the reduction of all ranks' buffers; see [`Group::reduce_scatter`](super::Group::reduce_scatter). A
/// function of the caller must commute.
///
/// ```
/// use ringtrain::verbs::ReduceScatter;
/// use ringtrain::{Group, ReduceOp};
///
/// let mut group = Group::solo();
/// let mut gradients = vec![1.0f32; 8];
/// let own = group.call(ReduceScatter::new(ReduceOp::Sum)).run(&mut gradients)?;
/// println!("{:?}", &gradients[own]);
/// // With these counts, rank 0 gets 8 elements.
/// let part = group.call(ReduceScatter::new(ReduceOp::Sum).counts(&[8])).run_from(&gradients)?;
/// assert_eq!(part.len(), 8);
/// # Ok::<(), ringtrain::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "pass the verb to `Group::call`"]
pub struct ReduceScatter<R> {
    pub(super) reducer: R,
    pub(super) counts: Option<Vec<usize>>,
}

impl<R> ReduceScatter<R> {
    /// Creates the verb with a [`Reducer`] and even parts.
    pub fn new(reducer: R) -> Self {
        Self { reducer, counts: None }
    }

    /// Gives `counts[r]` elements to rank r. The parts are in rank order.
    pub fn counts(self, counts: &[usize]) -> Self {
        Self { counts: Some(counts.to_vec()), ..self }
    }
}

/// Every rank gets the parts of all ranks, in rank order; see [`Group::all_gather`](super::Group::all_gather). Without `counts`,
/// separate inputs must have the same length on all ranks.
#[derive(Clone, Debug, Default)]
#[must_use = "pass the verb to `Group::call`"]
pub struct AllGather {
    pub(super) counts: Option<Vec<usize>>,
}

impl AllGather {
    /// Creates the verb with even parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// The part of rank r has `counts[r]` elements. All ranks pass the same counts.
    pub fn counts(self, counts: &[usize]) -> Self {
        Self { counts: Some(counts.to_vec()) }
    }
}

/// The root gets the parts of all ranks, in rank order. Without `counts`, separate inputs have the same length on all ranks.
#[derive(Clone, Debug)]
#[must_use = "pass the verb to `Group::call`"]
pub struct Gather {
    pub(super) root: Rank,
    pub(super) counts: Option<Vec<usize>>,
}

impl Gather {
    /// Creates the verb with even parts.
    pub fn to(root: Rank) -> Self {
        Self { root, counts: None }
    }

    /// The part of rank r has `counts[r]` elements. All ranks pass the same counts.
    pub fn counts(self, counts: &[usize]) -> Self {
        Self { counts: Some(counts.to_vec()), ..self }
    }
}

/// Every rank gets the root's buffer; see [`Group::broadcast`](super::Group::broadcast).
///
/// ```
/// use ringtrain::verbs::Broadcast;
/// use ringtrain::{Group, Rank};
///
/// let mut group = Group::solo();
/// let handle = group.call(Broadcast::from(Rank::ZERO)).start(vec![1.0f32, 2.0])?;
/// let model = handle.wait()?;
/// // Only the root needs an input, so all ranks pass its length.
/// let copy = group.call(Broadcast::from(Rank::ZERO).count(2)).run_from(&model)?;
/// assert_eq!(copy, model);
/// # Ok::<(), ringtrain::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "pass the verb to `Group::call`"]
pub struct Broadcast<N = ()> {
    pub(super) root: Rank,
    pub(super) count: N,
}

impl Broadcast {
    /// Creates the verb for buffers in place.
    pub fn from(root: Rank) -> Self {
        Self { root, count: () }
    }

    /// Takes separate inputs. All ranks pass the length of the root's input, and only the root's input is used.
    pub fn count(self, count: usize) -> Broadcast<usize> {
        Broadcast { root: self.root, count }
    }
}

/// Each rank gets one part of the root's buffer.
#[derive(Clone, Debug)]
#[must_use = "pass the verb to `Group::call`"]
pub struct Scatter<N = ()> {
    pub(super) root: Rank,
    pub(super) parts: N,
}

impl Scatter {
    /// Creates the verb for buffers in place, which have the same length on all ranks. Only the rank's part changes.
    pub fn from(root: Rank) -> Self {
        Self { root, parts: () }
    }

    /// Takes separate inputs. All ranks pass the length of the root's input, which has even parts. Only the root's input is used.
    pub fn count(self, count: usize) -> Scatter<usize> {
        Scatter { root: self.root, parts: count }
    }

    /// Takes separate inputs. Only the root's is used: it has `counts[r]` elements for rank r. All ranks pass the same counts.
    pub fn counts(self, counts: &[usize]) -> Scatter<Vec<usize>> {
        Scatter { root: self.root, parts: counts.to_vec() }
    }
}

/// Every rank sends one part of its input to each rank, and gets one part from each rank, in rank order.
///
/// ```
/// use ringtrain::Group;
/// use ringtrain::verbs::AllToAll;
///
/// let mut group = Group::from_environment()?;
/// let n = group.size().as_usize();
/// let received = group.call(AllToAll::new()).run_from(&vec![1.0f32; 2 * n])?;
/// let (sent, received_counts) = (vec![2; n], vec![2; n]);
/// let uneven = group.call(AllToAll::new().counts(&sent, &received_counts)).run_from(&received)?;
/// assert_eq!(uneven, received);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "pass the verb to `Group::call`"]
pub struct AllToAll<N = ()> {
    pub(super) counts: N,
}

impl AllToAll {
    /// Creates the verb with parts of the same length. If n does not divide the length, the call returns
    /// [`Error::InvalidCounts`](super::Error::InvalidCounts).
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends `sent[r]` elements to rank r, and receives `received[r]` from it. If the counts of two ranks differ, the job fails.
    pub fn counts(self, sent: &[usize], received: &[usize]) -> AllToAll<[Vec<usize>; 2]> {
        AllToAll { counts: [sent.to_vec(), received.to_vec()] }
    }
}
