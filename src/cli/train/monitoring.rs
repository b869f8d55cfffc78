//! Serves the status of this rank over HTTP (`--metrics`), and records the events of the run in this status.

use std::env;
use std::io;
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::exit::Exit;
use crate::group::{Group, LinkBytes};
use crate::monitor::{
    EpochStatus, HttpResponse, HttpServer, LinkStatus, ListenAddress, LiveRankStatus, PartSeconds,
    RunDirectory, RunRegistration, RunStage, SlowestStatus, write_metrics,
};
use crate::rendezvous::{JOB_ID_VARIABLE, host_name};
use crate::train::{
    CompletedStep, EpochRecord, Observer, RankMeasurements, SlowestRank, StepTimes, f64_with_same_digits,
};

/// How often the times and bytes are measured. A measurement takes some microseconds.
const MEASUREMENT_INTERVAL: Duration = Duration::from_millis(100);
/// The rates are means over at least this time.
const RATE_INTERVAL: Duration = Duration::from_secs(1);

/// The server of a rank's status. Dropping it ends the server and removes the entry in the run directory.
pub(super) struct MetricsServer {
    server: HttpServer,
    status: Arc<Mutex<LiveStatus>>,
    /// `None` if the run directory cannot be used.
    _registration: Option<RunRegistration>,
}

/// The status of the rank, and the times that its page shows relative to the current time.
struct LiveStatus {
    status: LiveRankStatus,
    started: Instant,
    /// The end of the last step, and its learning rate.
    last_step: Option<(Instant, f32)>,
}

impl MetricsServer {
    /// Starts the server. Returns it with a warning if `ringrun top` will not find this rank by itself.
    ///
    /// # Errors
    ///
    /// If this rank cannot listen at its address. The error has the exit code of the program and a sentence.
    pub(super) fn start(
        address: ListenAddress,
        group: &Group,
        strategy: String,
    ) -> Result<(Self, Option<String>), (Exit, String)> {
        let usage = |why: String| (Exit::Usage, format!("--metrics {address}: {why}"));
        let own = address.of_local_rank(group.local_rank().get()).map_err(usage)?;
        let job = job_name();
        let status = LiveRankStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            job: job.clone(),
            rank: group.rank().get(),
            world_size: group.size().get(),
            host: host_name(),
            pid: process::id(),
            transport: group.transport().into(),
            strategy,
            ..LiveRankStatus::default()
        };
        let live = LiveStatus { status, started: Instant::now(), last_step: None };
        let status = Arc::new(Mutex::new(live));
        let shown = Arc::clone(&status);
        let server = HttpServer::start(own, move |path| answer(path, &shown)).map_err(|error| {
            let rank = group.rank();
            let (exit, why) = match error.kind() {
                io::ErrorKind::AddrInUse => (
                    Exit::PortInUse,
                    format!("rank {rank} cannot listen at {own}, because another program does; pass another port, or 0 for any port"),
                ),
                io::ErrorKind::AddrNotAvailable => {
                    (Exit::Usage, format!("{} is not an address of the host of rank {rank}", own.ip()))
                }
                _ => (Exit::Failure, format!("rank {rank} cannot listen at {own}: {error}")),
            };
            (exit, format!("--metrics {address}: {why}"))
        })?;
        lock(&status).status.address = server.address().to_string();
        let directory = RunDirectory::new(env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from));
        let registered = directory.register(&job, group.rank().get(), server.address());
        let warning = registered.as_ref().err().map(|error| {
            format!(
                "`ringrun top` will not find this run by itself, because {} cannot be used: {error}",
                directory.path().display()
            )
        });
        Ok((Self { server, status, _registration: registered.ok() }, warning))
    }

    /// Returns the line that says where the metrics are.
    pub(super) fn describe(&self) -> String {
        format!("metrics at http://{}/metrics", self.server.address())
    }

    /// Returns an observer that records all events in the status of this rank and forwards them to `observer`.
    pub(super) fn observe<'a>(&self, observer: &'a mut dyn Observer) -> StatusObserver<'a> {
        StatusObserver {
            observer,
            live: Arc::clone(&self.status),
            last_measurement: None,
            rate_start: RateStart::default(),
        }
    }
}

