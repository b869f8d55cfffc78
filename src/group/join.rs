//! How a rank joins its job: it listens, exchanges addresses, opens links to its neighbours, and passes a barrier.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::options::{JoinOptions, OPERATION_TIMEOUT, SEGMENT_BYTES};
use super::recording::RecordingFiles;
use super::state::{Origin, SharedJob};
use super::streams::Streams;
use super::{Error, Group, tune};
use crate::engine::Settings;
use crate::rendezvous::{
    ExchangeOptions, JoinMethod, Roster, SharedSettings, StartError, exchange, host_name,
    user_secret_if_needed,
};
use crate::runtime::failure_report::FailureReporter;
use crate::transport::handshake::Identity;
use crate::transport::listener::Listener;
use crate::transport::tcp::{CONNECT_TIMEOUT, CongestionControl, SocketOptions, TcpTransport};
use crate::types::{Rank, SETUP_GROUP, WorldSize};
use crate::wire::frame::SEGMENT_BYTES_MAX;
use crate::wire::handshake;
use crate::wire::{Cause, Secret};

/// The bytes of each rank's chunk of a block in an all-reduce on the ring. To send a chunk takes much longer than the latency of
/// a network. Between its reduction and its copy, a block still fits into the last-level cache.
pub(super) const CHUNK_BYTES: usize = 2 << 20;
/// The value of [`CHUNK_BYTES`] if all ranks are on one host and have their own processors. A block then fits into the L2 cache.
const CHUNK_BYTES_LOCAL: usize = 256 << 10;

impl Group {
    /// Joins the job that the options describe. Returns when the rank is connected to its two neighbours in rank order.
    ///
    /// # Errors
    ///
    /// [`StartError`], which names the missing ranks, or says what is wrong and on which rank.
    pub fn join(options: &JoinOptions) -> Result<Self, StartError> {
        let failure_reporter = match &options.method {
            JoinMethod::Launched(launched) => Some(FailureReporter::of_launched_job(launched.world)),
            _ => None,
        };
        let user_secret = user_secret_if_needed(&options.method, &options.secret)?;
        let has_user_secret = user_secret.is_some();
        let secret = user_secret.unwrap_or_else(|| options.secret.clone());
        let joined = join_and_report(JoinOptions { secret, ..options.clone() }, failure_reporter.clone());
        let joined = joined.map_err(|error| {
            let is_wrong = has_user_secret && error.is_wrong_secret();
            if is_wrong { StartError::UserSecretDiffers { source: Box::new(error) } } else { error }
        });
        if let (Err(StartError::PeerLost { rank, host, .. }), Some(reporter)) = (&joined, &failure_reporter) {
            reporter.report_lost_at_start(*rank, host);
        }
        joined
    }

    /// Joins the job for which `ringrun`, or another launcher such as `srun`, `torchrun` or `mpirun`, has started this process.
    /// Without a launcher, creates a group of this process alone.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::join`] and [`JoinOptions::from_environment`].
    pub fn from_environment() -> Result<Self, StartError> {
        Self::join(&JoinOptions::from_environment()?)
    }
}

fn join_and_report(
    options: JoinOptions,
    failure_reporter: Option<FailureReporter>,
) -> Result<Group, StartError> {
    let epoch = Instant::now();
    let files = RecordingFiles::open(&options)?;
    let sockets = SocketOptions::new(&options.congestion, options.operation_timeout, options.pacing)
        .map_err(StartError::SocketOptions)?;
    let processors = options.method.local_processors();
    let exchange_options = ExchangeOptions {
        method: &options.method,
        secret: &options.secret,
        ports: options.ports,
        start_timeout: options.start_timeout,
        host_id: options.host_id.as_deref(),
        shared: SharedSettings {
            segment_bytes: options.segment_bytes,
            checksums: options.checksums,
            processors,
            streams: options.streams.to_byte(),
            timeline: options.recording.timeline.is_some(),
        },
        sockets: &sockets,
    };
    let Some((listener, roster)) = exchange(&exchange_options)? else {
        let mut group = Group { timeout: options.operation_timeout, ..Group::solo() };
        let has_timeline = options.recording.timeline.is_some();
        group.start_recording(files.into_recorder(epoch, has_timeline));
        return Ok(group);
    };
    let (rank, _) = options.method.rank_and_world();
    let has_timeline = check_settings(&roster)?.0.timeline;
    let local_ranks = roster.count_ranks_on_same_processors(rank) as u32;
    let ranks_per_processor = local_ranks.div_ceil(processors.max(1));
    let origin = Origin { options, roster, ranks_per_processor, failure_reporter };
    let mut group = start_group(origin, rank, epoch, |addresses, streams| {
        TcpTransport::new(listener, rank, addresses, sockets, streams)
    })?;
    let recorder = files.into_recorder(epoch, has_timeline);
    if let Some(recorder) = recorder.as_ref().filter(|recorder| recorder.has_timeline()) {
        run_setup(&mut group, |group| {
            recorder.set_start_offset(group.measure_clock(recorder)?);
            Ok(())
        })?;
    }
    group.start_recording(recorder);
    Ok(group)
}

