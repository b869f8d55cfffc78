//! Writes the status of a rank in the text format 0.0.4 of Prometheus:
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>.

use std::fmt::Write as _;

use super::live_status::LiveRankStatus;

/// The type of a metric.
#[derive(Clone, Copy)]
enum MetricKind {
    Counter,
    Gauge,
}

/// The labels and the value of one sample.
type Sample<'a> = (&'a [(&'a str, String)], f64);

/// Returns the metrics of a rank.
pub(crate) fn write_metrics(status: &LiveRankStatus) -> String {
    let mut text = String::new();
    write_build_info(&mut text, status);
    write_run_metrics(&mut text, status);
    write_times_and_bytes(&mut text, status);
    text
}

/// Writes a metric with one sample without labels. Writes nothing if there is no value.
fn write_value(text: &mut String, kind: MetricKind, (name, help): (&str, &str), value: Option<f64>) {
    if let Some(value) = value {
        write_samples(text, kind, (name, help), &[(&[], value)]);
    }
}

/// Writes a metric with all its samples.
fn write_samples(text: &mut String, kind: MetricKind, (name, help): (&str, &str), samples: &[Sample<'_>]) {
    let kind = match kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
    };
    let _ = writeln!(text, "# HELP ringtrain_{name} {help}\n# TYPE ringtrain_{name} {kind}");
    for (labels, value) in samples {
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(text, "ringtrain_{name}{labels} {value}");
    }
}

/// Returns a value of a label with escaped characters.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_build_info(text: &mut String, status: &LiveRankStatus) {
    let labels = [
        ("version", status.version.clone()),
        ("job", status.job.clone()),
        ("rank", status.rank.to_string()),
        ("host", status.host.clone()),
        ("transport", status.transport.clone()),
        ("strategy", status.strategy.clone()),
    ];
    let names = ("build_info", "The version of ringtrain, and the rank. The value is always 1.");
    write_samples(text, MetricKind::Gauge, names, &[(&labels, 1.0)]);
    let names = ("world_size", "The number of ranks.");
    write_value(text, MetricKind::Gauge, names, Some(f64::from(status.world_size)));
}

fn write_run_metrics(text: &mut String, status: &LiveRankStatus) {
    use MetricKind::{Counter, Gauge};
    let epoch = status.last_epoch.as_ref();
    for (kind, name, help, value) in [
        (Counter, "steps_total", "Steps since the run began.", Some(status.step as f64)),
        (Gauge, "epoch", "The epoch in progress, counted from 1.", Some(status.epoch as f64)),
        (Gauge, "epochs", "The number of epochs of the run.", Some(status.epochs as f64)),
        (Gauge, "loss", "The mean loss of the samples of the last step.", status.loss),
        (Gauge, "learning_rate", "The learning rate of the last step.", status.learning_rate),
        (Counter, "samples_total", "Samples that all ranks together processed.", Some(status.samples as f64)),
        (
            Gauge,
            "samples_per_second",
            "Samples per second of all ranks together, in about the last second.",
            Some(status.samples_per_second),
        ),
        (Gauge, "run_seconds", "Time since the process began to train.", Some(status.seconds)),
        (Gauge, "seconds_since_step", "Time since the last step ended.", status.seconds_since_step),
        (
            Gauge,
            "epoch_train_loss",
            "The training loss of the last epoch.",
            epoch.and_then(|it| it.train_loss),
        ),
        (Gauge, "epoch_test_loss", "The test loss after the last epoch.", epoch.and_then(|it| it.test_loss)),
        (
            Gauge,
            "epoch_test_accuracy",
            "The fraction of correct predictions on the test set after the last epoch.",
            epoch.and_then(|it| it.test_accuracy),
        ),
        (Gauge, "epoch_test_r2", "R² of the test set after the last epoch.", epoch.and_then(|it| it.test_r2)),
        (
            Gauge,
            "epoch_validation_loss",
            "The validation loss after the last epoch.",
            epoch.and_then(|it| it.validation_loss),
        ),
    ] {
        write_value(text, kind, (name, help), value);
    }
}

fn write_times_and_bytes(text: &mut String, status: &LiveRankStatus) {
    let part = |name: &str| [("part", name.to_owned())];
    let parts = [part("compute"), part("communication"), part("data")];
    let seconds = &status.step_seconds;
    let names = (
        "step_seconds_total",
        "Time of the parts of this rank's steps. In communication, it only waited for other ranks.",
    );
    let values = [seconds.compute, seconds.communication, seconds.data];
    let samples: Vec<Sample<'_>> = parts.iter().map(|part| &part[..]).zip(values).collect();
    write_samples(text, MetricKind::Counter, names, &samples);
    for (name, help, value) in [
        ("operations_total", "Completed operations.", status.operations),
        ("sent_bytes_total", "Bytes that this rank sent, with frame headers.", status.bytes_sent),
        ("received_bytes_total", "Bytes that this rank received, with frame headers.", status.bytes_received),
        ("encoded_elements_total", "Elements that compression encoded.", status.encoded_elements),
        ("encoded_bytes_total", "Bytes of the elements that compression encoded.", status.encoded_bytes),
    ] {
        write_value(text, MetricKind::Counter, (name, help), Some(value as f64));
    }
    let peers: Vec<_> = status.links.iter().map(|link| [("peer", link.peer.to_string())]).collect();
    if !peers.is_empty() {
        let sent = status.links.iter().map(|link| link.bytes_sent as f64);
        let received = status.links.iter().map(|link| link.bytes_received as f64);
        let labels = || peers.iter().map(|peer| &peer[..]);
        let names = ("link_sent_bytes_total", "Bytes sent to each peer, with frame headers.");
        write_samples(text, MetricKind::Counter, names, &labels().zip(sent).collect::<Vec<_>>());
        let names = ("link_received_bytes_total", "Bytes received from each peer, with frame headers.");
        write_samples(text, MetricKind::Counter, names, &labels().zip(received).collect::<Vec<_>>());
    }
    if let Some(slowest) = &status.slowest {
        let labels = [("cause", slowest.cause.clone())];
        let names =
            ("slowest_rank", "The rank for which the others wait. Absent if no rank is clearly slower.");
        write_samples(text, MetricKind::Gauge, names, &[(&labels, f64::from(slowest.rank))]);
        let ratio = slowest.busy_seconds_per_step / slowest.others_seconds_per_step.max(1e-12);
        let names = (
            "slowest_rank_ratio",
            "The busy time of the slowest rank's steps, divided by that of the others.",
        );
        write_value(text, MetricKind::Gauge, names, Some(ratio));
    }
}

#[cfg(test)]
mod tests {
    use super::super::live_status::{LinkStatus, SlowestStatus};
    use super::*;

    #[test]
    fn metrics_have_help_type_and_escaped_labels() {
        let status = LiveRankStatus {
            host: "a\"b\\c\nd".into(),
            step: 12,
            loss: Some(0.5),
            links: vec![LinkStatus { peer: 3, bytes_sent: 7, ..LinkStatus::default() }],
            slowest: Some(SlowestStatus { rank: 2, cause: "data".into(), ..SlowestStatus::default() }),
            ..LiveRankStatus::default()
        };
        let text = write_metrics(&status);
        for expected in [
            "# HELP ringtrain_steps_total Steps since the run began.\n# TYPE ringtrain_steps_total counter\nringtrain_steps_total 12\n",
            "host=\"a\\\"b\\\\c\\nd\"",
            "ringtrain_loss 0.5\n",
            "ringtrain_link_sent_bytes_total{peer=\"3\"} 7\n",
            "ringtrain_step_seconds_total{part=\"communication\"} 0\n",
            "ringtrain_slowest_rank{cause=\"data\"} 2\n",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        assert!(!text.contains("ringtrain_learning_rate"), "{text}");
        let names: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(names.len(), unique.len());
    }
}
