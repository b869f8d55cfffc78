//! Finds what is wrong with the hosts of a job, from what each host has measured.

use std::net::IpAddr;

use serde::Serialize;

use super::facts::HostFacts;
use super::host_check::HostReport;
use super::link_check::LinkMeasurement;
use crate::types::{counted, plural};

/// A link is slow if its rate is below this part of the median of all links, or of the line rate.
const SLOW: f64 = 0.5;
/// The difference of two clocks from which log files of the hosts are hard to compare, in seconds.
const CLOCK_DIFFERENCE_MAX_S: f64 = 1.0;
/// A job with this limit of open files has enough for its connections and data files.
const OPEN_FILES_MIN: u64 = 1024;
/// Ranks of a host need buffers in `/dev/shm` for their collectives.
const SHARED_MEMORY_BYTES_MIN: u64 = 64 << 20;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Severity {
    /// A job would fail, or be much slower than it should be.
    Problem,
    /// A job would run.
    Warning,
}

/// Something that is wrong.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) severity: Severity,
    /// What is wrong, on which host, and what to do.
    pub(super) text: String,
}

/// The reports of all hosts. `reports[i]` is `None` if host i has not reported.
pub(super) struct HostChecks<'a> {
    pub(super) names: &'a [String],
    pub(super) reports: &'a [Option<HostReport>],
    /// Why the check could not start on a host.
    pub(super) failures: &'a [Option<String>],
}

