//! Socket functions that call the kernel directly, because no Rust library wraps these system calls.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd as _};

use mio::net::TcpStream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bundle::{Connection, SendSpace};

// From asm-generic/socket.h. A few architectures have other numbers, and are not supported.
const SO_MAX_PACING_RATE: libc::c_int = 47;
const SO_MEMINFO: libc::c_int = 55;
const MEMINFO_VALUE_COUNT: usize = libc::SK_MEMINFO_DROPS as usize + 1;

/// If the last answer of the other host arrived more than this number of milliseconds before the last send, the other
/// host counts as silent. The kernel sends unacknowledged data again after 200 ms at the earliest.
const ACK_BEFORE_LAST_SEND_MS_MAX: u32 = 100;

impl Connection for TcpStream {
    fn send_space(&self) -> io::Result<SendSpace> {
        let mut values = [0u32; MEMINFO_VALUE_COUNT];
        read_option(self, libc::SOL_SOCKET, SO_MEMINFO, bytemuck::cast_slice_mut(&mut values))?;
        let value = |index: libc::c_int| values[index as usize] as usize;
        let queued = value(libc::SK_MEMINFO_WMEM_QUEUED);
        Ok(SendSpace { queued, free: value(libc::SK_MEMINFO_SNDBUF).saturating_sub(queued) })
    }

    fn is_writable(&self) -> io::Result<bool> {
        // If the socket has an error, the next write returns this error.
        let mut entries = [PollFd::new(self, PollFlags::OUT)];
        Ok(poll(&mut entries, Some(&Timespec::default()))? > 0)
    }

    fn close_sending(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// Returns whether the other host has not acknowledged everything that was sent. False if the socket has failed.
pub(super) fn has_unacknowledged_bytes(socket: &TcpStream) -> bool {
    socket.send_space().is_ok_and(|space| space.queued > 0)
}

/// Returns whether the kernel has sent data of this socket again, and the other host has not answered since then.
pub(super) fn is_retransmission_unanswered<S: AsFd>(socket: &S) -> bool {
    // The byte offsets of fields of the kernel's `struct tcp_info`. The kernel writes what fits in the buffer.
    const TCP_INFO_RETRANSMITS_OFFSET: usize = 2;
    const TCP_INFO_PROBES_OFFSET: usize = 3;
    const TCP_INFO_UNACKED_OFFSET: usize = 24;
    const TCP_INFO_LAST_DATA_SENT_MS_OFFSET: usize = 44;
    const TCP_INFO_LAST_ACK_RECEIVED_MS_OFFSET: usize = 56;
    const TCP_INFO_BYTES: usize = TCP_INFO_LAST_ACK_RECEIVED_MS_OFFSET + size_of::<u32>();
    let mut info = [0u8; TCP_INFO_BYTES];
    let is_known = read_option(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).is_ok();
    let value = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    // A host with a full receive buffer still answers repeated data, so this host does not count as silent.
    let is_unanswered = value(TCP_INFO_LAST_ACK_RECEIVED_MS_OFFSET)
        > value(TCP_INFO_LAST_DATA_SENT_MS_OFFSET).saturating_add(ACK_BEFORE_LAST_SEND_MS_MAX);
    // If this host cannot send at all, for example because its address was removed, the kernel counts only probes.
    let is_sent_again = info[TCP_INFO_RETRANSMITS_OFFSET] > 0 && value(TCP_INFO_UNACKED_OFFSET) > 0
        || info[TCP_INFO_PROBES_OFFSET] > 0;
    is_known && is_unanswered && is_sent_again
}

/// Sets the maximum rate at which the kernel sends on a socket, in bytes per second.
pub(super) fn set_pacing<S: AsFd>(socket: &S, bytes_per_second: u64) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel only reads the rate, and `length` is the size of the rate.
    let result = unsafe {
        let source = (&raw const bytes_per_second).cast();
        let length = size_of_val(&bytes_per_second) as libc::socklen_t;
        libc::setsockopt(descriptor, libc::SOL_SOCKET, SO_MAX_PACING_RATE, source, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
pub(super) fn read_pacing<S: AsFd>(socket: &S) -> io::Result<u64> {
    let mut rate = 0u64;
    read_option(socket, libc::SOL_SOCKET, SO_MAX_PACING_RATE, bytemuck::bytes_of_mut(&mut rate))?;
    Ok(rate)
}

/// Reads an option of a socket into `value`, as many bytes as fit.
fn read_option<S: AsFd>(
    socket: &S,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut [u8],
) -> io::Result<()> {
    let mut length = value.len() as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to `value`, and stores the number of written bytes in `length`.
    let result =
        unsafe { libc::getsockopt(descriptor, level, name, value.as_mut_ptr().cast(), &raw mut length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
