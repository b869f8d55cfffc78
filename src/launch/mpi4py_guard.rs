//! The package `mpi4py` that ranks find when neither `--mpi4py` nor `--mpi4py=installed` was given. Importing the
//! package raises an error that tells the user to give `--mpi4py` or `--mpi4py=installed`.
//!
//! Python can import from zip archives, so the package is an archive in memory that ranks open as `/proc/PID/fd/N`.
//! The archive needs neither a temporary directory nor an installed Python package.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::process;

use rustix::fs::{MemfdFlags, memfd_create};

/// The source of the only module in the package.
const GUARD_SOURCE: &str = include_str!("mpi4py_guard.py");
const GUARD_FILE_NAME: &str = "mpi4py/__init__.py";

/// Variables that MPI launchers set, but ringrun does not: one variable of Open MPI, and one of MPICH and Intel MPI.
const MPI_VARIABLES: [&str; 2] = ["PMIX_RANK", "PMI_RANK"];

/// The archive with the package. Ranks can import from the archive until this value is dropped.
#[derive(Debug)]
pub(super) struct Mpi4pyGuard {
    archive: File,
}

impl Mpi4pyGuard {
    /// Writes the archive to a file in memory.
    pub(super) fn create() -> io::Result<Self> {
        // If an MPI launcher started ringrun itself, the ranks inherit some of `MPI_VARIABLES`. An inherited variable
        // does not show that a rank called an MPI launcher, so the guard ignores inherited variables.
        let variables =
            MPI_VARIABLES.map(|name| if env::var_os(name).is_none() { name } else { "" }).join(" ");
        let mut archive = File::from(memfd_create("ringrun-mpi4py", MemfdFlags::CLOEXEC)?);
        archive.write_all(&make_zip(
            GUARD_FILE_NAME,
            GUARD_SOURCE.replace("@MPI_VARIABLES@", &variables).as_bytes(),
        ))?;
        Ok(Self { archive })
    }

    /// Returns the path of the archive, which ringrun adds to the `PYTHONPATH` of the ranks.
    pub(super) fn path(&self) -> OsString {
        format!("/proc/{}/fd/{}", process::id(), self.archive.as_raw_fd()).into()
    }
}

/// Returns a zip archive of one file, not compressed (PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16).
fn make_zip(name: &str, data: &[u8]) -> Vec<u8> {
    let size = u32::try_from(data.len()).expect("the guard is a small file").to_le_bytes();
    let name_size = u16::try_from(name.len()).expect("the name is short").to_le_bytes();
    // The first fields say: version 1.0, no flags, not compressed, modified on 1980-01-01.
    let common = [
        &[10, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..],
        &crc32(data).to_le_bytes(),
        &size,
        &size,
        &name_size,
        &[0; 2],
    ]
    .concat();
    let file = [b"PK\x03\x04", &common[..], name.as_bytes(), data].concat();
    let directory = [b"PK\x01\x02\x0a\0", &common[..], &[0; 14], name.as_bytes()].concat();
    let directory_size = u32::try_from(directory.len()).expect("one entry is small").to_le_bytes();
    let directory_offset = u32::try_from(file.len()).expect("one file is small").to_le_bytes();
    let end = [b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &directory_size[..], &directory_offset, &[0; 2]].concat();
    [file, directory, end].concat()
}

/// Returns the CRC-32 that zip files use (ISO 3309). The loop handles one bit at a time, because the input is small.
fn crc32(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc32_of_the_standard_test_input_is_correct() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