impl HostChecks<'_> {
    /// Returns all findings, the worst first.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        self.find_missing_hosts(&mut findings);
        self.find_broken_links(&mut findings);
        self.find_slow_links(&mut findings);
        self.find_wrong_names(&mut findings);
        self.find_differences(&mut findings);
        self.find_low_limits(&mut findings);
        findings.sort_by_key(|finding| finding.severity);
        findings
    }

    /// Returns the rate from one host to another in bytes per second, as the dialling host has measured it.
    pub(super) fn rate(&self, from: usize, to: usize) -> Option<f64> {
        let link = |own: usize, peer: usize| self.link(own, peer)?.as_ref().ok();
        if from < to { link(from, to)?.send_rate } else { link(to, from)?.receive_rate }
    }

    /// Returns the rates between all hosts in bytes per second; 0 where there is no measurement.
    pub(super) fn rates(&self) -> Vec<Vec<f64>> {
        let count = self.names.len();
        let row = |from| (0..count).map(|to| self.rate(from, to).unwrap_or(0.0)).collect();
        (0..count).map(row).collect()
    }

    /// Returns what `own` has measured of its connection to `peer`.
    pub(super) fn link(&self, own: usize, peer: usize) -> Option<&Result<LinkMeasurement, String>> {
        self.reports[own].as_ref()?.links.get(peer)?.as_ref()
    }

    fn facts(&self) -> impl Iterator<Item = (&str, &HostFacts)> {
        let names = self.names.iter().map(String::as_str);
        names.zip(self.reports).filter_map(|(name, report)| Some((name, &report.as_ref()?.facts)))
    }

    /// Returns all ordered pairs of hosts.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.names.len();
        (0..count).flat_map(move |from| (0..count).map(move |to| (from, to))).filter(|(from, to)| from != to)
    }

    fn find_missing_hosts(&self, findings: &mut Vec<Finding>) {
        let mut unchecked = Vec::new();
        let has_failure = self.failures.iter().any(Option::is_some);
        for ((name, report), failure) in self.names.iter().zip(self.reports).zip(self.failures) {
            let text = match failure {
                Some(reason) => format!("{name}: {reason}"),
                None if report.is_some() => continue,
                // The check starts on all hosts or on none.
                None if has_failure => {
                    unchecked.push(name.as_str());
                    continue;
                }
                None => format!("{name} has not reported; the messages above say why"),
            };
            findings.push(Finding { severity: Severity::Problem, text });
        }
        if !unchecked.is_empty() {
            let text = format!(
                "not measured: {}; a check starts only if all hosts can be reached, so correct the problems and check again",
                unchecked.join(", ")
            );
            findings.push(Finding { severity: Severity::Warning, text });
        }
    }

    fn find_broken_links(&self, findings: &mut Vec<Finding>) {
        for (from, to) in self.pairs() {
            let (from_name, to_name) = (&self.names[from], &self.names[to]);
            let text = match self.link(from, to) {
                Some(Err(error)) => {
                    let other = match self.link(to, from) {
                        Some(Ok(_)) => format!("{to_name} can connect to {from_name}, so"),
                        _ => "check the route and".into(),
                    };
                    let address = self.reports[to].as_ref().map(|report| report.facts.address);
                    let address = address.map(|address| format!(" ({address})")).unwrap_or_default();
                    format!(
                        "{from_name} cannot connect to {to_name}{address}: {error}; {other} let the firewall of {to_name} accept \
                         connections from {from_name}"
                    )
                }
                Some(Ok(LinkMeasurement { transfer_error: Some(error), .. })) => format!(
                    "short messages from {from_name} reach {to_name}, but a long transfer failed: {error}; packets of {} \
                     bytes may be too long for a device between them, so try a smaller MTU",
                    self.mtu(from).map_or("full".into(), |mtu| mtu.to_string())
                ),
                _ => continue,
            };
            findings.push(Finding { severity: Severity::Problem, text });
        }
    }

    fn find_slow_links(&self, findings: &mut Vec<Finding>) {
        let mut rates: Vec<f64> = self.pairs().filter_map(|(from, to)| self.rate(from, to)).collect();
        rates.sort_by(f64::total_cmp);
        // With two hosts, the two directions are compared.
        let usual = if rates.len() == 2 { rates.last() } else { rates.get(rates.len() / 2) };
        // The links that are slower than their line: their text and the part of the line rate that they have.
        let mut below_line: Vec<(String, f64)> = Vec::new();
        for (from, to) in self.pairs() {
            let (Some(rate), Some(&usual)) = (self.rate(from, to), usual) else { continue };
            let (from_name, to_name) = (&self.names[from], &self.names[to]);
            let line = [from, to].into_iter().filter_map(|host| self.line_rate(host)).min_by(f64::total_cmp);
            if rate < SLOW * usual {
                let text = format!(
                    "{from_name} sends to {to_name} at {}, and other links have {}; look at the cable, the port of the \
                     switch and other traffic of both hosts",
                    format_rate(rate),
                    format_rate(usual)
                );
                findings.push(Finding { severity: Severity::Problem, text });
            } else if let Some(line) = line.filter(|line| rate < SLOW * line) {
                let (rate_text, line_text) = (format_rate(rate), format_rate(line));
                let text = format!(
                    "{from_name} sends to {to_name} at {rate_text}, and the line rate is {line_text}"
                );
                below_line.push((text, rate / line));
            }
        }
        let count = below_line.len();
        if let Some((slowest, _)) = below_line.into_iter().min_by(|one, other| one.1.total_cmp(&other.1)) {
            let others = match count - 1 {
                0 => String::new(),
                others => {
                    format!(" ({} {} slow too)", counted(others, "other link"), plural(others, "is", "are"))
                }
            };
            let text = format!("{slowest}{others}; look for other traffic, or a limit on the way");
            findings.push(Finding { severity: Severity::Warning, text });
        }
    }

    fn find_wrong_names(&self, findings: &mut Vec<Finding>) {
        for (asking, facts) in self.facts() {
            for (index, lookup) in facts.names.iter().enumerate() {
                let Some(Some(named)) = self.reports.get(index) else { continue };
                let (name, right) = (&lookup.name, named.facts.address);
                let place = format!("look at /etc/hosts and the name server of {asking}");
                let (severity, text) = match &lookup.error {
                    Some(error) => (
                        Severity::Warning,
                        format!("{asking} cannot resolve the name {name}: {error}; {place}"),
                    ),
                    None if right.is_loopback() || lookup.addresses.contains(&right) => continue,
                    None if lookup.addresses.iter().all(IpAddr::is_loopback) => (
                        Severity::Problem,
                        format!(
                            "{asking} resolves {name} to {}, which no other host can reach; the address is {right}: {place}",
                            format_addresses(&lookup.addresses)
                        ),
                    ),
                    None => (
                        Severity::Warning,
                        format!(
                            "{asking} resolves {name} to {}, but the ranks of {name} listen on {right}; {place}",
                            format_addresses(&lookup.addresses)
                        ),
                    ),
                };
                findings.push(Finding { severity, text });
            }
        }
    }

    fn find_differences(&self, findings: &mut Vec<Finding>) {
        let Some((first, first_facts)) = self.facts().next() else { return };
        for (name, facts) in self.facts().skip(1) {
            let mut add = |what: &str, own: &str, other: &str, remedy: &str| {
                if own != other {
                    let text = format!("{what} of {first} is {own}, and of {name} {other}; {remedy}");
                    findings.push(Finding { severity: Severity::Warning, text });
                }
            };
            let remedy = "each step waits for the slowest host";
            add("the processor", &first_facts.processor, &facts.processor, remedy);
            let mtu = |facts: &HostFacts| facts.interface.as_ref()?.mtu;
            if let (Some(own), Some(other)) = (mtu(first_facts), mtu(facts)) {
                let remedy = "long packets may be lost; set the same MTU";
                add("the MTU", &own.to_string(), &other.to_string(), remedy);
            }
        }
        for (from, to) in self.pairs().filter(|(from, to)| from < to) {
            let Some(Ok(link)) = self.link(from, to) else { continue };
            if link.clock_offset_s.abs() - link.clock_error_s > CLOCK_DIFFERENCE_MAX_S {
                let (from, to) = (&self.names[from], &self.names[to]);
                let order = if link.clock_offset_s > 0.0 { "ahead of" } else { "behind" };
                let text = format!(
                    "the clock of {to} is {:.1} s {order} the clock of {from}; run a time service such as chrony, or the \
                     times of log lines do not compare",
                    link.clock_offset_s.abs()
                );
                findings.push(Finding { severity: Severity::Warning, text });
            }
        }
    }

    fn find_low_limits(&self, findings: &mut Vec<Finding>) {
        for (name, facts) in self.facts() {
            if let (_, Some(files)) = facts.open_files
                && files < OPEN_FILES_MIN
            {
                let text = format!(
                    "{name} allows {files} open files; raise `ulimit -Hn` to {OPEN_FILES_MIN} or more"
                );
                findings.push(Finding { severity: Severity::Warning, text });
            }
            let text = match facts.shared_memory_bytes {
                None => format!("{name} has no /dev/shm, so its ranks use slower sockets among each other"),
                Some(free) if free < SHARED_MEMORY_BYTES_MIN => format!(
                    "{name} has {} MiB free in /dev/shm; its ranks need about {} MiB, or use slower sockets among each other",
                    free >> 20,
                    SHARED_MEMORY_BYTES_MIN >> 20
                ),
                Some(_) => continue,
            };
            findings.push(Finding { severity: Severity::Warning, text });
        }
    }

    fn mtu(&self, host: usize) -> Option<u32> {
        self.reports[host].as_ref()?.facts.interface.as_ref()?.mtu
    }

    /// Returns the line rate of a host in bytes per second.
    fn line_rate(&self, host: usize) -> Option<f64> {
        let bits = self.reports[host].as_ref()?.facts.interface.as_ref()?.bits_per_second?;
        Some(bits as f64 / 8.0)
    }
}

