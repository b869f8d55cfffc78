//! ringrun's side of one relay: the channels that it carries, and the limits on what it may say.

use std::sync::Arc;

use super::frames::{AgentFrame, encode_message, encode_relayed};
use super::host_connection::{HostConnection, printable};
use super::relay_messages::{FromRelay, OWN_AGENT_CHANNEL, ToRelay};
use super::ssh::{AGENT_OPTION, AgentStarter, RELAY_OPTION};
use super::streams::OutputStream;
use crate::exit::Exit;

/// What a relay has said about a channel.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum ChannelEvent {
    /// Bytes of the program at the end of the channel. No bytes mean the end of the stream.
    Bytes(OutputStream, Vec<u8>),
    /// The program has ended with this exit code; `None` if a signal killed it.
    Ended(Option<i32>),
}

/// A host that a relay reaches.
#[derive(Clone, Debug)]
pub(super) struct RelayedHost {
    /// The number of the host among the hosts of ringrun.
    pub(super) index: usize,
    pub(super) name: Arc<str>,
    /// Whether the host itself reaches further hosts.
    pub(super) has_relay: bool,
}

/// Why a relay is lost, with all hosts behind it.
#[derive(Clone, Debug)]
pub(super) struct LostRelay {
    /// The host of the relay.
    pub(super) host: Arc<str>,
    pub(super) exit: Exit,
    /// `None` after the failure of the host of the relay has reported it.
    pub(super) reason: Option<String>,
}

impl LostRelay {
    /// Says why a host behind the relay is lost.
    pub(super) fn describe(&self) -> String {
        let reason = self.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        format!("it is lost with host {}{reason}", self.host)
    }
}

/// ringrun's side of one relay.
#[derive(Debug)]
pub(super) struct RelayLink {
    pub(super) connection: HostConnection,
    /// The host of channel 1, of channel 2, and so on.
    pub(super) hosts: Vec<RelayedHost>,
    pub(super) loss: Option<LostRelay>,
    starter: Arc<AgentStarter>,
    has_greeted: bool,
    /// For each channel, whether its program has ended.
    have_ended: Vec<bool>,
}

impl RelayLink {
    pub(super) fn new(
        connection: HostConnection,
        hosts: Vec<RelayedHost>,
        starter: Arc<AgentStarter>,
    ) -> Self {
        let have_ended = vec![false; hosts.len() + 1];
        Self { connection, hosts, loss: None, starter, has_greeted: false, have_ended }
    }

    /// Returns the number of channels.
    pub(super) fn channel_count(&self) -> u16 {
        self.have_ended.len() as u16
    }

    /// Returns whether there is more to read at once.
    pub(super) fn is_readable(&self) -> bool {
        self.loss.is_none() && self.connection.link.is_readable()
    }

    /// Gives up the relay, with all hosts behind it.
    pub(super) fn lose(&mut self, loss: LostRelay) {
        self.loss.get_or_insert(loss);
        self.connection.link.close();
    }

    /// Reads and writes as much as is possible now, and returns what the relay has said about each channel. `host` is the name
    /// of the host of the relay, and of the host that has run its ssh if this is not the host of ringrun.
    pub(super) fn advance(&mut self, host: (&Arc<str>, Option<&str>)) -> Vec<(u16, ChannelEvent)> {
        let mut events = Vec::new();
        if self.loss.is_some() {
            return events;
        }
        self.connection.advance();
        let handled =
            self.connection.link.receive().map_err(|reason| (Exit::Protocol, reason)).and_then(|frames| {
                frames.into_iter().try_for_each(|frame| self.handle_frame(frame, &mut events))
            });
        let name: &str = host.0;
        let end = match handled {
            Err(broken_rule) => Some(broken_rule),
            Ok(()) => self.connection.find_end(self.has_greeted, (name, host.1), &self.starter),
        };
        if let Some((exit, reason)) = end {
            self.lose(LostRelay { host: Arc::clone(host.0), exit, reason: Some(reason) });
        }
        events
    }

