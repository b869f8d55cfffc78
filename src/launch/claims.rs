//! Which processors the jobs of this machine have claimed.
//!
//! A claim is a socket with an abstract name, which one process at a time can have. The kernel frees the name when the process
//! ends, also by SIGKILL, and no file is left. Jobs see each other's claims within a network namespace, also
//! those of other users.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::thread;
use std::time::{Duration, Instant};

use super::topology::Core;

/// The most jobs that are counted on one core.
const JOBS_COUNTED_MAX: usize = 16;

/// How long to wait while other jobs claim their processors, which takes them milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait before the next attempt.
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// The claims of all jobs whose names begin with the same prefix.
#[derive(Debug)]
pub(super) struct ClaimRegistry {
    prefix: String,
    /// Keeps other jobs from claiming processors at the same time. `None` if it could not be had in time.
    _lock: Option<UnixDatagram>,
}

impl ClaimRegistry {
    /// Locks the registry of this machine until it is dropped.
    pub(super) fn open() -> Self {
        Self::with_prefix("ringrun.processor")
    }

    fn with_prefix(prefix: &str) -> Self {
        let until = Instant::now() + LOCK_TIMEOUT;
        let lock = loop {
            match claim(&format!("{prefix}.lock")) {
                Ok(lock) => break Some(lock),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                    thread::sleep(LOCK_RETRY);
                }
                Err(_) => break None,
            }
        };
        Self { prefix: prefix.to_owned(), _lock: lock }
    }

    /// How many jobs have claimed each of these cores.
    pub(super) fn jobs(&self, cores: &[Core]) -> Vec<usize> {
        let is_taken = |core: &Core, job: usize| {
            claim(&self.name(core, job)).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        };
        let count = |core: &Core| (0..JOBS_COUNTED_MAX).filter(|&job| is_taken(core, job)).count();
        cores.iter().map(count).collect()
    }

    /// Claims a core for as long as the socket lives; `None` if the system refuses a socket, or too many jobs have it.
    pub(super) fn claim(&self, core: &Core) -> Option<UnixDatagram> {
        (0..JOBS_COUNTED_MAX).find_map(|job| claim(&self.name(core, job)).ok())
    }

    fn name(&self, core: &Core, job: usize) -> String {
        let processor = core.processors.first().copied().unwrap_or_default();
        format!("{}.{processor}.{job}", self.prefix)
    }
}

fn claim(name: &str) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_lasts_as_long_as_its_socket() {
        let prefix = format!("ringrun.test.{}", std::process::id());
        let core = |processor| Core { numa_node: 0, processors: vec![processor] };
        let cores = [core(0), core(1)];
        let registry = ClaimRegistry::with_prefix(&prefix);
        assert_eq!(registry.jobs(&cores), [0, 0]);
        let first = registry.claim(&cores[1]).unwrap();
        let second = registry.claim(&cores[1]).unwrap();
        assert_eq!(registry.jobs(&cores), [0, 2]);
        drop(first);
        assert_eq!(registry.jobs(&cores), [0, 1]);
        drop(second);
        assert_eq!(registry.jobs(&cores), [0, 0]);
    }

    #[test]
    fn jobs_claim_one_after_the_other() {
        let prefix = format!("ringrun.test.lock.{}", std::process::id());
        let first = ClaimRegistry::with_prefix(&prefix);
        let name = format!("{prefix}.lock");
        assert!(claim(&name).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse));
        drop(first);
        assert!(claim(&name).is_ok());
    }
}
