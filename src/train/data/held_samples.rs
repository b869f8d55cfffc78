//! The samples that a rank holds. The features are in memory, or in a temporary file; see `--stream`.

use std::borrow::Cow;
use std::ops::Range;

use super::disk_cells::DiskCells;
use super::{DataError, Features, Samples, Targets};

/// The number of samples that [`HeldSamples::visit_blocks`] reads from a file at once.
const BLOCK_ROWS: usize = 1024;

/// The features of samples.
#[derive(Clone, Debug)]
pub(crate) enum HeldFeatures {
    InMemory(Features),
    OnDisk(DiskCells),
}

impl HeldFeatures {
    /// Returns the number of samples.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::InMemory(features) => features.rows(),
            Self::OnDisk(cells) => cells.rows(),
        }
    }

    /// Returns features with the same columns. These features may lack the samples.
    pub(crate) fn format(&self) -> &Features {
        match self {
            Self::InMemory(features) => features,
            Self::OnDisk(cells) => cells.format(),
        }
    }
}

/// The samples that a rank holds.
#[derive(Clone, Debug)]
pub(crate) enum HeldSamples {
    InMemory(Samples),
    /// The features are in a file. The targets are in memory.
    OnDisk(DiskCells, Targets),
}

impl HeldSamples {
    /// Combines the features and the targets of the same samples.
    pub(crate) fn new(features: HeldFeatures, targets: Targets) -> Self {
        match features {
            HeldFeatures::InMemory(features) => Self::InMemory(Samples { features, targets }),
            HeldFeatures::OnDisk(cells) => Self::OnDisk(cells, targets),
        }
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InMemory(samples) => samples.len(),
            Self::OnDisk(cells, _) => cells.rows(),
        }
    }

    /// Returns features with the same columns. These features may lack the samples.
    pub(crate) fn feature_format(&self) -> &Features {
        match self {
            Self::InMemory(samples) => &samples.features,
            Self::OnDisk(cells, _) => cells.format(),
        }
    }

    /// Returns the targets of all samples.
    pub(crate) fn targets(&self) -> &Targets {
        match self {
            Self::InMemory(samples) => &samples.targets,
            Self::OnDisk(_, targets) => targets,
        }
    }

    /// Returns the samples, or `None` if the features are in a file.
    pub(crate) fn in_memory(&self) -> Option<&Samples> {
        match self {
            Self::InMemory(samples) => Some(samples),
            Self::OnDisk(..) => None,
        }
    }

    /// Returns a copy of the samples in `chosen`. If the features are in a file, the copy uses the same file. `chosen` must
    /// be sorted.
    #[must_use]
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        match self {
            Self::InMemory(samples) => Self::InMemory(samples.select(chosen)),
            Self::OnDisk(cells, targets) => Self::OnDisk(cells.select(chosen), targets.select(chosen)),
        }
    }

    /// Returns the samples `rows` in memory, and the positions of these samples in the result. If all samples are in
    /// memory, does not copy them.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn load_range(
        &self,
        rows: Range<usize>,
    ) -> Result<(Cow<'_, Samples>, Range<usize>), DataError> {
        match self {
            Self::InMemory(samples) => Ok((Cow::Borrowed(samples), rows)),
            Self::OnDisk(..) => {
                let len = rows.len();
                Ok((Cow::Owned(self.load(&rows.collect::<Vec<_>>())?), 0..len))
            }
        }
    }

    /// Returns a copy of the samples whose indices are in `indices`, in memory.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn load(&self, indices: &[usize]) -> Result<Samples, DataError> {
        match self {
            Self::InMemory(samples) => Ok(samples.select(indices)),
            Self::OnDisk(cells, targets) => {
                let features = cells.load(indices.iter().copied())?;
                Ok(Samples { features, targets: targets.select(indices) })
            }
        }
    }

    /// Returns all samples in memory.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn into_memory(self) -> Result<Samples, DataError> {
        match self {
            Self::InMemory(samples) => Ok(samples),
            Self::OnDisk(cells, targets) => Ok(Samples { features: cells.load(0..cells.rows())?, targets }),
        }
    }

    /// Calls `visit` for all samples in `rows`, in ascending order. The arguments of each call are samples in memory, and a
    /// range of these samples.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn visit_blocks(
        &self,
        rows: Range<usize>,
        mut visit: impl FnMut(&Samples, Range<usize>),
    ) -> Result<(), DataError> {
        let block_rows = if self.in_memory().is_some() { rows.len().max(1) } else { BLOCK_ROWS };
        for start in rows.clone().step_by(block_rows) {
            let (samples, block) = self.load_range(start..rows.end.min(start + block_rows))?;
            visit(&samples, block);
        }
        Ok(())
    }

    /// Tells the operating system that the samples `range` will soon be read.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        if let Self::OnDisk(cells, _) = self {
            cells.prefetch(range);
        }
    }
}

impl Samples {
    /// Returns a copy of the samples with the indices `rows`.
    pub(super) fn select(&self, rows: &[usize]) -> Self {
        Self { features: self.features.select(rows), targets: self.targets.select(rows) }
    }
}

impl Targets {
    /// Returns a copy of the targets with the indices `rows`.
    fn select(&self, rows: &[usize]) -> Self {
        match self {
            Self::Numbers(values) => Self::Numbers(rows.iter().map(|&row| values[row]).collect()),
            Self::Classes(classes) => Self::Classes(rows.iter().map(|&row| classes[row]).collect()),
            Self::NextTokens(windows) => Self::NextTokens(windows.select(rows)),
        }
    }
}
