//! The value of `--bind-to`.

use crate::launch::Binding;

/// Parses a value of `--bind-to`. mpirun and mpiexec allow a qualifier after a colon, which ringrun ignores. For a
/// value that only mpirun or mpiexec accepts, the error says what to use instead.
pub(super) fn parse_binding(text: &str) -> Result<Binding, String> {
    let instead = match text.split_once(':').map_or(text, |(value, _)| value) {
        "none" => return Ok(Binding::None),
        "core" => return Ok(Binding::Core),
        "numa" => return Ok(Binding::Numa),
        "socket" | "package" | "numanode" | "l3cache" | "l4cache" | "l5cache" => {
            "use --bind-to numa, which binds each rank to the NUMA nodes of its share of the processors"
        }
        "hwthread" | "hwt" | "thread" | "pu" | "slot" | "rr" | "l1cache" | "l2cache" | "l1dcache" => {
            "use --bind-to core, which gives each rank an even share of the processors"
        }
        "board" | "machine" | "node" | "host" | "system" => {
            "use --bind-to none, because all ranks are on this host"
        }
        "user" => {
            "start ringrun under `taskset -c LIST`; ringrun uses only the processors that it may run on"
        }
        _ => "ringrun binds ranks to core, numa or none",
    };
    Err(format!("--bind-to {text}: {instead}"))
}
