//! Lets jobs claim processors, so that several jobs on one machine use different processors.
//!
//! A claim is a Unix socket with an abstract name, which only one process at a time can bind. When the process ends,
//! even by SIGKILL, the kernel frees the name. No file remains. Jobs in the same network namespace see each other's
//! claims, including the claims of other users.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::thread;
use std::time::{Duration, Instant};

use super::topology::PhysicalCore;

/// The maximal number of jobs that can claim the same core.
const JOBS_PER_CORE_MAX: usize = 16;

/// How long to wait for the lock. A job holds the lock only while it claims its processors, which takes some
/// milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two attempts to get the lock.
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(2);

/// The claims of all jobs on this machine. The name of each claim begins with `prefix`.
#[derive(Debug)]
pub(super) struct ClaimRegistry {
    prefix: String,
    /// The lock. While this job holds the lock, other jobs do not claim processors. `None` if this job could not get
    /// the lock.
    _lock: Option<UnixDatagram>,
}

impl ClaimRegistry {
    /// Opens and locks the registry of this machine. Dropping the registry unlocks it.
    pub(super) fn lock_for_machine() -> Self {
        Self::lock_with_prefix("ringrun.processor")
    }

    fn lock_with_prefix(prefix: &str) -> Self {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let lock = loop {
            match bind_abstract_socket(&format!("{prefix}.lock")) {
                Ok(lock) => break Some(lock),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                    thread::sleep(LOCK_RETRY_PAUSE);
                }
                Err(_) => break None,
            }
        };
        Self { prefix: prefix.to_owned(), _lock: lock }
    }

    /// Returns the number of jobs that have claimed each of these cores.
    pub(super) fn count_jobs(&self, cores: &[PhysicalCore]) -> Vec<usize> {
        let is_claimed = |core: &PhysicalCore, slot: usize| {
            bind_abstract_socket(&self.claim_name(core, slot))
                .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        };
        let count =
            |core: &PhysicalCore| (0..JOBS_PER_CORE_MAX).filter(|&slot| is_claimed(core, slot)).count();
        cores.iter().map(count).collect()
    }

    /// Claims a core for this job. Dropping the returned socket ends the claim. Returns `None` if the system refuses
    /// a socket, or if too many jobs have claimed the core.
    pub(super) fn claim_core(&self, core: &PhysicalCore) -> Option<UnixDatagram> {
        (0..JOBS_PER_CORE_MAX).find_map(|slot| bind_abstract_socket(&self.claim_name(core, slot)).ok())
    }

    /// Returns the socket name of a claim of a core. Each job that claims the core has another `slot`, which is less
    /// than [`JOBS_PER_CORE_MAX`].
    fn claim_name(&self, core: &PhysicalCore, slot: usize) -> String {
        let processor = core.processors.first().copied().unwrap_or_default();
        format!("{}.{processor}.{slot}", self.prefix)
    }
}

fn bind_abstract_socket(name: &str) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_ends_when_its_socket_is_dropped() {
        let prefix = format!("ringrun.test.{}", std::process::id());
        let core = |processor| PhysicalCore { numa_node: 0, processors: vec![processor] };
        let cores = [core(0), core(1)];
        let registry = ClaimRegistry::lock_with_prefix(&prefix);
        assert_eq!(registry.count_jobs(&cores), [0, 0]);
        let first = registry.claim_core(&cores[1]).unwrap();
        let second = registry.claim_core(&cores[1]).unwrap();
        assert_eq!(registry.count_jobs(&cores), [0, 2]);
        drop(first);
        assert_eq!(registry.count_jobs(&cores), [0, 1]);
        drop(second);
        assert_eq!(registry.count_jobs(&cores), [0, 0]);
    }

    #[test]
    fn the_registry_is_locked_until_it_is_dropped() {
        let prefix = format!("ringrun.test.lock.{}", std::process::id());
        let first = ClaimRegistry::lock_with_prefix(&prefix);
        let name = format!("{prefix}.lock");
        assert!(bind_abstract_socket(&name).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse));
        drop(first);
        assert!(bind_abstract_socket(&name).is_ok());
    }
}
