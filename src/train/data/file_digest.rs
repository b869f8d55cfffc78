//! Hashes the beginning, the middle and the end of a file, so that ranks notice different files without reading them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::file::{open_file, stream_error};
use super::{BlocksOfRank, DataError};
use crate::train::rank_checks::short_digest;

/// The number of bytes of each hashed block. Files of at most three blocks are hashed completely.
const BLOCK_BYTES: u64 = 1 << 16;

/// What a rank knows about a whole file or folder, although it reads only a part of the samples.
#[derive(Debug)]
pub(crate) struct FileDigest {
    pub(crate) path: PathBuf,
    /// If the values of two ranks differ, the ranks have different files.
    pub(crate) value: u64,
}

impl FileDigest {
    /// Hashes `description`, which says what this rank knows about the content of a file. If several ranks share the samples,
    /// and if the file is not a pipe, also hashes the length of the file and three blocks: at its beginning, in its middle and
    /// at its end. A compressed file is hashed as it is stored. The last block of a `.gz` file that is a
    /// single stream, or of a `.zip` file with few entries, has checksums of the whole content.
    pub(crate) fn of_file(path: &Path, description: &str, share: BlocksOfRank) -> Result<Self, DataError> {
        let mut hasher = Sha256::new_with_prefix(description);
        // Opening a pipe a second time would wait for another writer.
        if share != BlocksOfRank::ALL && std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
            hash_blocks(&open_file(path)?, &mut hasher).map_err(|error| stream_error(path, error))?;
        }
        Ok(Self { path: path.to_owned(), value: short_digest(&hasher.finalize()) })
    }
}

fn hash_blocks(file: &File, hasher: &mut Sha256) -> io::Result<()> {
    let len = file.metadata()?.len();
    hasher.update(len.to_le_bytes());
    let mut block = vec![0; len.min(BLOCK_BYTES) as usize];
    let last = len - block.len() as u64;
    for start in [0, last / 2, last] {
        file.read_exact_at(&mut block, start)?;
        hasher.update(&block);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_RANKS: BlocksOfRank = BlocksOfRank { rank: 1, ranks: 2 };

    #[test]
    fn short_files_are_hashed_completely_and_long_files_in_three_places() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let hash = |content: &[u8], description: &str, share| {
            std::fs::write(&path, content).unwrap();
            FileDigest::of_file(&path, description, share).unwrap().value
        };
        let block = BLOCK_BYTES as usize;
        for (len, places, is_noticed) in [
            (1, &[0][..], true),
            (block + 1, &[0, block / 2, block], true),
            (3 * block, &[0, block - 1, block, 2 * block - 1, 2 * block, 3 * block - 1], true),
            (9 * block, &[0, block - 1, 4 * block, 5 * block - 1, 8 * block, 9 * block - 1], true),
            (9 * block, &[block, 4 * block - 1, 5 * block, 8 * block - 1], false),
        ] {
            let content = vec![7; len];
            let expected = hash(&content, "", TWO_RANKS);
            assert_ne!(hash(&content[1..], "", TWO_RANKS), expected, "{len}");
            assert_ne!(hash(&content, "another shape", TWO_RANKS), expected, "{len}");
            for &place in places {
                let mut changed = content.clone();
                changed[place] = 8;
                assert_eq!(hash(&changed, "", TWO_RANKS) != expected, is_noticed, "{len} {place}");
                assert_eq!(hash(&changed, "", BlocksOfRank::ALL), hash(b"", "", BlocksOfRank::ALL));
            }
        }
    }
}
