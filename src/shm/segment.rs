//! A memory segment that several processes map.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};
use rustix::param::page_size;

use super::copy::{copy_from_peer, copy_past_caches};
use super::memory::{RoundsMemory, SegmentMemory, UNIT_BYTES, WORD_BYTES};

/// The length in bytes of the token at the beginning of a segment, which a process that opens the segment checks.
pub const TOKEN_BYTES: usize = 32;

const _: () = assert!(TOKEN_BYTES <= UNIT_BYTES && UNIT_BYTES.is_multiple_of(WORD_BYTES));

/// Where other processes of this host find a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLocation {
    pub process: u32,
    /// The number of the file descriptor in that process.
    pub file: u32,
}

pub struct Segment {
    /// The address of the first byte, which is the beginning of a page.
    pub(super) base: NonNull<u8>,
    length: usize,
    /// The file, which stays open until all other processes have opened it.
    file: Option<OwnedFd>,
}

// SAFETY: only this value owns the mapping, and any thread may read and write the memory. The types that use a segment
// decide which thread or process may access which bytes, and when.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`. No method with `&self` changes the value.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment of `length` bytes. All bytes after the token are zero. Returns an error if the operating system
    /// refuses the memory, or `length` is less than [`TOKEN_BYTES`].
    pub fn create(length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("ringtrain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let segment = Self::map(file, length)?;
        // SAFETY: `map` has checked that the mapping is at least as long as the token. No other process knows the segment.
        unsafe { ptr::copy_nonoverlapping(token.as_ptr(), segment.base.as_ptr(), TOKEN_BYTES) };
        Ok(segment)
    }

    /// Opens a segment of `length` bytes that another process has created. Returns an error if this process cannot open the file
    /// (for example a file of another user or in another container), or if the size, the seals or the token are wrong.
    pub fn open(location: SegmentLocation, length: usize, token: &[u8; TOKEN_BYTES]) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", location.process, location.file);
        let file = OwnedFd::from(OpenOptions::new().read(true).write(true).open(path)?);
        let seals = fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::other("the size of the shared memory is not sealed"));
        }
        let file = File::from(file);
        if file.metadata()?.len() != length as u64 {
            return Err(io::Error::other("the shared memory has another size"));
        }
        let mut segment = Self::map(file.into(), length)?;
        segment.file = None;
        // SAFETY: the mapping is at least as long as the token. The creator wrote the token before it sent the location.
        let found = unsafe { segment.base.cast::<[u8; TOKEN_BYTES]>().read() };
        if found != *token {
            return Err(io::Error::other("the shared memory has another token"));
        }
        Ok(segment)
    }

    /// Maps a new segment `count` times.
    #[cfg(test)]
    pub(crate) fn for_tests(length: usize, count: usize) -> Vec<Self> {
        let token = [1; TOKEN_BYTES];
        let mut segments = vec![Self::create(length, &token).unwrap()];
        let location = segments[0].location().unwrap();
        segments.resize_with(count, || Self::open(location, length, &token).unwrap());
        segments
    }

    /// Returns where other processes find the segment, or `None` after [`Segment::take_file`].
    pub fn location(&self) -> Option<SegmentLocation> {
        let file = self.file.as_ref()?.as_raw_fd();
        Some(SegmentLocation { process: process::id(), file: u32::try_from(file).ok()? })
    }

    /// Removes and returns the file. When the caller drops it, no other process can open the segment any more. All mappings stay.
    pub fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    /// Creates a second, private mapping of the memory. Call this method before [`Segment::take_file`]. Returns an error if
    /// the operating system refuses the mapping, or if the file is closed.
    pub(super) fn map_spare_pages(&self) -> io::Result<SparePages> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let length = self.length.next_multiple_of(page_size());
        // SAFETY: the kernel chooses addresses that this process does not use. The size of the file is sealed.
        let base = unsafe { mmap(ptr::null_mut(), length, protection, flags, file, 0)? };
        let shared_base = self.base.as_ptr().expose_provenance();
        let unused = std::iter::once(0..length).collect();
        Ok(SparePages { base: base.expose_provenance(), shared_base, unused })
    }

    fn map(file: OwnedFd, length: usize) -> io::Result<Self> {
        if length < TOKEN_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses unused addresses. The file is as long as the mapping, and its size is sealed.
        let base = unsafe { mmap(ptr::null_mut(), length, protection, flags, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length, file: Some(file) })
    }

    fn address(&self, offset: usize, length: usize) -> NonNull<u8> {
        address(self.base, self.length, offset, length)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let [word] = self.words(offset);
        word
    }

    fn words<const N: usize>(&self, offset: usize) -> &[AtomicU64; N] {
        assert!(offset.is_multiple_of(WORD_BYTES), "a word of shared memory must be aligned");
        let words = self.address(offset, N * WORD_BYTES).cast::<[AtomicU64; N]>();
        // SAFETY: the words are inside the mapping, which lives as long as `self`. The mapping begins at the beginning of a page,
        // so the words are aligned. All processes access them only as atomics.
        unsafe { words.as_ref() }
    }
}

