//! Short turns on a processor for a thread that mostly waits for bytes.

use std::io;

/// What the thread asks for at a time, in nanoseconds; the least that Linux grants.
const TURN: u64 = 100_000;
const THIS_THREAD: libc::pid_t = 0;
const NO_FLAGS: libc::c_uint = 0;

/// Asks the scheduler for short turns for the calling thread, as those of threads that want to run soon rather than long.
///
/// A thread that moves bytes beside threads that compute on the same processors is woken often and runs for microseconds;
/// with turns as long as theirs it would wait for the end of one each time, and its peers with it. Its share of the
/// processor stays the same: Linux takes the length of a turn of `SCHED_OTHER` into account from 6.12 on (sched(7); Stoica
/// and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995, has the theory). Earlier ones change nothing. A thread
/// of any other policy keeps what it has.
///
/// # Errors
///
/// What the system says if it refuses. Only time is lost.
pub(crate) fn request_short_slices() -> io::Result<()> {
    let mut attributes = of_this_thread()?;
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attributes.sched_runtime = TURN;
    // SAFETY: the kernel reads the attributes, whose length stands in them.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, THIS_THREAD, &raw const attributes, NO_FLAGS) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn of_this_thread() -> io::Result<libc::sched_attr> {
    // What all kernels since 3.14 know of.
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
    let place = &raw mut attributes;
    // SAFETY: the kernel writes at most `size` bytes to the attributes.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, THIS_THREAD, place, size, NO_FLAGS) };
    if got == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_become_short_and_nothing_else_changes() {
        let before = of_this_thread().unwrap();
        for _ in 0..2 {
            request_short_slices().unwrap();
            let after = of_this_thread().unwrap();
            // Kernels before 6.12 say 0.
            assert!([0, TURN].contains(&after.sched_runtime), "{} ns", after.sched_runtime);
            assert_eq!(
                (after.sched_policy, after.sched_nice, after.sched_flags),
                (before.sched_policy, before.sched_nice, before.sched_flags)
            );
        }
    }
}