/// Returns a name of the job that is the same on all its ranks. Ranks without a launcher have the name of their parent process,
/// so that `ringrun top` shows the ranks that one shell started as one job.
fn job_name() -> String {
    let id = env::var(JOB_ID_VARIABLE).ok().filter(|id| !id.is_empty());
    let parent = || rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
    id.map_or_else(|| format!("process-{}", parent()), |id| id.chars().take(8).collect())
}

fn lock(status: &Mutex<LiveStatus>) -> std::sync::MutexGuard<'_, LiveStatus> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the document for a path of the server.
fn answer(path: &str, live: &Mutex<LiveStatus>) -> Option<HttpResponse> {
    let status = || {
        let live = lock(live);
        LiveRankStatus {
            seconds: live.started.elapsed().as_secs_f64(),
            seconds_since_step: live.last_step.map(|(end, _)| end.elapsed().as_secs_f64()),
            learning_rate: live.last_step.and_then(|(_, rate)| finite(f64_with_same_digits(rate))),
            ..live.status.clone()
        }
    };
    Some(match path {
        "/metrics" => HttpResponse {
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            body: write_metrics(&status()),
        },
        "/status" => {
            let text = serde_json::to_string(&status()).expect("strings and finite numbers are valid JSON");
            HttpResponse { content_type: "application/json", body: text + "\n" }
        }
        "/healthz" => HttpResponse { content_type: "text/plain; charset=utf-8", body: "ok\n".into() },
        "/" => HttpResponse {
            content_type: "text/plain; charset=utf-8",
            body: "/metrics  for Prometheus\n/status   JSON\n/healthz  ok while the process runs\n".into(),
        },
        _ => return None,
    })
}

/// Records the events of a run in the status of the rank.
pub(super) struct StatusObserver<'a> {
    observer: &'a mut dyn Observer,
    live: Arc<Mutex<LiveStatus>>,
    last_measurement: Option<Instant>,
    rate_start: RateStart,
}

/// The totals at the start of the time over which rates are measured.
#[derive(Default)]
struct RateStart {
    /// `None` before the first measurement.
    time: Option<Instant>,
    samples: u64,
    step_times: StepTimes,
    links: Vec<LinkBytes>,
}

impl StatusObserver<'_> {
    fn update(&self, change: impl FnOnce(&mut LiveRankStatus)) {
        change(&mut lock(&self.live).status);
    }

    /// Computes the rates, and starts to measure the next ones.
    fn update_rates(&mut self, now: Instant, step_times: StepTimes, links: Vec<LinkBytes>) {
        let mut live = lock(&self.live);
        let status = &mut live.status;
        let recent = step_times.since(&self.rate_start.step_times);
        // The time for tests and for saving does not count.
        let seconds = recent.seconds();
        let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        if seconds > 0.0 && self.rate_start.time.is_some() {
            status.samples_per_second = per_second(status.samples, self.rate_start.samples);
            status.recent_step_seconds = part_seconds(&recent);
            for link in &mut status.links {
                let before = &self.rate_start.links;
                let (sent, received) = before
                    .binary_search_by_key(&link.peer, |before| before.peer.get())
                    .map_or((0, 0), |index| (before[index].bytes_sent, before[index].bytes_received));
                link.sent_per_second = per_second(link.bytes_sent, sent);
                link.received_per_second = per_second(link.bytes_received, received);
            }
        }
        self.rate_start = RateStart { time: Some(now), samples: status.samples, step_times, links };
    }
}

