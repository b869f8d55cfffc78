//! Tests of the rules for variables of other launchers.

use super::*;

/// The variables that real launchers set for a rank, without those that ringtrain does not read.
const SLURM: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "77"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_STEP_NUM_TASKS", "6"),
    ("SLURM_STEP_NODELIST", "n[07-09]"),
    ("SLURM_JOB_NODELIST", "n[01-16]"),
];
const BATCH_SCRIPT: &[(&str, &str)] = &[("SLURM_JOB_ID", "77"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node7"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "run"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
];
const PYTORCH_JOB: &[(&str, &str)] =
    &[("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "train-master-0"), ("MASTER_PORT", "23456")];
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_NAMESPACE", "343932929"),
];
const HYDRA: &[(&str, &str)] = &[("PMI_RANK", "2"), ("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "4")];
const INDEXED_JOB: &[(&str, &str)] = &[
    ("JOB_COMPLETION_INDEX", "2"),
    ("RING_WORLD_SIZE", "4"),
    ("RING_MASTER_ADDR", "ringtrain-0.ringtrain"),
    ("RING_PORT", "29400"),
];

type Variables<'a> = &'a [(&'a str, &'a str)];

/// Discovers the rank that the variables describe. Later variables replace earlier variables, and an empty value unsets one.
fn discover_in(variables: &[Variables<'_>]) -> Result<Option<DiscoveredRank>, EnvironmentError> {
    let get = |name: &str| {
        let mut values = variables.iter().flat_map(|some| some.iter()).rev();
        let (_, value) = values.find(|(other, _)| *other == name)?;
        Some((*value).to_owned()).filter(|value| !value.is_empty())
    };
    discover(&get, &|| Some("4711 98765".into()))
}

#[test]
fn each_launcher_describes_its_rank_and_the_host_of_rank_0() {
    use OtherLauncher::{Hydra, Kubernetes, OpenMpi, Slurm, Torchrun};
    type Expected = Option<(OtherLauncher, u32, u32, &'static str)>;
    let no_launcher: Expected = None;
    // The host `here` stands for a loopback address.
    let cases: &[(&[Variables<'_>], Expected)] = &[
        (&[SLURM], Some((Slurm, 3, 6, "n07"))),
        (&[SLURM, &[("SLURM_STEP_NODELIST", "")]], Some((Slurm, 3, 6, "n01"))),
        (&[SLURM, &[("SLURM_STEP_NODELIST", "n7")]], Some((Slurm, 3, 6, "here"))),
        (&[TORCHRUN], Some((Torchrun, 1, 4, "node7"))),
        (&[TORCHRUN, &[("LOCAL_WORLD_SIZE", "4")]], Some((Torchrun, 1, 4, "here"))),
        (&[TORCHRUN, &[("MASTER_ADDR", "localhost")]], Some((Torchrun, 1, 4, "here"))),
        (&[TORCHRUN, &[("MASTER_ADDR", "::1")]], Some((Torchrun, 1, 4, "here"))),
        (&[PYTORCH_JOB], Some((Torchrun, 1, 3, "train-master-0"))),
        (&[OPEN_MPI], Some((OpenMpi, 2, 4, "here"))),
        (&[HYDRA], Some((Hydra, 2, 4, "here"))),
        (&[INDEXED_JOB], Some((Kubernetes, 2, 4, "ringtrain-0.ringtrain"))),
        // A variable of the user comes before those of the launcher.
        (&[SLURM, &[("RING_MASTER_ADDR", "10.0.0.9")]], Some((Slurm, 3, 6, "10.0.0.9"))),
        (&[OPEN_MPI, &[("RING_MASTER_ADDR", "a")]], Some((OpenMpi, 2, 4, "a"))),
        // A launcher that runs inside an allocation or a pod comes before it.
        (&[SLURM, TORCHRUN], Some((Torchrun, 1, 4, "node7"))),
        (&[SLURM, OPEN_MPI], Some((OpenMpi, 2, 4, "here"))),
        (&[SLURM, HYDRA], Some((Hydra, 2, 4, "here"))),
        (&[INDEXED_JOB, TORCHRUN, &[("RING_MASTER_ADDR", "")]], Some((Torchrun, 1, 4, "node7"))),
        (&[SLURM, &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]], no_launcher),
        // Launchers that agree: srun serves the protocol PMI, or a script sets the variables of PyTorch.
        (&[SLURM, &[("PMI_RANK", "3"), ("PMI_SIZE", "6")]], Some((Slurm, 3, 6, "n07"))),
        (&[SLURM, &[("RANK", "3"), ("WORLD_SIZE", "6")]], Some((Slurm, 3, 6, "n07"))),
        (&[TORCHRUN, SLURM, &[("RING_LAUNCHER", "slurm")]], Some((Slurm, 3, 6, "n07"))),
        (&[SLURM, &[("RING_LAUNCHER", "none")]], no_launcher),
        (&[BATCH_SCRIPT], no_launcher),
        (&[SLURM, &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")]], no_launcher),
        (&[&[("WORLD_SIZE", "1")]], no_launcher),
        (&[], no_launcher),
    ];
    for (variables, expected) in cases {
        let found = discover_in(variables).unwrap_or_else(|error| panic!("{variables:?}: {error}"));
        let host = |found: &DiscoveredRank| match &found.host {
            RendezvousHost::ThisHost => "here".to_owned(),
            RendezvousHost::Named(name) => name.clone(),
        };
        let found = found.map(|found| (found.launcher, found.rank.get(), found.world.get(), host(&found)));
        let expected = expected.map(|(launcher, rank, world, host)| (launcher, rank, world, host.to_owned()));
        assert_eq!(found, expected, "{variables:?}");
    }
}

#[test]
fn incomplete_and_contradictory_variables_are_errors() {
    let cases: &[(&[Variables<'_>], &str)] = &[
        (&[TORCHRUN, &[("WORLD_SIZE", "")]], "RANK is set but WORLD_SIZE is not"),
        (&[TORCHRUN, &[("RANK", "")]], "WORLD_SIZE is set but RANK is not"),
        (&[TORCHRUN, &[("MASTER_PORT", "")]], "RANK is set but MASTER_PORT is not"),
        (&[TORCHRUN, &[("MASTER_ADDR", "")]], "set MASTER_ADDR to this host"),
        (&[TORCHRUN, &[("RANK", "4")]], "RANK is `4`, which is not a rank below"),
        (&[TORCHRUN, &[("WORLD_SIZE", "0")]], "WORLD_SIZE is `0`, which is not a number of ranks"),
        (&[&[("OMPI_COMM_WORLD_RANK", "1")]], "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
        (&[OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]], "mpirun -x RING_MASTER_ADDR=HOST"),
        (&[OPEN_MPI, &[("PMIX_NAMESPACE", "")]], "PMIX_NAMESPACE is not"),
        (&[&[("PMI_SIZE", "2")]], "PMI_SIZE is set but PMI_RANK is not"),
        (&[HYDRA, &[("MPI_LOCALNRANKS", "2")]], "mpiexec -genv RING_MASTER_ADDR HOST"),
        (&[&[("SLURM_STEP_NUM_TASKS", "2")]], "SLURM_STEP_NUM_TASKS is set but SLURM_PROCID is not"),
        (&[SLURM, &[("SLURM_STEP_ID", "")]], "SLURM_STEP_ID is not"),
        (&[SLURM, &[("SLURM_STEP_NODELIST", "n[1")]], "SLURM_STEP_NODELIST is `n[1`"),
        (&[&[("JOB_COMPLETION_INDEX", "0")]], "JOB_COMPLETION_INDEX is set but RING_WORLD_SIZE is not"),
        (&[INDEXED_JOB, &[("RING_MASTER_ADDR", "")]], "the host name of the pod with index 0"),
        (&[SLURM, &[("RING_PORT", "0")]], "RING_PORT is `0`"),
        (&[SLURM, &[("RING_LAUNCHER", "pbs")]], "RING_LAUNCHER is `pbs`, which is not one of slurm"),
        (&[SLURM, &[("RING_LAUNCHER", "torchrun")]], "RING_LAUNCHER is set but RANK is not"),
        (
            &[SLURM, PYTORCH_JOB],
            "Slurm's srun says rank 3 of 6 (SLURM_PROCID, SLURM_STEP_NUM_TASKS), but torchrun says rank 1 of 3 (RANK, WORLD_SIZE)",
        ),
        (&[TORCHRUN, OPEN_MPI], "name the other in RING_LAUNCHER (torchrun or openmpi)"),
    ];
    for (variables, expected) in cases {
        let error = discover_in(variables).unwrap_err().to_string();
        assert!(error.contains(expected), "{variables:?}: {error}");
    }
}

/// All ranks of a job must find one port and one id, and two jobs must not find the same.
#[test]
fn a_job_has_a_port_and_an_id() {
    let place = |variables: &[Variables<'_>]| {
        let found = discover_in(variables).unwrap().unwrap();
        assert!((20_000..30_000).contains(&found.port), "{}", found.port);
        (found.port, found.job_id)
    };
    for (variables, rank, other_job) in [
        (SLURM, [("SLURM_PROCID", "0")], [("SLURM_STEP_ID", "1")]),
        (SLURM, [("SLURM_PROCID", "0")], [("SLURM_JOB_ID", "78")]),
        (TORCHRUN, [("RANK", "0")], [("MASTER_PORT", "29501")]),
        (TORCHRUN, [("RANK", "0")], [("TORCHELASTIC_RUN_ID", "other")]),
        (TORCHRUN, [("RANK", "0")], [("TORCHELASTIC_RESTART_COUNT", "1")]),
        (OPEN_MPI, [("OMPI_COMM_WORLD_RANK", "0")], [("PMIX_NAMESPACE", "1")]),
    ] {
        let (port, id) = place(&[variables]);
        assert_eq!(place(&[variables, &rank]), (port, id));
        let (other_port, other_id) = place(&[variables, &other_job]);
        assert!(other_id != id && other_port != port, "{other_job:?}");
    }
    assert_eq!(discover_in(&[INDEXED_JOB]).unwrap().unwrap().port, 29400);
}