    fn handle_frame(
        &mut self,
        frame: AgentFrame,
        events: &mut Vec<(u16, ChannelEvent)>,
    ) -> Result<(), (Exit, String)> {
        let broken_rule = |reason: String| (Exit::Protocol, reason);
        match frame {
            AgentFrame::Relayed { channel, stream, bytes } if self.has_greeted => {
                self.check_channel(channel).map_err(broken_rule)?;
                events.push((channel, ChannelEvent::Bytes(stream, bytes)));
                Ok(())
            }
            AgentFrame::Message(body) => match AgentFrame::parse(&body).map_err(broken_rule)? {
                FromRelay::Hello { version } if !self.has_greeted => self.handle_hello(&version),
                FromRelay::Ended { channel, code } if self.has_greeted => {
                    self.check_channel(channel).map_err(broken_rule)?;
                    self.have_ended[usize::from(channel)] = true;
                    events.push((channel, ChannelEvent::Ended(code)));
                    Ok(())
                }
                FromRelay::Hello { .. } | FromRelay::Ended { .. } => {
                    Err(broken_rule("it sent a message that is not allowed now".to_owned()))
                }
            },
            AgentFrame::Relayed { .. } | AgentFrame::Output { .. } | AgentFrame::Input(_) => {
                Err(broken_rule("it sent a frame that a relay may not send now".to_owned()))
            }
        }
    }

    /// Checks the version, and lets the relay start the programs at the ends of its channels.
    fn handle_hello(&mut self, version: &str) -> Result<(), (Exit, String)> {
        check_version(version).map_err(|reason| (Exit::Version, reason))?;
        self.has_greeted = true;
        let agent = (OWN_AGENT_CHANNEL, None);
        let hosts = self.hosts.iter().map(|host| {
            let program = if host.has_relay { RELAY_OPTION } else { AGENT_OPTION };
            Some(self.starter.arguments(&host.name, program))
        });
        for (channel, ssh) in [agent].into_iter().chain((OWN_AGENT_CHANNEL + 1..).zip(hosts)) {
            self.connection.link.send(&encode_message(&ToRelay::Open { channel, ssh }));
        }
        Ok(())
    }

    fn check_channel(&self, channel: u16) -> Result<(), String> {
        match self.have_ended.get(usize::from(channel)) {
            Some(false) => Ok(()),
            Some(true) => Err(format!("it sent something of channel {channel}, which has ended")),
            None => Err(format!("it sent something of channel {channel}, which it does not have")),
        }
    }

    /// Passes on what ringrun has sent through one of the channels.
    pub(super) fn send(&mut self, channel: u16, pieces: &[Vec<u8>]) {
        for piece in pieces {
            self.connection.link.send(&encode_relayed(channel, OutputStream::Stdout, piece));
        }
    }

    /// Returns whether the relay takes bytes of its channels.
    pub(super) fn is_open(&self) -> bool {
        self.has_greeted && self.loss.is_none()
    }
}

