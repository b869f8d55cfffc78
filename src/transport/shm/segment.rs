//! A piece of memory that several processes have mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process;
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};
use rustix::param::page_size;

/// Bytes at the beginning by which who opens the memory knows it.
pub const TOKEN_BYTES: usize = 32;

/// Where another process of this host finds the memory: a file that this one has open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLocation {
    /// The process.
    pub process: u32,
    /// The number of the file there.
    pub file: u32,
}

/// Shared memory, mapped. Dropping it takes the mapping back.
pub struct Segment {
    base: NonNull<u8>,
    length: usize,
    /// Kept open for as long as others may still have to open it.
    file: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to this value alone, and the memory behind it may be read and written from any thread; who
// may when is the business of `ShmRounds`, which shares the memory with other processes as well.
unsafe impl Send for Segment {}
// SAFETY: as above; nothing here changes through a shared reference.
unsafe impl Sync for Segment {}

impl Segment {
    /// New memory of `length` bytes, all zero but for the token.
    ///
    /// # Errors
    ///
    /// When the operating system refuses: too little memory is one reason.
    pub fn create(length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("ringtrain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let segment = Self::map(file, length)?;
        // SAFETY: the mapping is at least as long as the token, which `map` makes sure of, and nobody else knows of it yet.
        unsafe { ptr::copy_nonoverlapping(token.as_ptr(), segment.base.as_ptr(), TOKEN_BYTES) };
        Ok(segment)
    }

    /// The memory that another process of this user has created.
    ///
    /// # Errors
    ///
    /// When it cannot be opened (another user, another container), or is not what was promised.
    pub fn open(place: SegmentLocation, length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", place.process, place.file);
        let file = OwnedFd::from(OpenOptions::new().read(true).write(true).open(path)?);
        let seals = fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::other("its size is not sealed"));
        }
        let file = File::from(file);
        if file.metadata()?.len() != length as u64 {
            return Err(io::Error::other("it has another size"));
        }
        let mut segment = Self::map(file.into(), length)?;
        segment.close();
        // SAFETY: the mapping is at least as long as the token, and its creator wrote the token before it told anybody.
        let found = unsafe { segment.base.cast::<[u8; TOKEN_BYTES]>().read() };
        if found != *token {
            return Err(io::Error::other("it is another job's"));
        }
        Ok(segment)
    }

    /// Where others find it, until [`Segment::close`].
    pub fn place(&self) -> Option<SegmentLocation> {
        let file = self.file.as_ref()?.as_raw_fd();
        Some(SegmentLocation { process: process::id(), file: u32::try_from(file).ok()? })
    }

    /// Closes the file: from now on nobody can open it. The mapping stays.
    pub fn close(&mut self) {
        self.file = None;
    }

    /// A second mapping of the memory, before [`Segment::close`].
    ///
    /// # Errors
    ///
    /// When the operating system refuses, or the file is closed.
    pub(super) fn spare_pages(&self) -> io::Result<SparePages> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let length = self.length.next_multiple_of(page_size());
        // SAFETY: the kernel chooses an address where nothing of ours is mapped; the file's size is sealed.
        let base = unsafe { mmap(ptr::null_mut(), length, protection, flags, file, 0)? };
        Ok(SparePages { base: base.expose_provenance(), left: std::iter::once(0..length).collect() })
    }

    /// The first byte. It is aligned to a page.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    fn map(file: OwnedFd, length: usize) -> io::Result<Self> {
        if length < TOKEN_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses an address where nothing of ours is mapped; the file is as long as the mapping, and sealed.
        let base = unsafe { mmap(ptr::null_mut(), length, protection, flags, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length, file: Some(file) })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this is what `map` has mapped, and nothing that borrowed from it outlives it.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.length) } {
            log::warn!("shared memory could not be given back: {error}");
        }
    }
}

/// A second mapping of a segment's memory, private and untouched, whose pages can replace those of the segment's mapping.
///
/// A page is replaced in one step, with the same content, while other threads of this process read and write it: what they
/// write before is in the shared page, which the private one is copied from.
pub(super) struct SparePages {
    base: usize,
    /// The pages that have not been used, as offsets.
    left: Vec<Range<usize>>,
}

impl SparePages {
    /// Replaces these whole pages of the segment's mapping, which begins at `start`; other processes do not reach them any
    /// more. Pages that have been replaced before stay as they are.
    ///
    /// # Errors
    ///
    /// When the operating system refuses. Before Linux 5.14 replaced pages stay visible until they are written.
    pub(super) fn replace(&mut self, start: usize, pages: &Range<usize>) -> io::Result<()> {
        let mut left = Vec::new();
        let mut result = Ok(());
        for run in std::mem::take(&mut self.left) {
            let used = run.start.max(pages.start)..run.end.min(pages.end);
            if used.is_empty() {
                left.push(run);
                continue;
            }
            let moved = self.move_to(start, &used);
            left.extend(
                [run.start..used.start, used.end..run.end].into_iter().filter(|rest| !rest.is_empty()),
            );
            if moved.is_err() {
                left.push(used);
            }
            result = result.and(moved);
        }
        self.left = left;
        result
    }

    fn move_to(&self, start: usize, pages: &Range<usize>) -> io::Result<()> {
        let old = ptr::with_exposed_provenance_mut(self.base + pages.start);
        let new = ptr::with_exposed_provenance_mut(start + pages.start);
        // SAFETY: the old pages are this value's and nothing refers to them. The new addresses stay mapped, with the same
        // content.
        unsafe { mremap_fixed(old, pages.len(), pages.len(), MremapFlags::MAYMOVE, new)? };
        // SAFETY: this copies the pages, which does not change their content.
        unsafe { madvise(new, pages.len(), Advice::LinuxPopulateWrite).map_err(io::Error::from) }
    }
}

impl Drop for SparePages {
    fn drop(&mut self) {
        for run in &self.left {
            let start = ptr::with_exposed_provenance_mut(self.base + run.start);
            // SAFETY: these pages are this value's and nothing refers to them.
            if let Err(error) = unsafe { munmap(start, run.len()) } {
                log::warn!("a spare mapping of shared memory could not be given back: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_knows_the_place_and_the_token_shares_the_memory() {
        let token = [7; TOKEN_BYTES];
        let mut one = Segment::create(8192, &token).unwrap();
        let place = one.place().unwrap();
        let other = Segment::open(place, 8192, &token).unwrap();
        // SAFETY: both mappings are 8192 bytes long, and this thread alone uses them.
        unsafe {
            one.base.as_ptr().add(100).write(42);
            assert_eq!(other.base.as_ptr().add(100).read(), 42);
        }
        assert!(Segment::open(place, 4096, &token).is_err(), "another size");
        assert!(Segment::open(place, 8192, &[8; TOKEN_BYTES]).is_err(), "another token");
        one.close();
        assert!(one.place().is_none());
    }

    #[test]
    fn a_file_that_is_none_of_ours_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let place = SegmentLocation { process: process::id(), file: file.as_raw_fd() as u32 };
        assert!(Segment::open(place, 8192, &[0; TOKEN_BYTES]).is_err(), "not sealed");
        assert!(
            Segment::open(SegmentLocation { process: u32::MAX, file: 0 }, 8192, &[0; TOKEN_BYTES]).is_err()
        );
    }
}
