//! The files of `--output-dir`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::streams::OutputStream;
use crate::types::{Rank, WorldSize};

/// The files of `--output-dir`: `DIR/rank.N/stdout` and `DIR/rank.N/stderr`, where N has leading zeros as in Horovod.
#[derive(Default, Debug)]
pub(super) struct OutputFiles {
    /// The files of the streams that no rank writes yet.
    pub(super) by_stream: BTreeMap<(Rank, OutputStream), File>,
    /// The directory of `--output-dir`; `None` without this option.
    pub(super) directory: Option<PathBuf>,
}

impl OutputFiles {
    /// Creates the files of these ranks. An error contains the path that could not be created.
    pub(super) fn create(
        directory: &Path,
        ranks: impl Iterator<Item = Rank>,
        world: WorldSize,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let mut by_stream = BTreeMap::new();
        for rank in ranks {
            let folder = directory.join(folder_name(rank, world));
            fs::create_dir_all(&folder).map_err(|error| (folder.clone(), error))?;
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                let path = folder.join(stream.name());
                let file = File::create(&path).map_err(|error| (path, error))?;
                by_stream.insert((rank, stream), file);
            }
        }
        Ok(Self { by_stream, directory: Some(directory.to_owned()) })
    }
}

fn folder_name(rank: Rank, world: WorldSize) -> String {
    let width = (world.get() - 1).to_string().len();
    format!("rank.{:0width$}", rank.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_names_sort_in_rank_order() {
        for (rank, world, expected) in
            [(0, 1, "rank.0"), (9, 10, "rank.9"), (9, 11, "rank.09"), (7, 1000, "rank.007")]
        {
            assert_eq!(folder_name(Rank::new(rank), WorldSize::new(world).unwrap()), expected);
        }
    }
}