/// Formats a rate in bytes per second as bits per second.
pub(super) fn format_rate(bytes_per_second: f64) -> String {
    match bytes_per_second * 8.0 {
        bits if bits >= 1e9 => format!("{:.2} Gbit/s", bits / 1e9),
        bits => format!("{:.1} Mbit/s", bits / 1e6),
    }
}

fn format_addresses(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "no address".into();
    }
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::facts::{InterfaceFacts, NameLookup};
    use super::*;

    fn link(rate: f64) -> LinkMeasurement {
        LinkMeasurement {
            round_trip_s: 1e-4,
            clock_offset_s: 0.0,
            clock_error_s: 5e-5,
            send_rate: Some(rate),
            receive_rate: Some(rate),
            transfer_error: None,
        }
    }

    /// Returns the reports of three hosts without any fault.
    fn sound() -> Vec<Option<HostReport>> {
        let report = |rank: usize| HostReport {
            rank,
            facts: HostFacts {
                host_name: format!("node{rank}"),
                version: "1.0.0".into(),
                address: IpAddr::from([10, 0, 0, rank as u8 + 1]),
                interface: Some(InterfaceFacts {
                    name: "eth0".into(),
                    mtu: Some(1500),
                    bits_per_second: Some(1_000_000_000),
                }),
                processor: "one".into(),
                processors: 2,
                memory_bytes: 1 << 34,
                open_files: (Some(1024), Some(4096)),
                shared_memory_bytes: Some(1 << 30),
                names: (0..3)
                    .map(|other| NameLookup {
                        name: format!("node{other}"),
                        addresses: vec![IpAddr::from([10, 0, 0, other + 1])],
                        error: None,
                    })
                    .collect(),
            },
            links: (0..3).map(|other| (other != rank).then(|| Ok(link(118e6)))).collect(),
        };
        (0..3).map(report).map(Some).collect()
    }

    fn findings_after(change: impl FnOnce(&mut Vec<Option<HostReport>>)) -> Vec<Finding> {
        let mut reports = sound();
        change(&mut reports);
        let names = ["node0", "node1", "node2"].map(str::to_owned);
        HostChecks { names: &names, reports: &reports, failures: &[None, None, None] }.findings()
    }

    #[test]
    fn sound_hosts_have_no_findings() {
        assert_eq!(findings_after(|_| ()), []);
    }

    #[test]
    fn a_host_on_which_the_check_cannot_start_is_the_only_problem() {
        let names = ["node0", "node1", "node2"].map(str::to_owned);
        let failures = [None, Some("ssh failed".to_owned()), None];
        let reports = HostChecks { names: &names, reports: &[None, None, None], failures: &failures };
        let findings = reports.findings();
        let [problem, warning] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!((problem.severity, problem.text.as_str()), (Severity::Problem, "node1: ssh failed"));
        assert!(warning.text.starts_with("not measured: node0, node2; "), "{warning:?}");
    }

    /// A change of the reports of sound hosts.
    type Change = fn(&mut Vec<Option<HostReport>>);

    fn host(reports: &mut [Option<HostReport>], rank: usize) -> &mut HostReport {
        reports[rank].as_mut().unwrap()
    }

    fn assert_found(cases: &[(Change, Severity, &str)]) {
        for (change, severity, expected) in cases {
            let findings = findings_after(change);
            let [finding] = &findings[..] else { panic!("{expected}: {findings:?}") };
            assert!(
                finding.severity == *severity && finding.text.contains(expected),
                "{expected}: {finding:?}"
            );
        }
    }

    #[test]
    fn faults_of_links_are_found_and_named() {
        assert_found(&[
            (|all| all[1] = None, Severity::Problem, "node1 has not reported"),
            (
                |all| host(all, 2).links[0] = Some(Err("timed out".into())),
                Severity::Problem,
                "node2 cannot connect to node0 (10.0.0.1): timed out; node0 can connect to node2",
            ),
            (
                |all| {
                    let slow = LinkMeasurement { send_rate: Some(11e6), ..link(118e6) };
                    host(all, 0).links[1] = Some(Ok(slow));
                },
                Severity::Problem,
                "node0 sends to node1 at 88.0 Mbit/s, and other links have 944.0 Mbit/s",
            ),
            (
                |all| {
                    let broken = LinkMeasurement { transfer_error: Some("timed out".into()), ..link(118e6) };
                    host(all, 0).links[2] = Some(Ok(broken));
                },
                Severity::Problem,
                "packets of 1500 bytes",
            ),
            (
                |all| {
                    let late = LinkMeasurement { clock_offset_s: -3.0, ..link(118e6) };
                    host(all, 0).links[1] = Some(Ok(late));
                },
                Severity::Warning,
                "the clock of node1 is 3.0 s behind the clock of node0",
            ),
        ]);
    }

    #[test]
    fn faults_of_hosts_are_found_and_named() {
        assert_found(&[
            (
                |all| host(all, 1).facts.names[1].addresses = vec![IpAddr::from([127, 0, 1, 1])],
                Severity::Problem,
                "node1 resolves node1 to 127.0.1.1",
            ),
            (
                |all| host(all, 0).facts.names[2].addresses = vec![IpAddr::from([10, 0, 0, 9])],
                Severity::Warning,
                "node0 resolves node2 to 10.0.0.9, but the ranks of node2 listen on 10.0.0.3",
            ),
            (
                |all| host(all, 0).facts.names[2].error = Some("unknown".into()),
                Severity::Warning,
                "cannot resolve the name node2",
            ),
            (
                |all| host(all, 2).facts.interface.as_mut().unwrap().mtu = Some(9000),
                Severity::Warning,
                "the MTU of node0 is 1500, and of node2 9000",
            ),
            (
                |all| host(all, 1).facts.shared_memory_bytes = Some(0),
                Severity::Warning,
                "node1 has 0 MiB free in /dev/shm",
            ),
        ]);
    }

    #[test]
    fn links_that_are_all_slower_than_the_line_are_warnings() {
        let findings = findings_after(|all| {
            for report in all.iter_mut().flatten() {
                report.links.iter_mut().flatten().for_each(|measured| *measured = Ok(link(11e6)));
            }
        });
        let [finding] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!(finding.severity, Severity::Warning);
        assert!(
            finding.text.contains("at 88.0 Mbit/s") && finding.text.contains("5 other links"),
            "{}",
            finding.text
        );
    }
}
