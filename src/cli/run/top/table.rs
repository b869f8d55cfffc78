//! Draws the status of ranks as text.

use std::fmt::Write as _;

use super::rank_view::RankView;
use crate::monitor::{LiveRankStatus, RunStage};
use crate::types::counted;

/// A rank is shown as stalled if its last step ended this long ago, in seconds.
const STALLED_SECONDS_MIN: f64 = 5.0;
/// The maximum number of links that are shown for a job. The busiest are shown.
const LINKS_MAX: usize = 64;
/// The number of links in a line.
const LINKS_PER_LINE: usize = 6;

/// Returns a table for each job.
pub(super) fn draw_jobs(views: &[RankView]) -> String {
    let mut jobs: Vec<(String, Vec<&RankView>)> = Vec::new();
    for view in views {
        let job = match (&view.status, &view.known) {
            (Some(status), _) => &status.job,
            (None, Some((job, _))) => job,
            (None, None) => "of unknown ranks",
        };
        match jobs.iter_mut().find(|(name, _)| name == job) {
            Some((_, ranks)) => ranks.push(view),
            None => jobs.push((job.to_owned(), vec![view])),
        }
    }
    let tables: Vec<String> = jobs.iter().map(|(job, ranks)| draw_job(job, ranks)).collect();
    tables.join("\n")
}

fn draw_job(job: &str, ranks: &[&RankView]) -> String {
    let mut text = format!("job {}", clean(job));
    let answers: Vec<&LiveRankStatus> = ranks.iter().filter_map(|view| view.status.as_ref()).collect();
    if let Some(first) = answers.first() {
        let _ = write!(
            text,
            ": {}, {} over {}, epoch {}/{}",
            counted(first.world_size, "rank"),
            clean(&first.strategy),
            clean(&first.transport),
            first.epoch,
            first.epochs
        );
        let epoch = first.last_epoch.as_ref();
        for (name, value) in [
            ("test accuracy", epoch.and_then(|epoch| epoch.test_accuracy)),
            ("test R²", epoch.and_then(|epoch| epoch.test_r2)),
        ] {
            if let Some(value) = value {
                let _ = write!(text, ", {name} {value:.4}");
            }
        }
    }
    let mut rows = vec![HEADINGS.map(str::to_owned).to_vec()];
    rows.extend(ranks.iter().map(|view| cells_of(view)));
    text.push('\n');
    write_rows(&mut text, &rows);
    write_links(&mut text, &answers);
    write_slowest(&mut text, ranks, &answers);
    text
}

const HEADINGS: [&str; 12] = [
    "rank",
    "host",
    "pid",
    "step",
    "loss",
    "samples/s",
    "step ms",
    "compute",
    "comm",
    "data",
    "sent/s",
    "state",
];
/// The columns whose cells begin at the same place. The cells of the other columns end at the same place.
const LEFT_ALIGNED: [usize; 2] = [1, 11];

/// Returns the cells of a rank.
fn cells_of(view: &RankView) -> Vec<String> {
    let Some(status) = &view.status else {
        let rank = view.known.as_ref().map_or_else(|| "?".to_owned(), |(_, rank)| rank.to_string());
        let mut cells = vec![rank, view.address.to_string()];
        cells.resize(HEADINGS.len() - 1, String::new());
        cells.push(view.error.clone().unwrap_or_default());
        return cells;
    };
    let times = &status.recent_step_seconds;
    let total = times.compute + times.communication + times.data;
    let share = |seconds: f64| format!("{:.0}%", 100.0 * seconds / total.max(1e-12));
    let sent = status.links.iter().fold(0.0, |sum, link| sum + link.sent_per_second);
    let mut rates = [
        format!("{:.0}", status.samples_per_second),
        format!("{:.3}", 1e3 * total / times.steps.max(1) as f64),
        share(times.compute),
        share(times.communication),
        share(times.data),
        format_bytes(sent),
    ];
    if times.steps == 0 {
        rates.fill("-".into());
    }
    let mut cells = vec![
        status.rank.to_string(),
        clean(&status.host),
        status.pid.to_string(),
        status.step.to_string(),
        status.loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}")),
    ];
    cells.extend(rates);
    cells.push(describe_state(status));
    cells
}

fn describe_state(status: &LiveRankStatus) -> String {
    match status.seconds_since_step {
        None => "no step yet".to_owned(),
        Some(seconds) if status.stage == RunStage::Training && seconds > STALLED_SECONDS_MIN => {
            format!("no step for {seconds:.0} s")
        }
        _ => status.stage.name().to_owned(),
    }
}

