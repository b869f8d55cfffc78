//! The environment variables of a rank: the variables of ringtrain, and variables that `PyTorch`, Horovod and MPI
//! programs read.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::share::RankShare;
use super::status_line::STATUS_COLUMNS_VARIABLE;
use crate::rendezvous::{LISTEN_PORTS_VARIABLE, PortRange};
use crate::types::{Rank, WorldSize};

/// The prefix of variables that only ringrun may set. `-x` refuses these variables.
pub const RINGRUN_VARIABLE_PREFIX: &str = "RING_";

/// The variable with the job's id and the number of the host. All processes that a rank starts inherit this variable, so the
/// [watchdog](super::watchdog) can find the processes of its host, even if several hosts are containers that see each
/// other's processes.
pub(super) const HOST_JOB_VARIABLE: &str = "RING_HOST_JOB";

/// The values that are the same for all ranks of a job.
#[derive(Clone, Debug)]
pub struct JobVariables {
    /// The number of ranks.
    pub world: WorldSize,
    /// The ranks on this host.
    pub share: RankShare,
    /// The address of the rendezvous server, from which the ranks learn the addresses of all ranks.
    pub rendezvous: SocketAddr,
    /// The address on which the ranks listen; `None` to listen on the address from which they reach the rendezvous.
    pub listen: Option<IpAddr>,
    /// The ports on which the ranks may listen.
    pub ports: Option<PortRange>,
    /// An address of the host of rank 0, with a free port on which rank 0 can listen, if the ranks use `PyTorch`.
    pub master: SocketAddr,
    /// The job's secret in hex. ringrun passes the secret only in the environment, because other users can read the
    /// arguments of a process.
    pub secret: String,
    /// The job's id: 16 random bytes in hex.
    pub job_id: String,
    /// How long the ranks wait for each other when the job starts.
    pub start_timeout: Duration,
    /// The number of the job's processors that no other job has claimed (see `BindingPlan::exclusive_processors`). The
    /// ranks poll for messages only if this number is at least the number of ranks.
    pub exclusive_processors: usize,
    /// The value of `OMP_NUM_THREADS` on the ranks. With `None`, ringrun does not set this variable, and the ranks
    /// inherit the user's value if there is one.
    pub omp_threads: Option<usize>,
    /// The width in characters of the status line in which rank 0 can show its progress; `None` if there is no status
    /// line.
    pub status_columns: Option<u16>,
}

/// Returns the value of [`HOST_JOB_VARIABLE`].
pub(super) fn host_job_id(job_id: &str, share: &RankShare) -> String {
    format!("{job_id}.{}", share.host)
}

