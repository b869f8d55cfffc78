//! System calls on sockets for which no library has a wrapper.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

// The numbers are from asm-generic/socket.h. Architectures with other numbers are not supported.
const SO_MAX_PACING_RATE: libc::c_int = 47;
const SO_MEMINFO: libc::c_int = 55;
/// The number of values that `SO_MEMINFO` returns.
const MEMINFO_VALUES: usize = libc::SK_MEMINFO_DROPS as usize + 1;

/// The state of a socket's send buffer. The bytes include the kernel's overhead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SendSpace {
    /// The number of bytes that are not sent or not acknowledged.
    pub(super) queued: usize,
    /// The number of bytes that still fit into the buffer.
    pub(super) free: usize,
}

/// Reads the state of a socket's send buffer.
pub(super) fn send_space<S: AsFd>(socket: &S) -> io::Result<SendSpace> {
    let mut values = [0u32; MEMINFO_VALUES];
    let mut length = size_of_val(&values) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the values, and stores the number of written bytes in
    // `length`.
    let result = unsafe {
        let (destination, length) = (values.as_mut_ptr().cast(), &raw mut length);
        libc::getsockopt(descriptor, libc::SOL_SOCKET, SO_MEMINFO, destination, length)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let value = |index: libc::c_int| values[index as usize] as usize;
    let queued = value(libc::SK_MEMINFO_WMEM_QUEUED);
    Ok(SendSpace { queued, free: value(libc::SK_MEMINFO_SNDBUF).saturating_sub(queued) })
}

/// Returns whether a socket accepts bytes now. If not, the kernel will report an event when the socket accepts bytes
/// again, as after a write that would have blocked.
pub(super) fn is_writable<S: AsFd>(socket: &S) -> io::Result<bool> {
    let mut entry = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: there is one entry, and the kernel writes only to this entry. The call does not wait.
    let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
    match ready {
        0 => Ok(false),
        // If the socket has an error, the next write returns it.
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the maximum rate at which the kernel sends on a socket, in bytes per second.
pub(super) fn set_pacing<S: AsFd>(socket: &S, bytes_per_second: u64) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the rate, and the call passes its length.
    let result = unsafe {
        let source = (&raw const bytes_per_second).cast();
        let length = size_of_val(&bytes_per_second) as libc::socklen_t;
        libc::setsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, source, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads the rate that [`set_pacing`] has set.
#[cfg(test)]
pub(super) fn read_pacing<S: AsFd>(socket: &S) -> io::Result<u64> {
    let mut rate = 0u64;
    let mut length = size_of_val(&rate) as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to the rate, and stores the number of written bytes in
    // `length`.
    let result = unsafe {
        let (destination, length) = ((&raw mut rate).cast(), &raw mut length);
        libc::getsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, destination, length)
    };
    if result == 0 { Ok(rate) } else { Err(io::Error::last_os_error()) }
}
