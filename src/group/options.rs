//! The options with which a rank joins its job.

use std::time::Duration;

use super::selection::{Algorithms, LocalTransport};
use super::streams::Streams;
use crate::observe::recording_options::RecordingOptions;
use crate::rendezvous::{
    Checksums, FLIGHT_RECORDER_VARIABLE, JoinMethod, PortRange, StartError, TIMELINE_VARIABLE,
    from_environment, path_from_environment, ports_from_environment, secret_from_environment,
};
use crate::runtime::driver::Interrupt;
use crate::transport::tcp::{CONNECT_TIMEOUT, CongestionControl, PacingRate};
use crate::wire::Secret;
use crate::wire::frame::SEGMENT_BYTES_MAX;

/// The default size of a segment in bytes. A segment fits into the L2 cache between its receive and its reduction, and is
/// large enough that the cost of a system call does not matter.
pub const SEGMENT_BYTES: usize = 256 << 10;
/// The default time within which all ranks must have started.
pub const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The default maximum time of one operation.
pub const OPERATION_TIMEOUT: Duration = Duration::from_mins(1);

const _: () = assert!(SEGMENT_BYTES <= SEGMENT_BYTES_MAX);
const _: () = assert!(CONNECT_TIMEOUT.as_millis() < OPERATION_TIMEOUT.as_millis());

/// The options with which a rank joins its job.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// How the ranks find each other.
    pub method: JoinMethod,
    /// The ports on which this rank may listen, if no peers file gives its port. Default: the operating system chooses.
    pub ports: Option<PortRange>,
    /// The secret of the job's ranks, which authenticates connections.
    pub secret: Secret,
    /// The time within which all ranks must have started. Default [`START_TIMEOUT`].
    pub start_timeout: Duration,
    /// The maximum time of one operation. Default [`OPERATION_TIMEOUT`].
    pub operation_timeout: Duration,
    /// The congestion control of this rank's sockets.
    pub congestion: CongestionControl,
    /// The maximum rate at which each of this rank's links sends, usually the rate of the network. With a maximum rate, a
    /// link sends evenly and not in bursts. Default: no maximum.
    pub pacing: Option<PacingRate>,
    /// The number of connections of each link. Rank 0's setting applies to all ranks. Default: one.
    pub streams: Streams,
    /// The size of a segment in bytes. Rank 0's setting applies to all ranks. Default [`SEGMENT_BYTES`].
    pub segment_bytes: usize,
    /// Which links carry a CRC32C of each payload. Rank 0's setting applies to all ranks. Default: links between hosts.
    pub checksums: Checksums,
    /// The algorithms of operations. Rank 0's setting applies to all ranks. Default: the algorithm with the lowest cost.
    pub algorithms: Algorithms,
    /// The transport between ranks of one host. Rank 0's setting applies to all ranks. Default: shared memory if possible.
    pub transport: LocalTransport,
    /// The identifier of this rank's host, which ranks of other hosts must not have. Default: one of the machine and its network.
    pub host_id: Option<String>,
    /// What this rank records. Default: nothing.
    pub recording: RecordingOptions,
    /// A function that waiting threads call. If it returns true, this rank aborts the job. Default: none.
    pub interrupt: Option<Interrupt>,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            method: JoinMethod::Alone,
            ports: None,
            secret: Secret::none(),
            start_timeout: START_TIMEOUT,
            operation_timeout: OPERATION_TIMEOUT,
            congestion: CongestionControl::default(),
            pacing: None,
            streams: Streams::default(),
            segment_bytes: SEGMENT_BYTES,
            checksums: Checksums::default(),
            algorithms: Algorithms::default(),
            transport: LocalTransport::default(),
            host_id: None,
            recording: RecordingOptions::default(),
            interrupt: None,
        }
    }
}

impl JoinOptions {
    /// Returns the options that `ringrun` or another launcher has set for this process, or else those of a world of one rank.
    ///
    /// # Errors
    ///
    /// [`StartError`] if the environment has only some of the variables, or those of two launchers that contradict each other.
    pub fn from_environment() -> Result<Self, StartError> {
        let method = from_environment()?;
        Ok(Self {
            secret: secret_from_environment()?.unwrap_or_else(Secret::none),
            start_timeout: method.start_timeout().unwrap_or(START_TIMEOUT),
            method,
            ports: ports_from_environment()?,
            recording: Self::recording_from_environment(),
            ..Self::default()
        })
    }

    /// Returns what the environment says about recording: the variables `RING_FLIGHT_RECORDER` and `RING_TIMELINE`.
    pub fn recording_from_environment() -> RecordingOptions {
        RecordingOptions {
            flight_recorder: path_from_environment(FLIGHT_RECORDER_VARIABLE),
            timeline: path_from_environment(TIMELINE_VARIABLE),
        }
    }
}
