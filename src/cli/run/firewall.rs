//! `--print-firewall`: the rules that the firewalls of the hosts need for a job.

use std::fmt::Write as _;
use std::net::{IpAddr, ToSocketAddrs as _};

use super::hosts::JobHosts;
use super::ports::needed_ports;
use crate::launch::find_parents;
use crate::rendezvous::{PortRange, source_address};
use crate::types::counted;

/// The port on which sshd listens, unless an option or the configuration of ssh says otherwise.
const SSH_PORT: u16 = 22;

/// The first port of the range that ringrun suggests.
const SUGGESTED_PORT: u16 = 7000;

/// A host of the job.
struct FirewallHost {
    /// The name in sentences, such as `host b`.
    name: String,
    /// The address, or a text that stands for it.
    address: String,
    is_ipv6: bool,
}

/// Returns the rules as comments and commands of a shell. `ssh_port` and `fanout` are the values of the options for ssh.
pub(super) fn firewall_rules(
    hosts: &JobHosts,
    ports: Option<PortRange>,
    ssh_port: Option<u16>,
    fanout: u16,
) -> String {
    if hosts.remote_hosts.is_empty() {
        return "# All ranks run on this host and use its loopback address, so the job needs no rules.\n"
            .to_owned();
    }
    let Some(ports) = ports else {
        let needed = needed_ports(hosts).into_iter().map(|(_, needed)| needed).max().unwrap_or(1);
        return format!(
            "# The operating system chooses the ports of each job, so there are no rules that fit all jobs. To fix the ports, add \
             --port, for example\n# --port {SUGGESTED_PORT}-{}. With --port, --print-firewall prints the rules.\n",
            u32::from(SUGGESTED_PORT) + needed - 1
        );
    };
    describe_rules(&find_addresses(hosts), hosts, ports, (ssh_port.unwrap_or(SSH_PORT), fanout))
}

fn describe_rules(
    all: &[FirewallHost],
    hosts: &JobHosts,
    ports: PortRange,
    (ssh_port, fanout): (u16, u16),
) -> String {
    let parents = find_parents(hosts.remote_hosts.len(), fanout.into());
    let ssh_hosts = if parents.iter().all(Option::is_none) {
        "This host must also be able to connect to TCP port"
    } else {
        "As the rules show, this host and some other hosts must also be able to connect to TCP port"
    };
    let names: Vec<String> = all.iter().map(|host| format!("{} ({})", host.name, host.address)).collect();
    let mut text = format!(
        "# The job has {}. Each of its hosts, and this host, must accept TCP connections to port {ports} from all others:\n\
         # {}.\n\
         # {ssh_hosts} {ssh_port} (ssh) of the other hosts, or to the port that your ssh \
         configuration names.\n\
         # Use either nft or ufw. The nft commands need the table `inet filter` with the chain `input`.\n",
        counted(hosts.world, "rank"),
        names.join(", ")
    );
    for (index, host) in all.iter().enumerate() {
        let _ = write!(text, "\n# On {}:\n", host.name);
        let others = all.iter().enumerate().filter(|(other, _)| *other != index);
        let from = |(number, other): (usize, &FirewallHost)| {
            // Host 0 of `all` runs ringrun.
            let runs_ssh = index > 0 && parents[index - 1].map_or(0, |parent| parent + 1) == number;
            let ssh = if runs_ssh { format!("{ssh_port}, ") } else { String::new() };
            let family = if other.is_ipv6 { "ip6" } else { "ip" };
            let address = &other.address;
            let nft = format!(
                "nft insert rule inet filter input {family} saddr {address} tcp dport {{ {ssh}{ports} }} accept\n"
            );
            let ports = format!("{ssh}{ports}").replace('-', ":").replace(", ", ",");
            (nft, format!("ufw allow proto tcp from {address} to any port {ports}\n"))
        };
        let (nft, ufw): (Vec<String>, Vec<String>) = others.map(from).unzip();
        text.extend(nft.into_iter().chain(ufw));
    }
    text
}