impl Observer for StatusObserver<'_> {
    fn notice(&mut self, line: &str) {
        self.observer.notice(line);
    }

    fn warning(&mut self, text: &str) {
        self.observer.warning(text);
    }

    fn epoch_started(&mut self, epoch: u64, epochs: u64, steps_done: u64, steps: u64) {
        self.observer.epoch_started(epoch, epochs, steps_done, steps);
        self.update(|status| {
            (status.epoch, status.epochs, status.stage) = (epoch, epochs, RunStage::Training);
        });
    }

    fn batch_started(&mut self, epoch: u64, batch: u64, samples: &[u32]) {
        self.observer.batch_started(epoch, batch, samples);
    }

    fn step_taken(&mut self, step: &CompletedStep) {
        self.observer.step_taken(step);
        let mut live = lock(&self.live);
        live.last_step = Some((step.completed_at, step.learning_rate));
        let status = &mut live.status;
        (status.step, status.stage) = (step.steps_total, RunStage::Training);
        status.loss = finite(step.loss);
        status.samples += step.samples;
    }

    fn measured(&mut self, measurements: &RankMeasurements<'_>) {
        self.observer.measured(measurements);
        let now = Instant::now();
        if self.last_measurement.is_some_and(|last| now - last < MEASUREMENT_INTERVAL) {
            return;
        }
        self.last_measurement = Some(now);
        let (statistics, step_times) = (measurements.statistics(), measurements.step_times());
        let links = measurements.link_bytes();
        self.update(|status| {
            status.step_seconds = part_seconds(&step_times);
            status.operations = statistics.operations;
            (status.bytes_sent, status.bytes_received) = (statistics.bytes_sent, statistics.bytes_received);
            status.encoded_elements = statistics.encoded_elements;
            status.encoded_bytes = statistics.encoded_bytes;
            status.slowest = measurements.slowest().map(slowest_status);
            update_links(&mut status.links, &links);
        });
        if self.rate_start.time.is_none_or(|start| now - start >= RATE_INTERVAL) {
            self.update_rates(now, step_times, links);
        }
    }

    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>) {
        self.observer.epoch_ended(epochs, record);
        self.update(|status| {
            status.stage = RunStage::Testing;
            if let Some(record) = record {
                status.last_epoch = Some(EpochStatus {
                    epoch: record.epoch,
                    train_loss: finite(record.train_loss),
                    test_loss: record.test_loss.and_then(finite),
                    test_accuracy: record.test_accuracy.and_then(finite),
                    test_r2: record.test_r2.and_then(finite),
                    validation_loss: record.validation_loss.and_then(finite),
                });
            }
        });
    }

    fn adjust_parameters(&mut self, parameters: &mut [f32]) {
        self.observer.adjust_parameters(parameters);
    }
}

/// Writes the bytes of each link. `links` is sorted by peer. Keeps the rates of the links that the status already has.
fn update_links(shown: &mut Vec<LinkStatus>, links: &[LinkBytes]) {
    let before = std::mem::take(shown);
    *shown = links
        .iter()
        .map(|link| {
            let peer = link.peer.get();
            let rates = before.binary_search_by_key(&peer, |before| before.peer);
            let rates = rates.map_or_else(|_| LinkStatus::default(), |index| before[index]);
            let LinkBytes { bytes_sent, bytes_received, .. } = *link;
            LinkStatus { peer, bytes_sent, bytes_received, ..rates }
        })
        .collect();
}

/// Returns the value, or `None` if JSON has no number for it.
fn finite(value: f64) -> Option<f64> {
    Some(value).filter(|value| value.is_finite())
}

fn part_seconds(times: &StepTimes) -> PartSeconds {
    PartSeconds {
        steps: times.steps,
        compute: times.compute_seconds,
        communication: times.exposed_communication_seconds,
        data: times.data_seconds,
    }
}

fn slowest_status(slowest: SlowestRank) -> SlowestStatus {
    SlowestStatus {
        rank: slowest.rank.get(),
        cause: slowest.cause.to_string(),
        busy_seconds_per_step: slowest.busy_seconds_per_step,
        others_seconds_per_step: slowest.others_seconds_per_step,
    }
}
