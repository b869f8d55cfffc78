//! The samples that a rank holds. The features are in memory, or in a temporary file; see `--stream`.

use std::borrow::Cow;
use std::ops::Range;

use super::disk_features::DiskFeatures;
use super::{DataError, Features, Samples, Targets};

/// The features of samples.
#[derive(Clone, Debug)]
pub(crate) enum HeldFeatures {
    InMemory(Features),
    OnDisk(DiskFeatures),
}

impl HeldFeatures {
    /// Returns the number of samples.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::InMemory(features) => features.rows(),
            Self::OnDisk(features) => features.rows(),
        }
    }

    /// Returns features with the same columns. These features may lack the samples.
    pub(crate) fn format(&self) -> &Features {
        match self {
            Self::InMemory(features) => features,
            Self::OnDisk(features) => features.format(),
        }
    }

    /// Increases the number of columns of sparse rows. Other features keep their columns.
    pub(crate) fn widen(&mut self, columns: usize) {
        let format = match self {
            Self::InMemory(features) => features,
            Self::OnDisk(features) => features.format_mut(),
        };
        if let Features::Sparse(rows) = format {
            rows.widen(columns);
        }
    }

    /// Returns the number of stored values of each sparse row. Returns an empty vector for other features.
    pub(crate) fn value_counts(&self) -> Vec<u32> {
        let count_of_row: &dyn Fn(usize) -> usize = match self {
            Self::InMemory(Features::Sparse(rows)) => &|row| rows.value_count(row),
            Self::OnDisk(features) if matches!(features.format(), Features::Sparse(_)) => {
                &|row| features.value_count(row)
            }
            _ => return Vec::new(),
        };
        (0..self.rows()).map(|row| count_of_row(row) as u32).collect()
    }

    /// Returns a copy of the samples in `chosen`. If the features are in a file, the copy uses the same file. `chosen` must
    /// be sorted.
    #[must_use]
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        match self {
            Self::InMemory(features) => Self::InMemory(features.select(chosen)),
            Self::OnDisk(features) => Self::OnDisk(features.select(chosen)),
        }
    }

    /// Replaces the features of all samples by the results of `convert`, which may be called for parts of the samples.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or written.
    pub(crate) fn convert(self, convert: impl Fn(Features) -> Features) -> Result<Self, DataError> {
        Ok(match self {
            Self::InMemory(features) => Self::InMemory(convert(features)),
            Self::OnDisk(features) => Self::OnDisk(features.rewrite(convert)?.finish()),
        })
    }

    /// Returns all samples in memory.
    #[cfg(test)]
    pub(crate) fn into_memory(self) -> Features {
        match self {
            Self::InMemory(features) => features,
            Self::OnDisk(features) => features.load(0..features.rows()).unwrap(),
        }
    }
}

/// The samples that a rank holds.
#[derive(Clone, Debug)]
pub(crate) enum HeldSamples {
    InMemory(Samples),
    /// The features are in a file. The targets are in memory, except for windows of a text, which are also their own targets.
    OnDisk(DiskFeatures, Targets),
}

impl HeldSamples {
    /// Combines the features and the targets of the same samples.
    pub(crate) fn new(features: HeldFeatures, targets: Targets) -> Self {
        match features {
            HeldFeatures::InMemory(features) => Self::InMemory(Samples { features, targets }),
            HeldFeatures::OnDisk(features) => Self::OnDisk(features, targets),
        }
    }

    /// Creates the samples of windows of a text. The targets are in the windows.
    pub(crate) fn of_windows(windows: HeldFeatures) -> Self {
        let targets = Targets::Numbers(Vec::new()).select(&[], windows.format());
        Self::new(windows, targets)
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InMemory(samples) => samples.len(),
            Self::OnDisk(features, _) => features.rows(),
        }
    }

    /// Returns features with the same columns. These features may lack the samples.
    pub(crate) fn feature_format(&self) -> &Features {
        match self {
            Self::InMemory(samples) => &samples.features,
            Self::OnDisk(features, _) => features.format(),
        }
    }

    /// Returns the number of stored values of all sparse rows. Returns 0 for other features.
    pub(crate) fn stored_value_count(&self) -> usize {
        match self {
            Self::InMemory(Samples { features: Features::Sparse(rows), .. }) => rows.stored_value_count(),
            Self::OnDisk(features, _) if matches!(features.format(), Features::Sparse(_)) => {
                (0..features.rows()).map(|row| features.value_count(row)).sum()
            }
            _ => 0,
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
            Self::OnDisk(features, targets) => {
                Self::OnDisk(features.select(chosen), targets.select(chosen, features.format()))
            }
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
            Self::OnDisk(features, targets) => {
                let features = features.load(indices.iter().copied())?;
                Ok(Samples { targets: targets.select(indices, &features), features })
            }
        }
    }

    /// Returns samples in memory, and the positions in them of the samples whose indices are in `indices`. If all samples are in
    /// memory, does not copy them.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn load_batch<'a>(
        &'a self,
        indices: &'a [u32],
    ) -> Result<(Cow<'a, Samples>, Cow<'a, [u32]>), DataError> {
        match self {
            Self::InMemory(samples) => Ok((Cow::Borrowed(samples), Cow::Borrowed(indices))),
            Self::OnDisk(..) => {
                let rows: Vec<usize> = indices.iter().map(|&index| index as usize).collect();
                Ok((Cow::Owned(self.load(&rows)?), (0..indices.len() as u32).collect()))
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
            Self::OnDisk(..) => self.load(&(0..self.len()).collect::<Vec<_>>()),
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
        let block_rows = match self {
            Self::InMemory(_) => rows.len().max(1),
            Self::OnDisk(features, _) => features.block_rows(),
        };
        for start in rows.clone().step_by(block_rows) {
            let (samples, block) = self.load_range(start..rows.end.min(start + block_rows))?;
            visit(&samples, block);
        }
        Ok(())
    }

    /// Tells the operating system that the samples `range` will soon be read.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        if let Self::OnDisk(features, _) = self {
            features.prefetch(range);
        }
    }
}

impl Samples {
    /// Returns a copy of the samples with the indices `rows`.
    pub(super) fn select(&self, rows: &[usize]) -> Self {
        let features = self.features.select(rows);
        Self { targets: self.targets.select(rows, &features), features }
    }
}

impl Targets {
    /// Adds the targets of more samples of the same set. The targets of windows of a text are in the windows.
    pub(super) fn append(&mut self, more: Self) {
        match (self, more) {
            (Self::Numbers(values), Self::Numbers(more)) => values.extend(more),
            (Self::Classes(classes), Self::Classes(more)) => classes.extend(more),
            (Self::NextTokens(_), Self::NextTokens(_)) => {}
            _ => unreachable!("the samples of a set have targets of one kind"),
        }
    }

    /// Returns a copy of the targets with the indices `rows`. `features` are the features of the same samples, or their format if
    /// they are in a file.
    pub(super) fn select(&self, rows: &[usize], features: &Features) -> Self {
        match (self, features) {
            (_, Features::Tokens(windows)) => Self::NextTokens(windows.clone()),
            (Self::Numbers(values), _) => Self::Numbers(rows.iter().map(|&row| values[row]).collect()),
            (Self::Classes(classes), _) => Self::Classes(rows.iter().map(|&row| classes[row]).collect()),
            (Self::NextTokens(_), _) => unreachable!("only samples of a text have next tokens"),
        }
    }
}