/// Returns this host and then the other hosts, with their addresses.
fn find_addresses(hosts: &JobHosts) -> Vec<FirewallHost> {
    let mut all = Vec::new();
    let mut own = None;
    for host in &hosts.remote_hosts {
        let name = host.name.rsplit('@').next().unwrap_or_default();
        let address = (name, SSH_PORT).to_socket_addrs().ok().and_then(|mut found| found.next());
        own = own.or_else(|| source_address(address?.ip()).ok());
        all.push(describe_host(format!("host {name}"), name, address.map(|address| address.ip())));
    }
    all.insert(0, describe_host("this host".to_owned(), "this-host", own));
    all
}

fn describe_host(name: String, short_name: &str, address: Option<IpAddr>) -> FirewallHost {
    // Names of the configuration of ssh have no address here.
    let text = address.map_or_else(|| format!("ADDRESS-OF-{short_name}"), |address| address.to_string());
    FirewallHost { name, address: text, is_ipv6: address.is_some_and(|address| address.is_ipv6()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::hosts::{HostOptions, RankOrder, place_ranks};

    fn place(hosts: &str) -> JobHosts {
        let hosts = [hosts.to_owned()];
        let options = HostOptions {
            ranks: None,
            ranks_per_host: None,
            hosts: &hosts,
            hostfile: None,
            order: RankOrder::Slot,
        };
        place_ranks(&options).unwrap()
    }

    #[test]
    fn each_host_accepts_the_ports_from_all_others() {
        let hosts = place("localhost,user@127.0.0.2:2,x.invalid");
        let ip = |text: &str| Some(text.parse().unwrap());
        let all = [
            describe_host("this host".into(), "this-host", ip("127.0.0.1")),
            describe_host("host 127.0.0.2".into(), "127.0.0.2", ip("127.0.0.2")),
            describe_host("host x.invalid".into(), "x.invalid", None),
        ];
        let text = describe_rules(&all, &hosts, "7000-7010".parse().unwrap(), (22, 0));
        let (_, commands) = text.split_once("\n\n").unwrap();
        let expected = "\
# On this host:
nft insert rule inet filter input ip saddr 127.0.0.2 tcp dport { 7000-7010 } accept
nft insert rule inet filter input ip saddr ADDRESS-OF-x.invalid tcp dport { 7000-7010 } accept
ufw allow proto tcp from 127.0.0.2 to any port 7000:7010
ufw allow proto tcp from ADDRESS-OF-x.invalid to any port 7000:7010

# On host 127.0.0.2:
nft insert rule inet filter input ip saddr 127.0.0.1 tcp dport { 22, 7000-7010 } accept
nft insert rule inet filter input ip saddr ADDRESS-OF-x.invalid tcp dport { 7000-7010 } accept
ufw allow proto tcp from 127.0.0.1 to any port 22,7000:7010
ufw allow proto tcp from ADDRESS-OF-x.invalid to any port 7000:7010

# On host x.invalid:
nft insert rule inet filter input ip saddr 127.0.0.1 tcp dport { 22, 7000-7010 } accept
nft insert rule inet filter input ip saddr 127.0.0.2 tcp dport { 7000-7010 } accept
ufw allow proto tcp from 127.0.0.1 to any port 22,7000:7010
ufw allow proto tcp from 127.0.0.2 to any port 7000:7010
";
        assert_eq!(commands, expected);
        // In a chain, the second host accepts ssh from the first.
        let chain = describe_rules(&all, &hosts, "7000".parse().unwrap(), (22, 1));
        let rule = "saddr 127.0.0.2 tcp dport { 22, 7000 } accept";
        assert!(chain.contains(rule) && chain.matches("22,7000").count() == 2, "{chain}");
        assert!(text.contains("4 ranks") && text.contains("host 127.0.0.2 (127.0.0.2)"), "{text}");
    }

    #[test]
    fn without_ports_or_other_hosts_there_are_no_rules() {
        for (hosts, part) in
            [("localhost:3,x.invalid:9", "--port 7000-7008"), ("localhost:2", "needs no rules")]
        {
            let text = firewall_rules(&place(hosts), None, None, 0);
            assert!(text.contains(part) && text.lines().all(|line| line.starts_with('#')), "{text}");
        }
    }
}
