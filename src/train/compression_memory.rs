//! What ranks remember of compressed sums. Checkpoints contain this memory.

/// What ranks remember from one sum to the next.
#[expect(clippy::struct_excessive_bools, reason = "each is a separate part of the memory")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct MemoryNeeds {
    /// What each rank has not sent.
    pub(crate) residuals: bool,
    /// The velocity of each rank.
    pub(crate) velocities: bool,
    /// The last sums of EF21.
    pub(crate) results: bool,
    /// The matrices Q of `PowerSGD`.
    pub(crate) factors: bool,
    /// The number of sums, from which codecs draw random numbers.
    pub(crate) calls: bool,
}

impl MemoryNeeds {
    /// Returns whether ranks remember anything.
    pub(crate) fn any(self) -> bool {
        self.residuals || self.velocities || self.results || self.factors || self.calls
    }
}

/// What a rank, or each of several ranks, remembers of compressed sums.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct CompressionMemory {
    /// For each rank, what it adds to its next input, with an element for each parameter: what it has not sent, or minus what it
    /// has sent with EF21. Empty without error feedback.
    pub(crate) residuals: Vec<Vec<f32>>,
    /// The last sums of the parameters with EF21, which are the same on all ranks, with an element for each parameter. What has
    /// not been sent is the sum of all residuals and of these sums. Empty without EF21.
    pub(crate) results: Vec<f32>,
    /// For each rank, its velocity. Empty without momentum correction.
    pub(crate) velocities: Vec<Vec<f32>>,
    /// The matrices Q of `PowerSGD`, which are the same on all ranks, each at the start of the range of its matrix. Empty without
    /// `PowerSGD`.
    pub(crate) factors: Vec<f32>,
    /// The number of sums.
    pub(crate) calls: u64,
}
