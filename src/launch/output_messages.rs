//! What the job's thread and the output thread tell each other.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use mio::Waker;

use super::message::{LaunchMessage, MessageFormat};
use super::output_files::OutputFiles;
use super::plan::OutputFormat;
use super::rank_processes::RankStreams;
use super::streams::OutputStream;
use crate::types::Rank;

/// A command to the output thread.
pub(super) enum OutputCommand {
    ReadStreams(Rank, RankStreams),
    /// Print bytes that an agent has sent. No bytes mean that the stream has ended.
    PrintRemoteBytes {
        agent: usize,
        rank: Rank,
        stream: OutputStream,
        bytes: Vec<u8>,
    },
    /// Allow the thread of an agent to pass on this number of further bytes.
    AddCredit(usize),
    PrintMessage(LaunchMessage),
    DrainPipes,
}

/// An event that the output thread sends to the job's thread.
#[derive(Debug)]
pub(super) enum OutputEvent {
    /// Writing to ringrun's standard output failed with this `errno`.
    StdoutFailed(i32),
    /// All output has been written.
    Drained(OutputSummary),
    /// This number of bytes of an agent has been printed.
    RemotePrinted {
        /// The number of the agent.
        agent: usize,
        /// The number of bytes.
        count: usize,
    },
    /// In an agent: bytes for ringrun. No bytes mean that the stream has ended.
    Forwarded {
        /// The rank that has written the bytes.
        rank: Rank,
        /// The stream of the rank.
        stream: OutputStream,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// In an agent: a message for the user.
    Note(LaunchMessage),
}

/// What the output thread does with the output.
pub(super) enum OutputTarget {
    /// Prints it and messages in these formats, and writes it to the files of `--output-dir`.
    Terminal((OutputFormat, MessageFormat), OutputFiles),
    /// Passes it on to ringrun: [`OutputEvent::Forwarded`]. At first, this number of bytes.
    Launcher(usize),
}

/// The information about the output in ringrun's final report.
#[derive(Default, Debug)]
pub(super) struct OutputSummary {
    /// The last lines that each rank printed.
    pub(super) last_lines: Vec<Vec<String>>,
    /// A message for each file of `--output-dir`, and for standard output, that could not be written completely.
    pub(super) write_failures: Vec<LaunchMessage>,
}

/// Sends commands to the output thread.
#[derive(Clone, Debug)]
pub(super) struct OutputCommandSender {
    pub(super) sender: Sender<OutputCommand>,
    pub(super) waker: Arc<Waker>,
}

impl OutputCommandSender {
    /// Writes a message of ringrun itself to standard error, between the lines of the ranks.
    pub(super) fn print_message(&self, message: LaunchMessage) {
        self.send(OutputCommand::PrintMessage(message));
    }

    /// Prints bytes that an agent has sent. No bytes mean that the stream has ended.
    pub(super) fn add_remote_bytes(&self, agent: usize, rank: Rank, stream: OutputStream, bytes: Vec<u8>) {
        self.send(OutputCommand::PrintRemoteBytes { agent, rank, stream, bytes });
    }

    /// Sends a command.
    pub(super) fn send(&self, command: OutputCommand) {
        // Sending fails if the thread has ended. Ignore the error, because an ended thread needs no command.
        let _ = self.sender.send(command);
        let _ = self.waker.wake();
    }
}
