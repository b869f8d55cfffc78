//! The relays of a job, and the connections that they carry. Hosts are numbered so that the host of a relay comes before the
//! hosts behind it.

use std::ffi::OsString;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use rustix::process::Pid;

use super::agent_link::{AgentLink, AgentPhase};
use super::error::LaunchError;
use super::host_connection::HostConnection;
use super::plan::RemoteHost;
use super::relay_link::{ChannelEvent, RelayLink, RelayedHost};
use super::relay_messages::OWN_AGENT_CHANNEL;
use super::ssh::{AGENT_OPTION, AgentStarter, RELAY_OPTION};
use super::ssh_tree::find_parents;

/// The relays, and which of them reaches which host.
#[derive(Default, Debug)]
pub(super) struct Relays {
    /// For each host, the host of the relay that reaches it; `None` if ringrun itself does.
    parents: Vec<Option<usize>>,
    /// The relay of each host that reaches further hosts.
    relays: Vec<Option<RelayLink>>,
}

impl Relays {
    /// Connects to each host that ringrun itself reaches with `connect`, which gets the number of the host and the arguments of
    /// ssh. Adds the relays, and the agent of each host to `links`; after an error, those to which it has connected.
    pub(super) fn start(
        &mut self,
        links: &mut Vec<AgentLink>,
        hosts: &[RemoteHost],
        starter: &Arc<AgentStarter>,
        mut connect: impl FnMut(usize, &[OsString]) -> Result<HostConnection, LaunchError>,
    ) -> Result<(), LaunchError> {
        self.parents = find_parents(hosts.len(), starter.options.fanout.into());
        let has_relay = |index: usize| self.parents.contains(&Some(index));
        for (index, host) in hosts.iter().enumerate() {
            let parent = self.parents[index];
            let mut connection = if parent.is_some() {
                HostConnection::of_channel()
            } else {
                let program = if has_relay(index) { RELAY_OPTION } else { AGENT_OPTION };
                connect(index, &starter.arguments(&host.name, program))?
            };
            let relay = has_relay(index).then(|| {
                let behind = (index + 1..hosts.len()).filter(|&other| self.parents[other] == Some(index));
                let behind = behind.map(|other| RelayedHost {
                    index: other,
                    name: Arc::clone(&hosts[other].name),
                    has_relay: has_relay(other),
                });
                let outer = mem::replace(&mut connection, HostConnection::of_channel());
                RelayLink::new(outer, behind.collect(), Arc::clone(starter))
            });
            self.relays.push(relay);
            let via = parent.map(|parent| Arc::clone(&hosts[parent].name));
            links.push(AgentLink::new(host.clone(), via, connection, Arc::clone(starter)));
        }
        Ok(())
    }

    /// Returns the connection to a host: to its relay if it has one, and to its agent otherwise.
    fn connection<'a>(&'a mut self, links: &'a mut [AgentLink], index: usize) -> &'a mut HostConnection {
        match &mut self.relays[index] {
            Some(relay) => &mut relay.connection,
            None => &mut links[index].connection,
        }
    }

