//! What a host says about itself.

use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::thread::available_parallelism;

use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::rendezvous::host_name;

/// What a host says about itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct HostFacts {
    /// The name that the host has for itself.
    pub(super) host_name: String,
    /// The version of ringtrain.
    pub(super) version: String,
    /// The address at which the other hosts dial this host.
    pub(super) address: IpAddr,
    /// The network interface with this address.
    pub(super) interface: Option<InterfaceFacts>,
    pub(super) processor: String,
    /// The number of processors that the job may use.
    pub(super) processors: usize,
    pub(super) memory_bytes: u64,
    /// The limit of open files, and the limit up to which a process may raise it. `None` for no limit.
    pub(super) open_files: (Option<u64>, Option<u64>),
    /// The free bytes of `/dev/shm`, which ranks of a host use for collectives. `None` if there is no `/dev/shm`.
    pub(super) shared_memory_bytes: Option<u64>,
    /// What this host finds for the name of each host of the job, in the order of the hosts.
    pub(super) names: Vec<NameLookup>,
}

/// A network interface.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct InterfaceFacts {
    pub(super) name: String,
    /// The largest packet in bytes.
    pub(super) mtu: Option<u32>,
    /// The line rate in bits per second, if the driver knows it.
    pub(super) bits_per_second: Option<u64>,
}

/// The addresses of a name.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct NameLookup {
    pub(super) name: String,
    pub(super) addresses: Vec<IpAddr>,
    /// Why the lookup failed.
    pub(super) error: Option<String>,
}

impl HostFacts {
    /// Collects the facts of this host. `address` is its address, and `names` has the names of all hosts of the job.
    pub(super) fn collect(address: IpAddr, names: &[String]) -> Self {
        let files = getrlimit(Resource::Nofile);
        Self {
            host_name: host_name(),
            version: env!("CARGO_PKG_VERSION").into(),
            address,
            interface: interface_with(address),
            processor: field_of("/proc/cpuinfo", "model name")
                .unwrap_or_else(|| std::env::consts::ARCH.into()),
            processors: available_parallelism().map_or(1, std::num::NonZero::get),
            memory_bytes: field_of("/proc/meminfo", "MemTotal")
                .and_then(|text| kilobytes(&text))
                .unwrap_or(0),
            open_files: (files.current, files.maximum),
            shared_memory_bytes: free_bytes("/dev/shm"),
            names: names.iter().map(|name| look_up(name)).collect(),
        }
    }
}

fn look_up(name: &str) -> NameLookup {
    let found = (name, 0).to_socket_addrs();
    let error = found.as_ref().err().map(ToString::to_string);
    let mut addresses: Vec<IpAddr> =
        found.into_iter().flatten().map(|address: SocketAddr| address.ip()).collect();
    addresses.dedup();
    NameLookup { name: name.into(), addresses, error }
}

/// Returns the value of the first line `FIELD : VALUE` of a file.
fn field_of(path: &str, field: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the bytes of a text such as `2048 kB`.
fn kilobytes(text: &str) -> Option<u64> {
    Some(text.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

fn free_bytes(path: &str) -> Option<u64> {
    let system = rustix::fs::statvfs(path).ok()?;
    Some(system.f_bavail * system.f_frsize)
}

/// Returns the interface with an address.
fn interface_with(address: IpAddr) -> Option<InterfaceFacts> {
    let name = if_addrs::get_if_addrs().ok()?.into_iter().find(|interface| interface.ip() == address)?.name;
    let number = |file: &str| {
        let text = fs::read_to_string(Path::new("/sys/class/net").join(&name).join(file)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    // A driver that does not know the rate, such as that of the loopback interface, gives -1 or an error.
    let bits_per_second =
        number("speed").filter(|&megabits| megabits > 0).map(|megabits| megabits * 1_000_000);
    Some(InterfaceFacts { mtu: number("mtu").map(|mtu| mtu as u32), bits_per_second, name })
}
