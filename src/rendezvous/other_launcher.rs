//! Jobs that a launcher other than `ringrun` has started: which rank this process is, and where rank 0 serves the rendezvous.
//! `docs/engines.md` lists the variables, and `docs/adr/0083-ranks-of-other-launchers.md` gives the reasons for the rules.

mod hydra_proxy;
mod node_list;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use self::node_list::parse_node_list;
use super::environment_error::EnvironmentError;
use super::is_loopback;
use crate::types::{Rank, WorldSize};

pub(super) use self::hydra_proxy::hydra_proxy;

/// The variable that names the launcher whose variables count, or is `none` if this process runs alone.
const LAUNCHER_VARIABLE: &str = "RING_LAUNCHER";
/// The variable that names the host of rank 0.
const MASTER_VARIABLE: &str = "RING_MASTER_ADDR";
/// The variable with the rank in an indexed Job of Kubernetes.
pub(super) const INDEX_VARIABLE: &str = "JOB_COMPLETION_INDEX";
/// The variable that sets the port on which rank 0 serves the rendezvous.
const PORT_VARIABLE: &str = "RING_PORT";
/// The first port that [`derive_job`] can choose. Linux gives connections ports from 32768 on.
const PORT_MIN: u16 = 20_000;
/// The number of ports among which [`derive_job`] chooses.
const PORT_COUNT: u16 = 10_000;

/// A program that starts ranks, and describes them in variables of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OtherLauncher {
    /// Slurm's `srun`.
    Slurm,
    /// `torchrun`, or a program that sets the same variables, for example the operator of Kubeflow's `PyTorchJob`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Hydra, the `mpiexec` of MPICH and Intel MPI.
    Hydra,
    /// An indexed Job of Kubernetes.
    Kubernetes,
}

/// The texts that differ between launchers.
struct LauncherTexts {
    /// The value of `RING_LAUNCHER`.
    key: &'static str,
    /// The name in errors.
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    /// The variable with the number of ranks on this host.
    local_size: &'static str,
    /// How to name the host of rank 0 if the job has several hosts.
    advice: &'static str,
}

impl OtherLauncher {
    /// All launchers. If the variables of several launchers describe the same rank, those of the first launcher count.
    const ALL: [Self; 5] = [Self::Slurm, Self::Torchrun, Self::OpenMpi, Self::Hydra, Self::Kubernetes];

    /// Returns the launcher's name in errors.
    pub fn name(self) -> &'static str {
        self.texts().name
    }

    /// Returns whether the ranks of a job may share a home directory.
    pub fn may_share_home(self) -> bool {
        self != Self::Kubernetes
    }

    const fn texts(self) -> LauncherTexts {
        match self {
            Self::Slurm => LauncherTexts {
                key: "slurm",
                name: "Slurm's srun",
                rank: "SLURM_PROCID",
                size: "SLURM_STEP_NUM_TASKS",
                local_size: "",
                advice: "set RING_MASTER_ADDR to this host",
            },
            Self::Torchrun => LauncherTexts {
                key: "torchrun",
                name: "torchrun",
                rank: "RANK",
                size: "WORLD_SIZE",
                local_size: "LOCAL_WORLD_SIZE",
                advice: "set MASTER_ADDR to this host",
            },
            Self::OpenMpi => LauncherTexts {
                key: "openmpi",
                name: "Open MPI's mpirun",
                rank: "OMPI_COMM_WORLD_RANK",
                size: "OMPI_COMM_WORLD_SIZE",
                local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
                advice: "pass it with `mpirun -x RING_MASTER_ADDR=HOST`",
            },
            Self::Hydra => LauncherTexts {
                key: "hydra",
                name: "Hydra's mpiexec",
                rank: "PMI_RANK",
                size: "PMI_SIZE",
                local_size: "MPI_LOCALNRANKS",
                advice: "pass it with `mpiexec -genv RING_MASTER_ADDR HOST`",
            },
            Self::Kubernetes => LauncherTexts {
                key: "kubernetes",
                name: "Kubernetes",
                rank: INDEX_VARIABLE,
                size: "RING_WORLD_SIZE",
                local_size: "",
                advice: "set RING_MASTER_ADDR to the host name of the pod with index 0",
            },
        }
    }

    /// Returns whether this launcher was certainly started last: by a user, or inside an allocation of Slurm or a pod, whose
    /// variables its ranks inherit.
    fn is_innermost(self, get: Getter<'_>) -> bool {
        match self {
            Self::Slurm | Self::Kubernetes => false,
            Self::Torchrun => get("TORCHELASTIC_RUN_ID").is_some(),
            Self::OpenMpi => get("OMPI_COMM_WORLD_SIZE").is_some(),
            // srun also sets PMI_RANK and PMI_SIZE, if it serves the protocol PMI.
            Self::Hydra => get("MPI_LOCALNRANKS").is_some(),
        }
    }
}