/// Appends the rows. Each column is as wide as its widest cell.
fn write_rows(text: &mut String, rows: &[Vec<String>]) {
    let width_of = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or_default()
    };
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width_of).collect();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let separator = if column == 0 { "" } else { "  " };
            let _ = if LEFT_ALIGNED.contains(&column) {
                write!(line, "{separator}{cell:<width$}")
            } else {
                write!(line, "{separator}{cell:>width$}")
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// Appends the bytes per second of the links.
fn write_links(text: &mut String, answers: &[&LiveRankStatus]) {
    let mut links: Vec<(u32, u32, f64)> = Vec::new();
    for status in answers {
        links.extend(status.links.iter().map(|link| (status.rank, link.peer, link.sent_per_second)));
    }
    if links.is_empty() {
        return;
    }
    let count = links.len();
    if count > LINKS_MAX {
        links.sort_by(|a, b| b.2.total_cmp(&a.2));
        links.truncate(LINKS_MAX);
    }
    for (index, line) in links.chunks(LINKS_PER_LINE).enumerate() {
        text.push_str(if index == 0 { "links:" } else { "      " });
        for (from, to, rate) in line {
            let _ = write!(text, "  {from}->{to} {}/s", format_bytes(*rate));
        }
        text.push('\n');
    }
    if count > LINKS_MAX {
        let _ = writeln!(text, "        and {}", counted(count - LINKS_MAX, "slower link"));
    }
}

/// Appends the slowest rank and why it is the slowest.
fn write_slowest(text: &mut String, ranks: &[&RankView], answers: &[&LiveRankStatus]) {
    let silent = ranks.iter().find(|view| view.status.is_none());
    let slowest = answers.iter().find_map(|status| status.slowest.as_ref());
    if let Some(RankView { known: Some((_, rank)), error: Some(error), .. }) = silent {
        let _ = writeln!(text, "slowest: rank {rank}, because its server does not answer ({error})");
    } else if let Some(slowest) = slowest {
        let _ = writeln!(
            text,
            "slowest: rank {}, because of its time for {}: {:.3} ms of each step without waiting, {:.3} ms on the other ranks",
            slowest.rank,
            clean(&slowest.cause),
            1e3 * slowest.busy_seconds_per_step,
            1e3 * slowest.others_seconds_per_step
        );
    } else if answers.iter().any(|status| status.world_size > 1 && status.recent_step_seconds.steps > 0) {
        text.push_str("slowest: none; no rank takes clearly longer than the others\n");
    }
}

/// Returns the text without control characters. The status of a rank of another host could otherwise control the terminal.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

fn format_bytes(bytes: f64) -> String {
    match bytes {
        1e9.. => format!("{:.2} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        1e3.. => format!("{:.1} kB", bytes / 1e3),
        _ => format!("{bytes:.0} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::{LinkStatus, PartSeconds, SlowestStatus};

    fn view(rank: u32, status: Option<LiveRankStatus>) -> RankView {
        let error = status.is_none().then(|| "no answer within 500 ms".to_owned());
        let address = "127.0.0.1:9400".parse().unwrap();
        RankView { address, status, error, known: Some(("j1".into(), rank)) }
    }

    fn status(rank: u32) -> LiveRankStatus {
        LiveRankStatus {
            job: "j1".into(),
            rank,
            world_size: 2,
            host: "a\x1b[2Jb".into(),
            strategy: "allreduce".into(),
            transport: "tcp".into(),
            stage: RunStage::Training,
            step: 7,
            seconds_since_step: Some(0.1),
            loss: Some(0.5),
            recent_step_seconds: PartSeconds { steps: 2, compute: 0.006, communication: 0.003, data: 0.001 },
            links: vec![LinkStatus { peer: 1 - rank, sent_per_second: 2.5e6, ..LinkStatus::default() }],
            ..LiveRankStatus::default()
        }
    }

    #[test]
    fn a_table_shows_all_ranks_of_a_job() {
        let text = draw_jobs(&[view(0, Some(status(0))), view(1, None)]);
        assert_eq!(
            text,
            "job j1: 2 ranks, allreduce over tcp, epoch 0/0\n\
             rank  host            pid  step    loss  samples/s  step ms  compute  comm  data  sent/s  state\n   \
             0  a[2Jb             0     7  0.5000          0    5.000      60%   30%   10%  2.5 MB  training\n   \
             1  127.0.0.1:9400                                                                      no answer within 500 ms\n\
             links:  0->1 2.5 MB/s\n\
             slowest: rank 1, because its server does not answer (no answer within 500 ms)\n"
        );
    }

    #[test]
    fn the_slowest_rank_and_stalled_ranks_are_named() {
        let slowest = SlowestStatus {
            rank: 1,
            cause: "data".into(),
            busy_seconds_per_step: 0.002,
            others_seconds_per_step: 0.001,
        };
        let named = LiveRankStatus { slowest: Some(slowest), ..status(0) };
        let stalled = LiveRankStatus { seconds_since_step: Some(12.4), ..status(0) };
        let other_job = LiveRankStatus { job: "j2".into(), ..status(0) };
        for (views, expected) in [
            (vec![view(0, Some(named))], "slowest: rank 1, because of its time for data: 2.000 ms"),
            (vec![view(0, Some(stalled))], "no step for 12 s"),
            (vec![view(0, Some(status(0)))], "slowest: none"),
            (vec![view(0, Some(status(0))), view(0, Some(other_job))], "\n\njob j2: 2 ranks"),
        ] {
            let text = draw_jobs(&views);
            assert!(text.contains(expected) && !text.contains('\x1b'), "{expected}: {text}");
        }
    }
}
