//! The messages between ringrun and its agents on other hosts. An agent is a ringrun that ssh has started on the other host.
//!
//! ```text
//!            ringrun                         agent
//!               | <-------------- Hello ------- |   its version, its machine, how ssh reached it
//!               | --- Prepare(description) ---> |   looks for the directory and the program
//!               | <---- Ready or Refused ------ |
//!               | -------- Start -------------> |   when all agents are ready
//!               | <------- Started ------------ |   the process ids
//!               | -- input, Signal,             |
//!               |    OutputCredit ------------> |
//!               | <-- output, InputTaken,       |
//!               |     Ended, Note ------------- |
//!               | <-- Record, Finished -------- |   when all ranks of the host have ended
//! ```
//!
//! The end of the agent's standard input means that the job is over: the agent then stops the ranks that still run. ringrun
//! checks everything that an agent claims.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::message::MessageLevel;
use super::outcome::RankEnd;
use super::plan::{Binding, Mpi4py, RankProgram, StdinReader};
use super::share::RankShare;
use crate::rendezvous::PortRange;

/// The bytes of output that an agent may send before ringrun has printed any of them. ringrun then allows as many further bytes
/// as it has printed. So messages about the ranks arrive although a pager has stopped the output.
pub(super) const OUTPUT_CREDIT_BYTES: usize = 1 << 20;

/// The most characters that ringrun shows of a text of an agent.
pub(super) const TEXT_CHARS_MAX: usize = 2000;

/// A message from ringrun to an agent.
#[derive(Serialize, Deserialize)]
pub(super) enum ToAgent {
    Prepare(Box<JobDescription>),
    /// Start the ranks. `master` becomes `MASTER_ADDR` and `MASTER_PORT`.
    Start {
        master: SocketAddr,
    },
    /// Send this signal to all ranks.
    Signal(i32),
    /// ringrun has printed this number of bytes.
    OutputCredit(usize),
}

/// What an agent has to know about the job.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct JobDescription {
    pub(super) world: u32,
    pub(super) share: RankShare,
    /// The programs of all ranks of the job, with all values and absolute directories.
    pub(super) programs: Vec<RankProgram>,
    /// The variables of ringrun's environment whose names begin with `RING_`.
    pub(super) inherited: Vec<(OsString, OsString)>,
    /// The virtual environment of Python in which ringrun runs.
    pub(super) virtual_environment: Option<OsString>,
    pub(super) mpi4py: Mpi4py,
    pub(super) stdin_reader: StdinReader,
    pub(super) binding: Binding,
    pub(super) report_bindings: bool,
    pub(super) kill_after_ms: u64,
    pub(super) start_timeout_ms: u64,
    /// The list of `--interface`.
    pub(super) interfaces: Option<String>,
    /// The ports of `--port`.
    pub(super) ports: Option<PortRange>,
    pub(super) rendezvous: SocketAddr,
    pub(super) secret: String,
    pub(super) job_id: String,
    pub(super) status_columns: Option<u16>,
}

/// A message from an agent to ringrun.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum FromAgent {
    Hello(AgentHello),
    /// The ranks of the host cannot be started: the reason, and the exit code of ringrun.
    Refused {
        exit_code: u8,
        reason: String,
    },
    /// The ranks can be started. `address` is the address of the host, and `master_port` a free port.
    Ready {
        address: IpAddr,
        master_port: u16,
    },
    /// The process ids of the ranks.
    Started {
        pids: Vec<i32>,
    },
    /// A message for the user.
    Note {
        level: MessageLevel,
        text: String,
    },
    Ended {
        rank: u32,
        end: RankEnd,
    },
    /// The ranks of the host have taken this number of bytes of the input; `None` if none of them reads any more.
    InputTaken(Option<u64>),
    /// The exit record of a rank, encoded.
    Record {
        rank: u32,
        record: Vec<u8>,
    },
    /// All ranks have ended, and all output has been sent.
    Finished,
}

/// What an agent says about itself.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(super) struct AgentHello {
    pub(super) version: String,
    /// The text that identifies the machine (see `machine_id`).
    pub(super) machine: String,
    /// The address at which ssh has reached the host: the third word of the variable `SSH_CONNECTION`.
    pub(super) address: Option<IpAddr>,
}