/// The host on which rank 0 serves the rendezvous.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RendezvousHost {
    /// All ranks are on this host, and use a loopback address.
    ThisHost,
    /// The host with this name or address.
    Named(String),
}

/// A rank that another launcher has started, and the place of the rendezvous, which rank 0 serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiscoveredRank {
    /// The launcher.
    pub launcher: OtherLauncher,
    /// This process's rank.
    pub rank: Rank,
    /// The world size, at least 2.
    pub world: WorldSize,
    /// The host of rank 0.
    pub host: RendezvousHost,
    /// The port on which rank 0 listens.
    pub port: u16,
    /// The job's id.
    pub job_id: [u8; 16],
    /// The start timeout, if `RING_START_TIMEOUT_MS` sets one.
    pub start_timeout: Option<Duration>,
}

/// Returns the value of an environment variable, or `None` if it is unset or empty.
type Getter<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Finds the rank that another launcher has given this process. `get(name)` returns the value of a variable, or `None` if it
/// is unset or empty. `hydra_proxy` returns a text that only the processes of one job of Hydra on this host have. Returns
/// `None` if no launcher has started this process, or if it is the only rank.
pub(super) fn discover(
    get: Getter<'_>,
    hydra_proxy: &dyn Fn() -> Option<String>,
) -> Result<Option<DiscoveredRank>, EnvironmentError> {
    let mut found: Vec<Description> = Vec::new();
    for launcher in launchers_to_ask(get)? {
        let Some(description) = Description::read(launcher, get)? else { continue };
        if let Some(first) = found.first()
            && !first.agrees_with(&description)
        {
            return Err(first.contradiction(&description));
        }
        found.push(description);
    }
    match found.first() {
        Some(&Description { launcher, rank, world }) if world != WorldSize::ONE => {
            locate_rendezvous(launcher, (rank, world), get, hydra_proxy).map(Some)
        }
        _ => Ok(None),
    }
}

/// Returns the launchers whose variables count.
fn launchers_to_ask(get: Getter<'_>) -> Result<Vec<OtherLauncher>, EnvironmentError> {
    let all = OtherLauncher::ALL;
    if let Some(value) = get(LAUNCHER_VARIABLE) {
        if value == "none" {
            return Ok(Vec::new());
        }
        let expected = "one of slurm, torchrun, openmpi, hydra, kubernetes and none";
        let named = all
            .into_iter()
            .find(|launcher| launcher.texts().key == value)
            .ok_or(EnvironmentError::Invalid { name: LAUNCHER_VARIABLE, value, expected })?;
        let LauncherTexts { name, rank, .. } = named.texts();
        let missing = EnvironmentError::LauncherIncomplete {
            launcher: name,
            present: LAUNCHER_VARIABLE,
            missing: rank,
        };
        return if get(rank).is_some() { Ok(vec![named]) } else { Err(missing) };
    }
    // The ranks of a launcher that runs inside an allocation or a pod also have the variables of the allocation or pod.
    let is_inside = all.into_iter().any(|launcher| launcher.is_innermost(get));
    let is_outer = |launcher| matches!(launcher, OtherLauncher::Slurm | OtherLauncher::Kubernetes);
    Ok(all.into_iter().filter(|&launcher| !(is_inside && is_outer(launcher))).collect())
}

/// The rank and the world size in the variables of a launcher.
struct Description {
    launcher: OtherLauncher,
    rank: Rank,
    world: WorldSize,
}

impl Description {
    /// Reads the variables of a launcher. Returns `None` if they are not set.
    fn read(launcher: OtherLauncher, get: Getter<'_>) -> Result<Option<Self>, EnvironmentError> {
        let LauncherTexts { name, rank, size, .. } = launcher.texts();
        let incomplete =
            |present, missing| Err(EnvironmentError::LauncherIncomplete { launcher: name, present, missing });
        let (rank_text, size_text) = match (get(rank), get(size)) {
            (Some(rank), Some(size)) => (rank, size),
            (None, None) => return Ok(None),
            // A batch script has rank 0 and is no task of a step.
            (Some(_), None) if launcher == OtherLauncher::Slurm => return Ok(None),
            (Some(_), None) => return incomplete(rank, size),
            (None, Some(one)) if one == "1" => return Ok(None),
            (None, Some(_)) => return incomplete(size, rank),
        };
        let world = size_text.parse().ok().and_then(WorldSize::new);
        let world = world.ok_or(EnvironmentError::Invalid {
            name: size,
            value: size_text,
            expected: "a number of ranks",
        })?;
        let number = rank_text.parse().ok().map(Rank::new).filter(|&rank| world.contains(rank));
        let expected = "a rank below the number of ranks";
        let number = number.ok_or(EnvironmentError::Invalid { name: rank, value: rank_text, expected })?;
        Ok(Some(Self { launcher, rank: number, world }))
    }

