//! The files of a checkpoint directory: the latest checkpoint, earlier checkpoints and the best checkpoint.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{CheckpointError, CheckpointSettings};
use crate::train::atomic_file;

/// The name of the latest checkpoint in the checkpoint directory.
pub const LATEST_FILE_NAME: &str = "checkpoint.safetensors";
/// The name of the best checkpoint in the checkpoint directory.
pub(crate) const BEST_FILE_NAME: &str = "checkpoint-best.safetensors";
/// The temporary name of the hard link that becomes the best checkpoint.
const TEMPORARY_BEST_FILE_NAME: &str = ".checkpoint-best.safetensors.ringtrain-link";
/// The temporary file to which a run creates a hard link, to test whether the file system has hard links.
const LINK_TEST_FILE_NAME: &str = ".link-test.ringtrain-tmp";

/// The files of a checkpoint directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CheckpointFiles {
    directory: PathBuf,
    /// The number of checkpoints to keep. The latest checkpoint counts, and the best checkpoint does not count.
    checkpoints_kept: u32,
    keeps_best: bool,
}

impl CheckpointFiles {
    pub(crate) fn new(settings: &CheckpointSettings) -> Self {
        let CheckpointSettings { directory, checkpoints_kept, keeps_best, .. } = settings;
        Self {
            directory: directory.clone(),
            checkpoints_kept: checkpoints_kept.get(),
            keeps_best: *keeps_best,
        }
    }

    /// Returns the path of the latest checkpoint.
    pub(crate) fn latest_path(&self) -> PathBuf {
        self.directory.join(LATEST_FILE_NAME)
    }

    /// Returns the path of the best checkpoint.
    pub(crate) fn best_path(&self) -> PathBuf {
        self.directory.join(BEST_FILE_NAME)
    }

    /// Returns the path at which the checkpoint of step `steps` is kept when it is no longer the latest.
    fn path_of_earlier_checkpoint(&self, steps: u64) -> PathBuf {
        self.directory.join(format!("checkpoint-{steps}.safetensors"))
    }

    /// Returns the path of the latest checkpoint. If this file does not exist, returns the path of another checkpoint
    /// in the directory. Returns `None` if there is no checkpoint.
    pub(crate) fn find_any_checkpoint(&self) -> Result<Option<PathBuf>, CheckpointError> {
        let latest = self.latest_path();
        if path_exists(&latest)? {
            return Ok(Some(latest));
        }
        let earlier = self.steps_of_earlier_checkpoints().map_err(|error| self.directory_error(error))?;
        if let Some(&steps) = earlier.last() {
            return Ok(Some(self.path_of_earlier_checkpoint(steps)));
        }
        let best = self.best_path();
        Ok(path_exists(&best)?.then_some(best))
    }

    /// Returns the largest number of files that [`replace_latest`](Self::replace_latest) will add to the directory.
    /// While a file is being written, the old file with the same name still exists.
    pub(crate) fn files_to_add_max(&self) -> Result<u64, CheckpointError> {
        let earlier =
            self.steps_of_earlier_checkpoints().map_err(|error| self.directory_error(error))?.len() as u64;
        let found =
            earlier.min(u64::from(self.checkpoints_kept) - 1) + u64::from(path_exists(&self.latest_path())?);
        let best_to_add = self.keeps_best && !path_exists(&self.best_path())?;
        Ok(u64::from(self.checkpoints_kept) + 1 + u64::from(best_to_add) - found)
    }

    /// If the run keeps several checkpoints, checks that the file system has hard links.
    pub(crate) fn check_hard_links(&self) -> Result<(), CheckpointError> {
        if self.checkpoints_kept == 1 && !self.keeps_best {
            return Ok(());
        }
        let (file, link) = (self.directory.join(LINK_TEST_FILE_NAME), self.temporary_best_path());
        let result = atomic_file::replace_file(&file, &[]).and_then(|()| replace_by_hard_link(&file, &link));
        for path in [&file, &link] {
            // If a file cannot be removed, it does no harm: the next run removes it.
            let _ = fs::remove_file(path);
        }
        result.map_err(|source| CheckpointError::NoLinks { path: self.directory.clone(), source })
    }

    /// Checks that the latest, the best and the earlier checkpoints are regular files. A run that wrote through a
    /// symbolic link could overwrite an earlier checkpoint.
    pub(crate) fn check_file_types(&self) -> Result<(), CheckpointError> {
        let earlier = self.steps_of_earlier_checkpoints().map_err(|error| self.directory_error(error))?;
        let earlier = earlier.into_iter().map(|steps| self.path_of_earlier_checkpoint(steps));
        for path in [self.latest_path(), self.best_path()].into_iter().chain(earlier) {
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_file() => {}
                Ok(found) => {
                    let kind = if found.is_symlink() { "a symbolic link" } else { "a directory or a device" };
                    return Err(CheckpointError::NotRegularFile { path, kind });
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(CheckpointError::io("look for", &path, error)),
            }
        }
        Ok(())
    }