/// Returns the address of `length` bytes at `offset` of a memory of `memory_length` bytes that begins at `base`. The function has
/// no `&self`, because the compiler makes longer code of the same comparisons with a field.
fn address(base: NonNull<u8>, memory_length: usize, offset: usize, length: usize) -> NonNull<u8> {
    let is_inside = offset.checked_add(length).is_some_and(|end| end <= memory_length);
    assert!(is_inside, "an access to shared memory must be inside the memory");
    // SAFETY: the offset is inside the memory, which begins at `base`, or at its end.
    unsafe { base.add(offset) }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `map` has created this mapping, and no reference into the mapping outlives this value.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.length) } {
            log::warn!("shared memory could not be unmapped: {error}");
        }
    }
}

impl SegmentMemory for Segment {
    fn length(&self) -> usize {
        self.length
    }

    fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        self.word(offset).load(ordering)
    }

    fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        self.word(offset).store(value, ordering);
    }

    fn load_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let words = self.words::<N>(offset);
        std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
    }

    fn store_words<const N: usize>(&self, offset: usize, values: &[u64; N]) {
        for (word, value) in self.words::<N>(offset).iter().zip(values) {
            word.store(*value, Ordering::Relaxed);
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn prefetch(&self, offset: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

        // SAFETY: the instruction is a hint, which has no effect on the memory and is allowed for every address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.address(offset, 1).as_ptr().cast()) }
    }

    fn populate(&self, bytes: Range<usize>) -> bool {
        let start = bytes.start - bytes.start % page_size();
        let first = self.address(start, bytes.end - start).as_ptr().cast();
        // SAFETY: the bytes are inside the mapping, and the call does not change their content.
        let populated = unsafe { madvise(first, bytes.end - start, Advice::LinuxPopulateWrite) };
        populated.inspect_err(|error| log::debug!("shared memory could not be populated: {error}")).is_ok()
    }

    fn swap(&self, offset: usize, value: u64, ordering: Ordering) -> u64 {
        self.word(offset).swap(value, ordering)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn read(&self, start: usize, target: &mut [u8]) {
        let source = self.address(start, target.len());
        // SAFETY: the source is inside the mapping. The target is memory of this process, because no reference points into the
        // mapping, so they do not overlap. A rank that keeps to the protocol does not write the source during the copy.
        unsafe { copy_from_peer(source, target) }
    }

    fn read_past_caches(&self, start: usize, target: &mut [u8]) {
        let source = self.address(start, target.len());
        // SAFETY: as in `read`.
        unsafe { copy_past_caches(source, target) }
    }

    fn write(&self, start: usize, source: &[u8]) {
        let target = self.address(start, source.len());
        // SAFETY: as in `read`. A rank that keeps to the protocol does not read the target during the copy.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), source.len()) }
    }
}

impl RoundsMemory for Segment {
    type Bytes<'a> = &'a [u8];

    unsafe fn bytes(&self, start: usize, length: usize) -> &[u8] {
        let bytes = self.address(start, length);
        // SAFETY: the bytes are inside the mapping, which lives as long as `self`. The caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr(), length) }
    }

    fn before_access_in_place(&self, _bytes: *const [u8], _is_write: bool) {}
}

/// A second, private mapping of a segment's memory, whose pages no thread uses until they replace pages of the segment's own
/// mapping. The kernel replaces a page in one step. Meanwhile other threads of this process can read and write the page: their
/// earlier writes are in the shared page, from which the kernel copies the private page.
pub(super) struct SparePages {
    /// The address of the private mapping.
    base: usize,
    /// The address of the segment's own mapping.
    shared_base: usize,
    /// The pages that have not replaced other pages, as ranges of byte offsets in the mapping.
    unused: Vec<Range<usize>>,
}

impl SparePages {
    /// Replaces all pages of the segment's mapping that contain any of `bytes` by private pages, unless an earlier call has done
    /// so. Returns an error if the operating system refuses. Linux versions before 5.14 cannot copy the replaced pages at once: a
    /// page then shows the writes of other processes until this process writes to it.
    pub(super) fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (page, start) = (page_size(), bytes.as_ptr().addr() - self.shared_base);
        let pages = start - start % page..(start + bytes.len()).next_multiple_of(page);
        let mut unused = Vec::new();
        let mut result = Ok(());
        for range in std::mem::take(&mut self.unused) {
            let overlap = range.start.max(pages.start)..range.end.min(pages.end);
            if overlap.is_empty() {
                unused.push(range);
                continue;
            }
            let rests = [range.start..overlap.start, overlap.end..range.end];
            unused.extend(rests.into_iter().filter(|rest| !rest.is_empty()));
            result = result.and(match self.move_pages(&overlap) {
                Ok(()) => self.copy_pages(&overlap),
                Err(error) => {
                    unused.push(overlap);
                    Err(error)
                }
            });
        }
        self.unused = unused;
        result
    }

    fn move_pages(&self, pages: &Range<usize>) -> io::Result<()> {
        let old = ptr::with_exposed_provenance_mut(self.base + pages.start);
        let new = ptr::with_exposed_provenance_mut(self.shared_base + pages.start);
        // SAFETY: no reference points to the old pages, which this value owns. The new ones are mapped with the same content.
        unsafe { mremap_fixed(old, pages.len(), pages.len(), MremapFlags::MAYMOVE, new)? };
        Ok(())
    }

    /// Makes the kernel copy private pages now, and not at the next write.
    fn copy_pages(&self, pages: &Range<usize>) -> io::Result<()> {
        let first = ptr::with_exposed_provenance_mut(self.shared_base + pages.start);
        // SAFETY: the call copies the pages, and does not change their content.
        unsafe { madvise(first, pages.len(), Advice::LinuxPopulateWrite).map_err(io::Error::from) }
    }
}

impl Drop for SparePages {
    fn drop(&mut self) {
        for range in &self.unused {
            let start = ptr::with_exposed_provenance_mut(self.base + range.start);
            // SAFETY: this value owns these pages, and no reference points to them.
            if let Err(error) = unsafe { munmap(start, range.len()) } {
                log::warn!("a spare mapping of shared memory could not be unmapped: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_the_location_and_the_token_shares_the_memory() {
        let token = [7; TOKEN_BYTES];
        let mut one = Segment::create(8192, &token).unwrap();
        let location = one.location().unwrap();
        let other = Segment::open(location, 8192, &token).unwrap();
        // SAFETY: both mappings are 8192 bytes long, and only this thread uses them.
        unsafe {
            one.base.as_ptr().add(100).write(42);
            assert_eq!(other.base.as_ptr().add(100).read(), 42);
        }
        assert!(Segment::open(location, 4096, &token).is_err(), "the size is wrong");
        assert!(Segment::open(location, 8192, &[8; TOKEN_BYTES]).is_err(), "the token is wrong");
        drop(one.take_file());
        assert!(one.location().is_none());
    }

    #[test]
    fn a_file_that_is_not_a_segment_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let is_refused = |process, file| {
            Segment::open(SegmentLocation { process, file }, 8192, &[0; TOKEN_BYTES]).is_err()
        };
        assert!(is_refused(process::id(), file.as_raw_fd() as u32), "the size is not sealed");
        assert!(is_refused(u32::MAX, 0));
    }
}