    fn agrees_with(&self, other: &Self) -> bool {
        (self.rank, self.world) == (other.rank, other.world)
    }

    fn contradiction(&self, other: &Self) -> EnvironmentError {
        let describe = |one: &Self| {
            let LauncherTexts { name, rank, size, .. } = one.launcher.texts();
            format!("{name} says rank {} of {} ({rank}, {size})", one.rank, one.world)
        };
        let (first, second) = (describe(self), describe(other));
        let choices = format!("{} or {}", self.launcher.texts().key, other.launcher.texts().key);
        EnvironmentError::Contradiction { first, second, choices }
    }
}

/// Finds the place where rank 0 serves the rendezvous, which all ranks must find in the same way.
fn locate_rendezvous(
    launcher: OtherLauncher,
    (rank, world): (Rank, WorldSize),
    get: Getter<'_>,
    hydra_proxy: &dyn Fn() -> Option<String>,
) -> Result<DiscoveredRank, EnvironmentError> {
    let host = find_host(launcher, world, get)?;
    let port = get(PORT_VARIABLE)
        .map(|value| {
            let port = value.parse().ok().filter(|&port: &u16| port != 0);
            port.ok_or(EnvironmentError::Invalid {
                name: PORT_VARIABLE,
                value,
                expected: "a port, 1 to 65535",
            })
        })
        .transpose()?;
    let LauncherTexts { name, key, rank: rank_variable, .. } = launcher.texts();
    let require = |missing| {
        let present = rank_variable;
        get(missing).ok_or(EnvironmentError::LauncherIncomplete { launcher: name, present, missing })
    };
    let optional = |name| get(name).unwrap_or_default();
    let job = match launcher {
        OtherLauncher::Slurm => format!("{} {}", require("SLURM_JOB_ID")?, require("SLURM_STEP_ID")?),
        OtherLauncher::Torchrun => {
            // With a port of its own, a job without a launcher needs no MASTER_PORT.
            let master_port = if port.is_some() { optional("MASTER_PORT") } else { require("MASTER_PORT")? };
            let run = optional("TORCHELASTIC_RUN_ID");
            format!("{run} {master_port} {}", optional("TORCHELASTIC_RESTART_COUNT"))
        }
        OtherLauncher::OpenMpi => require("PMIX_NAMESPACE")?,
        OtherLauncher::Hydra => match &host {
            RendezvousHost::ThisHost => hydra_proxy().map_or_else(|| require(PORT_VARIABLE), Ok)?,
            RendezvousHost::Named(host) => host.clone(),
        },
        OtherLauncher::Kubernetes => require(MASTER_VARIABLE)?,
    };
    let (job_id, derived_port) = derive_job(&format!("{key} {job}"));
    Ok(DiscoveredRank {
        launcher,
        rank,
        world,
        host,
        port: port.unwrap_or(derived_port),
        job_id,
        start_timeout: None,
    })
}

/// Finds the host of rank 0.
fn find_host(
    launcher: OtherLauncher,
    world: WorldSize,
    get: Getter<'_>,
) -> Result<RendezvousHost, EnvironmentError> {
    if let Some(host) = get(MASTER_VARIABLE) {
        return Ok(host_by_name(host));
    }
    let LauncherTexts { name, local_size, advice, .. } = launcher.texts();
    if get(local_size).is_some_and(|size| size == world.to_string()) {
        return Ok(RendezvousHost::ThisHost);
    }
    let host = match launcher {
        OtherLauncher::Slurm => {
            let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
            let list = lists.into_iter().find_map(|name| Some((name, get(name)?)));
            let invalid =
                |name, value| EnvironmentError::Invalid { name, value, expected: "a list of nodes of Slurm" };
            list.map(|(name, value)| parse_node_list(&value).ok_or(invalid(name, value))).transpose()?.map(
                |list| if list.has_several { host_by_name(list.first) } else { RendezvousHost::ThisHost },
            )
        }
        OtherLauncher::Torchrun => get("MASTER_ADDR").map(host_by_name),
        OtherLauncher::OpenMpi | OtherLauncher::Hydra | OtherLauncher::Kubernetes => None,
    };
    host.ok_or(EnvironmentError::NoMaster { launcher: name, advice })
}

/// Returns the host with this name or address. If it is a loopback address, no rank can be on another host.
fn host_by_name(name: String) -> RendezvousHost {
    if name == "localhost" || name.parse::<IpAddr>().is_ok_and(is_loopback) {
        RendezvousHost::ThisHost
    } else {
        RendezvousHost::Named(name)
    }
}

/// Returns the id and the port of the job that `text` identifies.
fn derive_job(text: &str) -> ([u8; 16], u16) {
    let digest: [u8; 32] = Sha256::digest(text).into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    (id, PORT_MIN + u16::from_be_bytes([digest[16], digest[17]]) % PORT_COUNT)
}