    /// Replaces the latest checkpoint by `bytes`, the checkpoint of step `steps`. Before the call, `latest_steps` is
    /// the step of the latest checkpoint. Keeps the previous checkpoint if `keep` is more than 1, and removes the
    /// oldest checkpoints. If `is_best`, the new checkpoint also replaces the best checkpoint.
    ///
    /// # Errors
    ///
    /// Any error of the operating system. After an error, the latest checkpoint is either unchanged or completely
    /// replaced. If it is replaced, `latest_steps` is set to `steps`.
    pub(crate) fn replace_latest(
        &self,
        bytes: &[u8],
        steps: u64,
        latest_steps: &mut Option<u64>,
        is_best: bool,
    ) -> io::Result<()> {
        let latest = self.latest_path();
        if let Some(previous) = latest_steps.filter(|&previous| self.checkpoints_kept > 1 && previous < steps)
        {
            match replace_by_hard_link(&latest, &self.path_of_earlier_checkpoint(previous)) {
                // The user may have moved the latest checkpoint to another directory.
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        atomic_file::replace_file(&latest, bytes)?;
        *latest_steps = Some(steps);
        if is_best && self.keeps_best {
            let temporary = self.temporary_best_path();
            replace_by_hard_link(&latest, &temporary)?;
            fs::rename(&temporary, self.best_path())?;
        }
        self.remove_old_checkpoints(steps)
    }

    fn temporary_best_path(&self) -> PathBuf {
        self.directory.join(TEMPORARY_BEST_FILE_NAME)
    }

    /// Removes the oldest of the checkpoints before step `steps`. Keeps checkpoints of later steps: these exist if the
    /// user has gone back to an earlier checkpoint, and the user may need them again.
    fn remove_old_checkpoints(&self, steps: u64) -> io::Result<()> {
        let mut earlier = self.steps_of_earlier_checkpoints()?;
        earlier.retain(|&found| found < steps);
        let excess = earlier.len().saturating_sub(self.checkpoints_kept as usize - 1);
        for &old in &earlier[..excess] {
            fs::remove_file(self.path_of_earlier_checkpoint(old))?;
        }
        Ok(())
    }

    /// Returns the steps of the earlier checkpoints, in ascending order. The names of the files contain the steps.
    fn steps_of_earlier_checkpoints(&self) -> io::Result<Vec<u64>> {
        let mut found = Vec::new();
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(found),
            entries => entries?,
        };
        for entry in entries {
            let name = entry?.file_name();
            let steps = name.to_str().and_then(|name| {
                let text = name.strip_prefix("checkpoint-")?.strip_suffix(".safetensors")?;
                text.parse().ok().filter(|steps: &u64| steps.to_string() == text)
            });
            found.extend(steps);
        }
        found.sort_unstable();
        Ok(found)
    }

    fn directory_error(&self, error: io::Error) -> CheckpointError {
        CheckpointError::io("list the files of", &self.directory, error)
    }
}

fn path_exists(path: &Path) -> Result<bool, CheckpointError> {
    path.try_exists().map_err(|error| CheckpointError::io("look for", path, error))
}

/// Gives the file at `from` the second name `to`. If a file named `to` exists, replaces this file.
fn replace_by_hard_link(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let (old, new) = (fs::symlink_metadata(to)?, fs::metadata(from)?);
            if (old.dev(), old.ino()) == (new.dev(), new.ino()) {
                return Ok(());
            }
            fs::remove_file(to)?;
            fs::hard_link(from, to)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::super::ExistingCheckpoint;
    use super::*;

    fn make_checkpoint_files(directory: &Path, checkpoints_kept: u32, keeps_best: bool) -> CheckpointFiles {
        let checkpoints_kept = NonZeroU32::new(checkpoints_kept).unwrap();
        CheckpointFiles::new(&CheckpointSettings {
            checkpoints_kept,
            keeps_best,
            ..CheckpointSettings::new(directory, ExistingCheckpoint::Refuse)
        })
    }

    fn list_names_and_texts(directory: &Path) -> Vec<(String, String)> {
        let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let mut found: Vec<_> = entries
            .map(|entry| (entry.file_name().into_string().unwrap(), read(entry.path())))
            .map(|(name, text)| (name.replace("checkpoint", "c").replace(".safetensors", ""), text))
            .collect();
        found.sort();
        found
    }

    #[test]
    fn the_last_checkpoints_and_the_best_are_kept() {
        for (checkpoints_kept, keeps_best, expected) in [
            (1, false, &[("c", "50")][..]),
            (1, true, &[("c", "50"), ("c-best", "20")]),
            (3, false, &[("c", "50"), ("c-30", "30"), ("c-40", "40")]),
            (3, true, &[("c", "50"), ("c-30", "30"), ("c-40", "40"), ("c-best", "20")]),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let files = make_checkpoint_files(directory.path(), checkpoints_kept, keeps_best);
            files.check_hard_links().unwrap();
            assert_eq!(list_names_and_texts(directory.path()), []);
            assert_eq!(
                files.files_to_add_max().unwrap(),
                u64::from(checkpoints_kept) + 1 + u64::from(keeps_best)
            );
            let mut latest = None;
            // A run may save twice after the same step.
            for steps in [10, 20, 30, 40, 50, 50] {
                let is_best = steps <= 20;
                files.replace_latest(steps.to_string().as_bytes(), steps, &mut latest, is_best).unwrap();
                assert_eq!(latest, Some(steps));
            }
            let found = list_names_and_texts(directory.path());
            let found: Vec<_> = found.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            assert_eq!(found, expected, "{checkpoints_kept} {keeps_best}");
            assert_eq!(files.files_to_add_max().unwrap(), 1);
        }
    }

    /// A user who goes back to an earlier checkpoint keeps the checkpoints of later steps.
    #[test]
    fn checkpoints_of_later_steps_are_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let files = make_checkpoint_files(directory.path(), 2, false);
        for name in ["checkpoint-90.safetensors", "checkpoint-07.safetensors", "checkpoint-x.safetensors"] {
            fs::write(directory.path().join(name), "own").unwrap();
        }
        let mut latest = None;
        for steps in [10, 20, 30] {
            files.replace_latest(b"new", steps, &mut latest, false).unwrap();
        }
        let names: Vec<String> =
            list_names_and_texts(directory.path()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["c", "c-07", "c-20", "c-90", "c-x"]);
    }