    /// Returns the connection that a channel of the relay of host `index` carries.
    fn channel<'a>(
        &'a mut self,
        links: &'a mut [AgentLink],
        index: usize,
        channel: u16,
    ) -> Option<&'a mut HostConnection> {
        if channel == OWN_AGENT_CHANNEL {
            return links.get_mut(index).map(|link| &mut link.connection);
        }
        let host = self.relays.get(index)?.as_ref()?.hosts.get(usize::from(channel) - 1)?.index;
        Some(self.connection(links, host))
    }

    /// Records that the poll has reported the connection to this host.
    pub(super) fn mark_readable(&mut self, links: &mut [AgentLink], index: usize) {
        if index < links.len() {
            self.connection(links, index).link.mark_readable();
        }
    }

    /// Records that a program has ended that may be the ssh to this host.
    pub(super) fn handle_ended_child(
        &mut self,
        links: &mut [AgentLink],
        index: usize,
        (pid, code): (Pid, Option<i32>),
    ) {
        self.connection(links, index).handle_ended_child(pid, code);
    }

    /// Passes on what the relay of this host has sent. A host is lost with its relay, and with the relay that reaches it.
    pub(super) fn advance(&mut self, links: &mut [AgentLink], index: usize) {
        let parent = self.parents[index].and_then(|parent| self.relays[parent].as_ref());
        if let Some(loss) = parent.and_then(|parent| parent.loss.clone()) {
            if links[index].phase != AgentPhase::Finished {
                links[index].fail(loss.exit, loss.describe());
            }
            if let Some(relay) = &mut self.relays[index] {
                relay.lose(loss);
            }
        }
        let Some(relay) = &mut self.relays[index] else { return };
        let link = &mut links[index];
        let events = relay.advance((&link.host.name, link.via.as_deref()));
        if let Some(loss) = &mut relay.loss
            && link.phase != AgentPhase::Finished
            && link.failure.is_none()
            && let Some(reason) = loss.reason.take()
        {
            link.fail(loss.exit, reason);
        }
        for (channel, event) in events {
            match (self.channel(links, index, channel), event) {
                (Some(end), ChannelEvent::Bytes(stream, bytes)) => end.push_received(stream, &bytes),
                (Some(end), ChannelEvent::Ended(code)) => end.handle_ended_program(code),
                // `RelayLink` has checked the number of the channel.
                (None, _) => {}
            }
        }
    }

    /// Gives the relays the bytes that ringrun has sent to the agents behind them.
    pub(super) fn pass_on(&mut self, links: &mut [AgentLink]) {
        // The bytes of a relay that another relay carries are passed on after it.
        for index in (0..self.relays.len()).rev() {
            let count = match &self.relays[index] {
                Some(relay) if relay.is_open() => relay.channel_count(),
                _ => continue,
            };
            for channel in 0..count {
                let pieces = self.channel(links, index, channel).map(|end| end.link.take_unsent());
                if let (Some(pieces), Some(relay)) = (pieces, &mut self.relays[index]) {
                    relay.send(channel, &pieces);
                }
            }
        }
    }

    /// Returns whether there is more to read from a relay at once.
    pub(super) fn are_readable(&self) -> bool {
        self.relays.iter().flatten().any(RelayLink::is_readable)
    }

    /// Returns the time at which [`Self::advance`] must be called although nothing happens.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let running = self.relays.iter().flatten().filter(|relay| relay.loss.is_none());
        running.filter_map(|relay| relay.connection.deadline()).min()
    }

    /// Returns the connections to all relays.
    pub(super) fn connections(&mut self) -> impl Iterator<Item = &mut HostConnection> {
        self.relays.iter_mut().flatten().map(|relay| &mut relay.connection)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use mio::{Poll, Token, Waker};

    use super::*;
    use crate::exit::Exit;
    use crate::launch::agent_messages::{AgentHello, FromAgent, ToAgent};
    use crate::launch::frames::{
        AgentFrame, FrameReader, MAGIC, encode_message, encode_output, encode_relayed,
    };
    use crate::launch::output_messages::OutputCommandSender;
    use crate::launch::plan::SshOptions;
    use crate::launch::relay_messages::FromRelay;
    use crate::launch::share::RankShare;
    use crate::launch::streams::OutputStream;
    use crate::types::Rank;

    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// The hosts `a`, `b` and `c`, which form a chain. Host 0 has rank 0, and so on. The test makes the bytes of the connection
    /// to host `a`.
    struct Chain {
        relays: Relays,
        links: Vec<AgentLink>,
        output: OutputCommandSender,
        _poll: Poll,
    }

    impl Chain {
        /// Returns the chain after all relays and agents have said hello.
        fn new() -> Self {
            let options = SshOptions { fanout: 1, ..SshOptions::default() };
            let start_timeout = Duration::from_secs(30);
            let starter = Arc::new(AgentStarter { options, own_path: "/ringrun".into(), start_timeout });
            let hosts = [("a", 0), ("b", 1), ("c", 2)].map(|(name, host)| RemoteHost {
                name: name.into(),
                share: RankShare { ranks: vec![host], host, hosts: 3 },
            });
            let connect = |_, _: &[OsString]| Ok(HostConnection::of_channel());
            let (mut relays, mut links) = (Relays::default(), Vec::new());
            relays.start(&mut links, &hosts, &starter, connect).unwrap();
            let poll = Poll::new().unwrap();
            let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
            let output = OutputCommandSender { sender: channel().0, waker };
            let mut chain = Self { relays, links, output, _poll: poll };
            let relay = [MAGIC, &encode_message(&FromRelay::Hello { version: VERSION.into() })].concat();
            let hello = AgentHello { version: VERSION.into(), machine: "m".into(), address: None };
            let agent = [MAGIC, &encode_message(&FromAgent::Hello(hello))].concat();
            chain.push(&relay);
            chain.push(&[wrap(&[1], &relay), wrap(&[0], &agent)].concat());
            chain.push(&[wrap(&[1, 1], &agent), wrap(&[1, 0], &agent)].concat());
            assert!(chain.links.iter().all(|link| link.phase == AgentPhase::Greeted));
            chain.take_sent();
            chain
        }

        /// Pushes bytes of the connection to host `a`, and handles them. Returns the failures.
        fn push(&mut self, bytes: &[u8]) -> Vec<String> {
            self.relays.connection(&mut self.links, 0).push_received(OutputStream::Stdout, bytes);
            for index in 0..self.links.len() {
                self.relays.advance(&mut self.links, index);
                self.links[index].advance(index, &self.output);
            }
            self.relays.pass_on(&mut self.links);
            self.links.iter().filter_map(|link| Some(link.failure.as_ref()?.to_string())).collect()
        }

        /// Returns what ringrun has sent to host `a`.
        fn take_sent(&mut self) -> Vec<u8> {
            self.relays.connection(&mut self.links, 0).link.take_unsent().concat()
        }
    }

    /// Wraps bytes in frames of the channels of relays, the first of them on host `a`.
    fn wrap(channels: &[u16], bytes: &[u8]) -> Vec<u8> {
        channels
            .iter()
            .rev()
            .fold(bytes.to_vec(), |bytes, &channel| encode_relayed(channel, OutputStream::Stdout, &bytes))
    }

    #[test]
    fn messages_pass_through_all_relays_of_a_path() {
        let mut chain = Chain::new();
        for (index, channels) in [(0, &[0][..]), (1, &[1, 0]), (2, &[1, 1])] {
            chain.links[index].send(&ToAgent::Signal(15));
            chain.relays.pass_on(&mut chain.links);
            let mut bytes = chain.take_sent();
            for &wanted in channels {
                let mut reader = FrameReader::of_launcher();
                reader.push(&bytes);
                let Ok(Some(AgentFrame::Relayed { channel, bytes: inner, .. })) = reader.next_frame() else {
                    panic!("host {index} got no bytes through channel {wanted}");
                };
                assert!(channel == wanted && reader.next_frame().unwrap().is_none(), "host {index}");
                bytes = inner;
            }
            assert_eq!(bytes, encode_message(&ToAgent::Signal(15)), "host {index}");
        }
    }

    #[test]
    fn an_agent_or_a_relay_that_breaks_a_rule_harms_only_the_hosts_behind_it() {
        let foreign_output = encode_output(Rank::ZERO, OutputStream::Stdout, b"x");
        let ended = |channel| encode_message(&FromRelay::Ended { channel, code: Some(255) });
        let cases: [(&str, Vec<u8>, &[&str]); 6] = [
            (
                "an agent sends output of a rank of another host",
                wrap(&[1, 1], &foreign_output),
                &["host c, reached from host b: it sent something of rank 0, which runs on another host"],
            ),
            (
                "an agent sends frames of a relay",
                wrap(&[0], &ended(1)),
                &["host a: it sent a message that is not valid"],
            ),
            (
                "a relay sends bytes of a channel that it does not have",
                wrap(&[1, 7], b"x"),
                &[
                    "host b, reached from host a: it sent something of channel 7",
                    "host c, reached from host b: it is lost with host b",
                ],
            ),
            (
                "the first relay is lost",
                wrap(&[2], b"x"),
                &[
                    "host a: it sent something of channel 2",
                    "host b, reached from host a: it is lost with host a",
                    "host c, reached from host b: it is lost with host a",
                ],
            ),
            (
                "an ssh of a relay ends",
                wrap(&[1], &ended(1)),
                &["host c, reached from host b: the connection broke: ssh ended with exit code 255"],
            ),
            (
                "a frame is longer than the limit",
                wrap(&[1, 1], &u32::MAX.to_le_bytes().repeat(2)),
                &["host c, reached from host b: it sent a message of 4294967295 bytes"],
            ),
        ];
        for (case, bytes, expected) in cases {
            let mut chain = Chain::new();
            let failures = chain.push(&bytes);
            assert_eq!(failures.len(), expected.len(), "{case}: {failures:?}");
            let agree = failures.iter().zip(expected).all(|(found, part)| found.starts_with(part));
            assert!(agree, "{case}: {failures:?}");
            // What arrives later from a lost host is not stored.
            chain.push(&wrap(&[1, 1], &vec![0; 1000]));
            assert!(chain.links.iter().all(|link| !link.connection.link.is_readable()), "{case}");
        }
    }

    /// The agent of host `a` has failed before, so only the hosts behind it can say why the relay is lost.
    #[test]
    fn the_reason_for_a_lost_relay_is_always_reported() {
        let mut chain = Chain::new();
        chain.links[0].fail(Exit::PeerLost, "its agent has ended".to_owned());
        let failures = chain.push(&wrap(&[2], b"x"));
        assert_eq!(failures[0], "host a: its agent has ended");
        let part = "reached from host a: it is lost with host a: it sent something of channel 2";
        assert!(failures[1].contains(part), "{failures:?}");
    }
}
