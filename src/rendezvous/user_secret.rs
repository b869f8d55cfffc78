//! The secret of a user, for jobs whose launcher gives the ranks no secret. Only the user can read its file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::error::StartError;
use crate::wire::{SECRET_BYTES_MAX, Secret};

/// The name of the file in the user's home directory.
const FILE_NAME: &str = ".ringtrain-secret";
/// The access rights that the file must not give: those of the group and of other users.
const FOREIGN_RIGHTS: u32 = 0o077;

/// Returns the path of the file. Returns `None` if the variable `HOME` is not set.
fn user_secret_path() -> Option<PathBuf> {
    std::env::var_os("HOME").filter(|home| !home.is_empty()).map(|home| Path::new(&home).join(FILE_NAME))
}

/// Reads the user's secret. If the file does not exist, creates it with a random secret.
///
/// # Errors
///
/// [`StartError::UserSecret`] if the file cannot be read or created, or if other users can read or change it.
pub(crate) fn user_secret() -> Result<Secret, StartError> {
    let no_home = || StartError::UserSecret {
        path: Path::new("~").join(FILE_NAME),
        problem: "the variable HOME is not set".into(),
    };
    read_or_create(&user_secret_path().ok_or_else(no_home)?)
}

fn read_or_create(path: &Path) -> Result<Secret, StartError> {
    let fails = |problem: String| StartError::UserSecret { path: path.to_owned(), problem };
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create(path).and_then(|()| File::open(path)).map_err(|error| fails(error.to_string()))?
        }
        opened => opened.map_err(|error| fails(error.to_string()))?,
    };
    let metadata = file.metadata().map_err(|error| fails(error.to_string()))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(fails("it belongs to another user".into()));
    }
    if metadata.mode() & FOREIGN_RIGHTS != 0 {
        return Err(fails(format!("other users may access it; run `chmod 600 {}`", path.display())));
    }
    let mut bytes = Vec::new();
    file.take(SECRET_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fails(error.to_string()))?;
    Secret::new(&bytes).map_err(|error| fails(error.to_string()))
}

/// Creates the file with a random secret. Several ranks may do this at the same time, on several hosts that share the home
/// directory: a link fails if the file exists, so all ranks then read the secret of the first.
fn create(path: &Path) -> io::Result<()> {
    let draft = path.with_extension(format!("draft-{:x}", rand::random::<u64>()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    let secret: [u128; 2] = rand::random();
    let linked = writeln!(file, "{:032x}{:032x}", secret[0], secret[1])
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::hard_link(&draft, path));
    fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::thread;

    use super::*;

    fn secret_bytes(path: &Path) -> Vec<u8> {
        read_or_create(path).unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn ranks_that_create_the_file_at_the_same_time_get_one_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let secrets: Vec<_> = thread::scope(|scope| {
            let ranks: Vec<_> = (0..8).map(|_| scope.spawn(|| secret_bytes(&path))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a draft remains");
    }

    #[test]
    fn a_file_that_others_can_read_and_a_bad_secret_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let cases = [(0o640, "a secret of 16 or more bytes", "chmod 600"), (0o600, "short", "at least 16")];
        for (mode, text, expected) in cases {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = read_or_create(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("RING_SECRET"), "{error}");
        }
        let missing = read_or_create(&folder.path().join("no/folder")).unwrap_err().to_string();
        assert!(missing.contains("No such file"), "{missing}");
    }
}