    /// Regression test: before the fix, the save after a failed save stored a checkpoint under the step of an older
    /// checkpoint.
    #[test]
    fn earlier_checkpoints_keep_their_content_after_a_failed_save() {
        let directory = tempfile::tempdir().unwrap();
        let files = make_checkpoint_files(directory.path(), 9, true);
        let mut latest = None;
        files.replace_latest(b"10", 10, &mut latest, false).unwrap();
        let blocked = directory.path().join(BEST_FILE_NAME);
        fs::create_dir(&blocked).unwrap();
        files.replace_latest(b"20", 20, &mut latest, true).unwrap_err();
        assert_eq!(latest, Some(20));
        fs::remove_dir(&blocked).unwrap();
        files.replace_latest(b"30", 30, &mut latest, true).unwrap();
        let found = list_names_and_texts(directory.path());
        let found: Vec<_> = found.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(found, [("c", "30"), ("c-10", "10"), ("c-20", "20"), ("c-best", "30")]);
    }

    /// Regression test: before the fix, a run that resumed through a symbolic link to an earlier checkpoint overwrote
    /// this checkpoint, and kept several links to it.
    #[test]
    fn links_and_directories_with_the_names_of_checkpoints_are_refused() {
        for name in [LATEST_FILE_NAME, BEST_FILE_NAME, "checkpoint-8.safetensors"] {
            let directory = tempfile::tempdir().unwrap();
            let files = make_checkpoint_files(directory.path(), 1, false);
            fs::write(directory.path().join("checkpoint-7.safetensors"), "").unwrap();
            files.check_file_types().unwrap();
            let path = directory.path().join(name);
            std::os::unix::fs::symlink("checkpoint-7.safetensors", &path).unwrap();
            let error = files.check_file_types().unwrap_err().to_string();
            assert!(error.contains(&format!("{name} is a symbolic link, not a regular file")), "{error}");
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
            let error = files.check_file_types().unwrap_err().to_string();
            assert!(error.contains(&format!("{name} is a directory or a device")), "{error}");
        }
    }

    #[test]
    fn any_checkpoint_of_a_directory_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let files = make_checkpoint_files(&directory.path().join("new"), 2, true);
        assert_eq!(files.find_any_checkpoint().unwrap(), None);
        fs::create_dir(directory.path().join("new")).unwrap();
        for name in ["checkpoint-best.safetensors", "checkpoint-5.safetensors", "checkpoint.safetensors"] {
            let path = directory.path().join("new").join(name);
            fs::write(&path, "").unwrap();
            assert_eq!(files.find_any_checkpoint().unwrap(), Some(path));
        }
    }
}
