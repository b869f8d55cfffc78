//! Requests short time slices on a processor for a thread that mostly waits for bytes.

use std::io;

/// The requested time slice in nanoseconds. Linux grants no shorter time slice.
const TIME_SLICE_NS: u64 = 100_000;
const THIS_THREAD: libc::pid_t = 0;
const NO_FLAGS: libc::c_uint = 0;

/// Asks the scheduler to give the calling thread short time slices, which do not change its share of the processor. Otherwise a
/// thread that moves bytes would wait until the long slices of computing threads end, and the peers of this rank would wait too.
///
/// Linux 6.12 and later gives a `SCHED_OTHER` thread slices of the requested length; see sched(7). Earlier versions ignore the
/// request. For other policies, this function does nothing. Returns the operating system's error if it refuses. Theory: Stoica
/// and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995.
pub(crate) fn request_short_slices() -> io::Result<()> {
    let mut attributes = read_attributes()?;
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attributes.sched_runtime = TIME_SLICE_NS;
    let attributes = &raw const attributes;
    // SAFETY: the kernel reads the attributes, which contain their own length.
    let code = unsafe { libc::syscall(libc::SYS_sched_setattr, THIS_THREAD, attributes, NO_FLAGS) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn read_attributes() -> io::Result<libc::sched_attr> {
    // Linux 3.14 and later accepts attributes of this size.
    let size = size_of::<libc::sched_attr>() as u32;
    let mut attributes = libc::sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    let destination = &raw mut attributes;
    // SAFETY: the kernel writes at most `size` bytes to the attributes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, THIS_THREAD, destination, size, NO_FLAGS) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_short_slices_keeps_the_policy_and_the_nice_value() {
        let before = read_attributes().unwrap();
        for _ in 0..2 {
            request_short_slices().unwrap();
            let after = read_attributes().unwrap();
            // Kernels before 6.12 report a slice of 0.
            assert!([0, TIME_SLICE_NS].contains(&after.sched_runtime), "{} ns", after.sched_runtime);
            assert_eq!(
                (after.sched_policy, after.sched_nice, after.sched_flags),
                (before.sched_policy, before.sched_nice, before.sched_flags)
            );
        }
    }
}
