//! What the kernel is asked and told about a socket by system calls that no library wraps.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

// asm-generic/socket.h; the few architectures that number their options otherwise are not built for.
const SO_MAX_PACING_RATE: libc::c_int = 47;
const SO_MEMINFO: libc::c_int = 55;
/// How many figures the kernel gives, at most.
const FIGURES: usize = libc::SK_MEMINFO_DROPS as usize + 1;

/// What a socket's sending side holds, in bytes as the kernel counts them, its own overhead included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SendSpace {
    /// Not sent, or not acknowledged.
    pub(super) queued: usize,
    /// What it may still take.
    pub(super) free: usize,
}

/// What a socket's sending side holds and may take.
pub(super) fn room<S: AsFd>(socket: &S) -> io::Result<SendSpace> {
    let mut figures = [0u32; FIGURES];
    let mut length = size_of_val(&figures) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the figures, and how many to `length`.
    let got = unsafe {
        let (place, length) = (figures.as_mut_ptr().cast(), &raw mut length);
        libc::getsockopt(descriptor, libc::SOL_SOCKET, SO_MEMINFO, place, length)
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    let figure = |which: libc::c_int| figures[which as usize] as usize;
    let queued = figure(libc::SK_MEMINFO_WMEM_QUEUED);
    Ok(SendSpace { queued, free: figure(libc::SK_MEMINFO_SNDBUF).saturating_sub(queued) })
}

/// Whether a socket would take bytes now. If not, the kernel takes note that somebody wants to know: an event comes when it
/// does, as after a write that would have blocked.
pub(super) fn is_writable<S: AsFd>(socket: &S) -> io::Result<bool> {
    let mut asked = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: there is one entry, and the kernel writes to it alone; it does not wait.
    let ready = unsafe { libc::poll(&raw mut asked, 1, 0) };
    match ready {
        0 => Ok(false),
        // An error on the socket is one more reason to write to it: the write says which.
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the kernel send at most so many bytes a second through a socket, evenly.
pub(super) fn set_pacing<S: AsFd>(socket: &S, bytes_per_second: u64) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the rate, whose length is given.
    let set = unsafe {
        let place = (&raw const bytes_per_second).cast();
        let length = size_of_val(&bytes_per_second) as libc::socklen_t;
        libc::setsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, place, length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What was asked for.
#[cfg(test)]
pub(super) fn pacing<S: AsFd>(socket: &S) -> io::Result<u64> {
    let mut rate = 0u64;
    let mut length = size_of_val(&rate) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the rate, and how many to `length`.
    let got = unsafe {
        let (place, length) = ((&raw mut rate).cast(), &raw mut length);
        libc::getsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, place, length)
    };
    if got == 0 { Ok(rate) } else { Err(io::Error::last_os_error()) }
}