/// Creates the group of all ranks: opens the links to both neighbours, and agrees with the other ranks on all settings.
/// `epoch` is the start of the engine's clock. `create_transport` gets the addresses of all ranks and the number of connections
/// of each link.
pub(super) fn start_group(
    origin: Origin,
    rank: Rank,
    epoch: Instant,
    create_transport: impl FnOnce(Vec<SocketAddr>, u8) -> TcpTransport,
) -> Result<Group, StartError> {
    let roster = &origin.roster;
    let world = WorldSize::new(roster.members.len() as u32).unwrap_or(WorldSize::ONE);
    let (shared, streams) = check_settings(roster)?;
    let has_own_processor = roster.local_rank_and_size(rank).1 == world && world.get() <= shared.processors;
    let chunk_bytes = if has_own_processor { CHUNK_BYTES_LOCAL } else { CHUNK_BYTES };
    let sockets = create_transport(roster.addresses(), streams.initial_count());
    let settings = Settings {
        rank,
        segment_bytes: shared.segment_bytes,
        checked_links: roster.links_with_checksums(rank),
        host_names: roster.hosts(),
    };
    let JoinOptions { operation_timeout, transport, ref algorithms, .. } = origin.options;
    let own_selection = (transport, algorithms.to_string());
    let machine_numbers = roster.machine_numbers();
    let counts = (chunk_bytes, streams.initial_count());
    let job = SharedJob::new((sockets, settings), epoch, counts, Some(origin))
        .map_err(|source| StartError::System { what: "an event queue", source })?;
    let mut group = Group {
        job: Some(Arc::new(job)),
        id: 0,
        members: world.ranks().collect(),
        rank,
        world,
        machine_numbers,
        timeout: operation_timeout,
        // While the ranks agree on settings, this group must be the only owner of the job. So the retirement does not own the
        // job. The engine keeps the data of group 0 until the job ends.
        ..Group::solo()
    };
    run_setup(&mut group, |group| {
        connect_ring(group)?;
        tune::agree_on_selection(group, own_selection, streams)?;
        group.share_memory()
    })?;
    Ok(group)
}

/// Creates a job of this process alone, which carries messages of the process to itself. It has no port.
pub(super) fn create_self_job() -> Result<SharedJob, Error> {
    let sockets = SocketOptions::new(&CongestionControl::Host, OPERATION_TIMEOUT, None)
        .map_err(|detail| Error::System { what: "socket options", detail })?;
    let refused = |error: io::Error| Error::System { what: "an event queue", detail: error.to_string() };
    let job = handshake::Job { id: rand::random(), world: 1, peers_digest: [0; 32] };
    let identity = Identity { secret: Secret::none(), job, rank: Some(Rank::ZERO) };
    let listener = Listener::without_port(identity).map_err(refused)?;
    let sockets = TcpTransport::new(listener, Rank::ZERO, Vec::new(), sockets, 1);
    let settings = Settings {
        rank: Rank::ZERO,
        segment_bytes: SEGMENT_BYTES,
        checked_links: vec![false],
        host_names: vec![host_name()],
    };
    SharedJob::new((sockets, settings), Instant::now(), (CHUNK_BYTES, 1), None).map_err(refused)
}

/// Runs the setup of a group with its own group number and its own timeout. All ranks already accept connections, so the timeout
/// is short, but longer than the timeout for connecting a link.
fn run_setup(
    group: &mut Group,
    set_up: impl FnOnce(&mut Group) -> Result<(), Error>,
) -> Result<(), StartError> {
    let timeout = std::mem::replace(&mut group.timeout, 2 * CONNECT_TIMEOUT);
    let id = std::mem::replace(&mut group.id, SETUP_GROUP);
    let result = set_up(group);
    group.id = id;
    group.timeout = timeout;
    result.map_err(|error| start_error(&error))
}

pub(super) fn start_error(error: &Error) -> StartError {
    match error.cause() {
        Some(Cause::PeerLost { rank, host, seen_by, detail }) => {
            let detail = format!("its connection to rank {seen_by} failed: {detail}");
            StartError::PeerLost { rank: *rank, host: host.clone(), detail }
        }
        Some(cause) => StartError::Failed(cause.clone()),
        None => StartError::Refused(error.to_string()),
    }
}

/// Opens the links to both neighbours and runs a barrier, so that a rank that cannot be reached is detected at the start.
fn connect_ring(group: &mut Group) -> Result<(), Error> {
    let (rank, world) = (group.rank, group.world);
    if let Some(job) = &group.job {
        for peer in [world.rank_after(rank, 1), world.rank_before(rank, 1)] {
            job.driver.core().link_driver.connect(job.driver.now(), peer);
        }
    }
    group.barrier()
}

/// Returns rank 0's settings. Returns an error if this version does not support them.
fn check_settings(roster: &Roster) -> Result<(SharedSettings, Streams), StartError> {
    let refused =
        |what| StartError::Refused(format!("rank 0's {what} is outside of the limits of this version"));
    let shared = roster
        .shared_settings()
        .filter(|shared| (64..=SEGMENT_BYTES_MAX).contains(&shared.segment_bytes))
        .ok_or_else(|| refused("segment size"))?;
    let streams = Streams::from_byte(shared.streams).ok_or_else(|| refused("number of streams"))?;
    Ok((shared, streams))
}