/// Returns an error if an agent or a relay has another version than this ringrun.
pub(super) fn check_version(version: &str) -> Result<(), String> {
    let own = env!("CARGO_PKG_VERSION");
    if version == own {
        return Ok(());
    }
    let version = printable(version);
    Err(format!(
        "its ringrun has the version {version}, and this ringrun has the version {own}; install the same version on all \
         hosts"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::frames::{FrameReader, MAGIC, encode_input, encode_output};
    use crate::launch::plan::SshOptions;
    use crate::types::Rank;

    /// A relay of host `a` with the hosts `b`, which has a relay, and `c`. The test makes the bytes of its connection.
    fn make_relay() -> RelayLink {
        let host = |index, name: &str, has_relay| RelayedHost { index, name: name.into(), has_relay };
        let starter = AgentStarter {
            options: SshOptions::default(),
            own_path: "/ringrun".into(),
            start_timeout: std::time::Duration::from_secs(30),
        };
        RelayLink::new(
            HostConnection::of_channel(),
            vec![host(1, "b", true), host(2, "c", false)],
            starter.into(),
        )
    }

    /// Pushes frames of the relay, and returns the events, or why the relay is lost.
    fn advance(relay: &mut RelayLink, frames: &[Vec<u8>]) -> Result<Vec<(u16, ChannelEvent)>, LostRelay> {
        relay.connection.push_received(OutputStream::Stdout, &[MAGIC, &frames.concat()].concat());
        let events = relay.advance((&"a".into(), None));
        relay.loss.clone().map_or(Ok(events), Err)
    }

    fn hello(version: &str) -> Vec<u8> {
        encode_message(&FromRelay::Hello { version: version.to_owned() })
    }

    fn ended(channel: u16) -> Vec<u8> {
        encode_message(&FromRelay::Ended { channel, code: Some(0) })
    }

    fn bytes(channel: u16) -> Vec<u8> {
        encode_relayed(channel, OutputStream::Stdout, b"x")
    }

    const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");

    #[test]
    fn a_relay_of_the_same_version_opens_a_channel_for_each_host() {
        let mut relay = make_relay();
        assert!(!relay.is_open() && relay.connection.link.take_unsent().is_empty());
        let events = advance(&mut relay, &[hello(OWN_VERSION), bytes(2), ended(0)]).unwrap();
        let data = ChannelEvent::Bytes(OutputStream::Stdout, b"x".to_vec());
        assert_eq!(events, [(2, data), (0, ChannelEvent::Ended(Some(0)))]);
        let mut reader = FrameReader::of_launcher();
        reader.push(&relay.connection.link.take_unsent().concat());
        let mut opened = Vec::new();
        while let Some(AgentFrame::Message(body)) = reader.next_frame().unwrap() {
            let ToRelay::Open { channel, ssh } = AgentFrame::parse(&body).unwrap();
            let line = ssh.map(|arguments| arguments.last().unwrap().to_string_lossy().into_owned());
            opened.push((channel, line.map(|line| line.contains(RELAY_OPTION))));
        }
        assert_eq!(opened, [(0, None), (1, Some(true)), (2, Some(false))]);
    }

    #[test]
    fn a_relay_that_breaks_a_rule_is_lost() {
        let own = || hello(OWN_VERSION);
        let cases: [(&[Vec<u8>], Exit, &str); 9] = [
            (&[hello("0.0.1")], Exit::Version, "has the version 0.0.1"),
            (&[own(), own()], Exit::Protocol, "not allowed now"),
            (&[ended(0)], Exit::Protocol, "not allowed now"),
            (&[bytes(0)], Exit::Protocol, "may not send now"),
            (&[own(), bytes(3)], Exit::Protocol, "channel 3, which it does not have"),
            (&[own(), ended(u16::MAX)], Exit::Protocol, "channel 65535, which it does not have"),
            (&[own(), ended(1), bytes(1)], Exit::Protocol, "channel 1, which has ended"),
            (&[own(), encode_input(b"")], Exit::Protocol, "may not send"),
            (&[own(), encode_output(Rank::ZERO, OutputStream::Stdout, b"")], Exit::Protocol, "may not send"),
        ];
        for (frames, exit, part) in cases {
            let mut relay = make_relay();
            let loss = advance(&mut relay, frames).expect_err(part);
            let reason = loss.reason.clone().unwrap_or_default();
            assert!(loss.exit == exit && reason.contains(part), "{part}: {loss:?}");
            assert!(loss.describe().starts_with("it is lost with host a: "), "{}", loss.describe());
            // ringrun sends nothing more, and the relay then ends its programs.
            assert_eq!(relay.connection.link.take_unsent().last(), Some(&Vec::new()), "{part}");
            assert!(!relay.is_open() && relay.advance((&"a".into(), None)).is_empty());
        }
    }
}