/// Returns the variables of one rank, beginning with the variables of ringtrain.
pub fn rank_environment(rank: Rank, job: &JobVariables) -> Vec<(String, String)> {
    let status_columns = job.status_columns.filter(|_| rank == Rank::ZERO);
    let local_rank = job.share.local_rank(rank).to_string();
    let local_size = job.share.count().to_string();
    let rank = rank.to_string();
    let size = job.world.to_string();
    let ringtrain = [
        ("RING_RANK", rank.clone()),
        ("RING_WORLD_SIZE", size.clone()),
        ("RING_LOCAL_RANK", local_rank.clone()),
        ("RING_LOCAL_WORLD_SIZE", local_size.clone()),
        ("RING_RENDEZVOUS", job.rendezvous.to_string()),
        ("RING_SECRET", job.secret.clone()),
        ("RING_JOB_ID", job.job_id.clone()),
        (HOST_JOB_VARIABLE, host_job_id(&job.job_id, &job.share)),
        ("RING_START_TIMEOUT_MS", job.start_timeout.as_millis().to_string()),
        ("RING_LOCAL_PROCESSORS", job.exclusive_processors.to_string()),
    ];
    let torchrun = [
        ("RANK", rank.clone()),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_RANK", local_rank.clone()),
        ("LOCAL_WORLD_SIZE", local_size.clone()),
        ("GROUP_RANK", job.share.host.to_string()),
        ("GROUP_WORLD_SIZE", job.share.hosts.to_string()),
        ("ROLE_RANK", rank.clone()),
        ("ROLE_WORLD_SIZE", size.clone()),
        ("MASTER_ADDR", job.master.ip().to_string()),
        ("MASTER_PORT", job.master.port().to_string()),
        ("TORCHELASTIC_RUN_ID", job.job_id.clone()),
    ];
    let horovod = [
        ("HOROVOD_RANK", rank.clone()),
        ("HOROVOD_SIZE", size.clone()),
        ("HOROVOD_LOCAL_RANK", local_rank.clone()),
        ("HOROVOD_LOCAL_SIZE", local_size.clone()),
    ];
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", rank),
        ("OMPI_COMM_WORLD_SIZE", size),
        ("OMPI_COMM_WORLD_LOCAL_RANK", local_rank.clone()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size),
        ("OMPI_COMM_WORLD_NODE_RANK", local_rank),
    ];
    // Without `OMP_NUM_THREADS`, the OpenMP library in each rank starts one thread for each processor that the rank may
    // use. If the ranks are not bound, these are too many threads for the machine.
    let threads = job.omp_threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string()));
    ringtrain
        .into_iter()
        .chain(torchrun)
        .chain(horovod)
        .chain(open_mpi)
        .chain(threads)
        .chain(job.listen.map(|address| ("RING_LISTEN_ADDRESS", address.to_string())))
        .chain(job.ports.map(|ports| (LISTEN_PORTS_VARIABLE, ports.to_string())))
        .chain(status_columns.map(|columns| (STATUS_COLUMNS_VARIABLE, columns.to_string())))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job_variables(omp_threads: Option<usize>) -> JobVariables {
        JobVariables {
            world: WorldSize::new(4).unwrap(),
            share: RankShare { ranks: vec![2, 3], host: 1, hosts: 2 },
            rendezvous: "127.0.0.1:4321".parse().unwrap(),
            listen: Some("10.0.0.4".parse().unwrap()),
            ports: Some("7000-7010".parse().unwrap()),
            master: "10.0.0.3:5678".parse().unwrap(),
            secret: "ab".repeat(32),
            job_id: "cd".repeat(16),
            start_timeout: Duration::from_millis(1500),
            exclusive_processors: 8,
            omp_threads,
            status_columns: Some(70),
        }
    }

    #[test]
    fn only_rank_0_can_show_its_progress() {
        let find = |rank| {
            let share = RankShare::whole(WorldSize::new(4).unwrap());
            let variables = rank_environment(Rank::new(rank), &JobVariables { share, ..job_variables(None) });
            variables.into_iter().find(|(name, _)| name == STATUS_COLUMNS_VARIABLE).map(|(_, value)| value)
        };
        assert_eq!((find(0).as_deref(), find(1)), (Some("70"), None));
    }

    #[test]
    fn every_variable_is_set() {
        let found = rank_environment(Rank::new(3), &job_variables(Some(2)));
        let expected = [
            ("RING_RANK", "3"),
            ("RING_WORLD_SIZE", "4"),
            ("RING_LOCAL_RANK", "1"),
            ("RING_LOCAL_WORLD_SIZE", "2"),
            ("RING_RENDEZVOUS", "127.0.0.1:4321"),
            ("RING_SECRET", "abababababababababababababababababababababababababababababababab"),
            ("RING_JOB_ID", "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"),
            ("RING_HOST_JOB", "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd.1"),
            ("RING_START_TIMEOUT_MS", "1500"),
            ("RING_LOCAL_PROCESSORS", "8"),
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "2"),
            ("ROLE_RANK", "3"),
            ("ROLE_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "10.0.0.3"),
            ("MASTER_PORT", "5678"),
            ("TORCHELASTIC_RUN_ID", "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"),
            ("HOROVOD_RANK", "3"),
            ("HOROVOD_SIZE", "4"),
            ("HOROVOD_LOCAL_RANK", "1"),
            ("HOROVOD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_NODE_RANK", "1"),
            ("OMP_NUM_THREADS", "2"),
            ("RING_LISTEN_ADDRESS", "10.0.0.4"),
            ("RING_LISTEN_PORTS", "7000-7010"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(found, expected);
    }

    #[test]
    fn omp_num_threads_is_not_set_if_the_job_has_no_value_for_it() {
        assert!(
            rank_environment(Rank::new(2), &job_variables(None))
                .iter()
                .all(|(name, _)| name != "OMP_NUM_THREADS")
        );
    }
}
