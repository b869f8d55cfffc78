//! Exit codes. Each kind of failure has its own code, so that a script or a scheduler can distinguish the failures.

use std::process::ExitCode;

/// The exit codes of this package's programs. The numbers are part of the interface: a later version must not change
/// the meaning of a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum Exit {
    /// Success.
    Success = 0,
    /// A failure without a more specific code.
    Failure = 1,
    /// An unknown option, a bad value or a bad combination of options.
    Usage = 2,
    /// The peers file, the secret file or the environment is wrong or differs between ranks.
    Configuration = 3,
    /// A data file is missing, truncated or has invalid content.
    Data = 4,
    /// Some ranks did not connect within the start timeout, or another rank refused the connection of this rank.
    Start = 5,
    /// A rank was lost, or a rank left the job while other ranks still needed it.
    PeerLost = 6,
    /// Ranks called different operations, or `ringbench` ranks were started with different flags.
    Mismatch = 7,
    /// An operation missed its deadline.
    Timeout = 8,
    /// The loss became NaN or infinite, or is far above the loss of a constant prediction. Also the exit code of a
    /// rank whose job ended because a rank called `abort`.
    Diverged = 9,
    /// A checkpoint, a report or a model file could not be written or read.
    Checkpoint = 10,
    /// The listening port is in use.
    PortInUse = 11,
    /// A peer has a different secret.
    Secret = 12,
    /// A peer has a different protocol version.
    Version = 13,
    /// A peer broke the protocol, or the network corrupted bytes from a peer.
    Protocol = 14,
    /// A benchmark found wrong results.
    WrongResult = 15,
    /// Ranks hold different parameters, for example because memory or the network corrupted a value.
    ParametersDiffer = 16,
    /// `ringbench compare` found a size that takes longer than its threshold allows.
    Slower = 17,
    /// The job took longer than `--job-timeout`, and ringrun stopped it.
    JobTimeout = 124,
    /// The command to launch exists but cannot be executed.
    CommandNotExecutable = 126,
    /// The command to launch was not found.
    CommandNotFound = 127,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
