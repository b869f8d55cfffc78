//! System calls on sockets that no library wraps.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

// asm-generic/socket.h. Architectures with other numbers are not supported.
const SO_MAX_PACING_RATE: libc::c_int = 47;
const SO_MEMINFO: libc::c_int = 55;
/// The number of values that the kernel may return.
const FIGURES: usize = libc::SK_MEMINFO_DROPS as usize + 1;

/// The state of a socket's send buffer, in bytes as the kernel counts them, with its overhead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SendSpace {
    /// Bytes that are not sent or not acknowledged.
    pub(super) queued: usize,
    /// Bytes that it can still take.
    pub(super) free: usize,
}

/// Reads the state of a socket's send buffer.
pub(super) fn room<S: AsFd>(socket: &S) -> io::Result<SendSpace> {
    let mut figures = [0u32; FIGURES];
    let mut length = size_of_val(&figures) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the values, and their number to `length`.
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

/// Whether a socket can take bytes now. If not, the kernel reports an event when it can, as after a write that would have
/// blocked.
pub(super) fn is_writable<S: AsFd>(socket: &S) -> io::Result<bool> {
    let mut asked = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: there is one entry, and the kernel writes only to that. The call does not wait.
    let ready = unsafe { libc::poll(&raw mut asked, 1, 0) };
    match ready {
        0 => Ok(false),
        // If the socket has an error, the next write returns it.
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the rate at which the kernel sends at most through a socket, in bytes per second.
pub(super) fn set_pacing<S: AsFd>(socket: &S, bytes_per_second: u64) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the rate, and its length is given.
    let set = unsafe {
        let place = (&raw const bytes_per_second).cast();
        let length = size_of_val(&bytes_per_second) as libc::socklen_t;
        libc::setsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, place, length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The rate that was set.
#[cfg(test)]
pub(super) fn pacing<S: AsFd>(socket: &S) -> io::Result<u64> {
    let mut rate = 0u64;
    let mut length = size_of_val(&rate) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the rate, and their number to `length`.
    let got = unsafe {
        let (place, length) = ((&raw mut rate).cast(), &raw mut length);
        libc::getsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, place, length)
    };
    if got == 0 { Ok(rate) } else { Err(io::Error::last_os_error()) }
}
