//! The frames that ringrun exchanges through ssh with its agents and relays on other hosts, and their limits. This module
//! performs no IO.
//!
//! A frame is a length (u32, little-endian), a kind (1 byte) and a body of this length. The body of kind 0 is a message in
//! JSON. The body of kind 1 is output of a rank: the rank (u32, little-endian), the stream (0 or 1), and the bytes. The body of
//! kind 2 is a part of the standard input of ringrun. The body of kind 3 is for [relays](super::relay): a channel (u16,
//! little-endian), the stream (0 or 1), and bytes of the program at the end of the channel, which the relay does not read.
//!
//! An agent or a relay begins with [`MAGIC`]. The shell that starts the agent may print text before, for example from `.bashrc`.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::streams::OutputStream;
use crate::types::Rank;

/// The first bytes that an agent or a relay writes.
pub(super) const MAGIC: &[u8] = b"\0ringrun-agent\0";

/// The most bytes of text before [`MAGIC`] that ringrun ignores.
const TEXT_BEFORE_MAGIC_BYTES_MAX: usize = 64 << 10;

/// The maximal length of the body of a frame from ringrun to an agent. The description of a job has the arguments and variables
/// of the ranks; the kernel allows about 2 MiB of them, and JSON may need 4 characters for a byte.
pub(super) const BODY_TO_AGENT_BYTES_MAX: usize = 16 << 20;

/// The maximal length of the body of a frame from an agent to ringrun.
pub(super) const BODY_FROM_AGENT_BYTES_MAX: usize = 128 << 10;

/// The maximal number of output bytes, or of bytes of a channel, in a frame.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 10;

const HEADER_BYTES: usize = 5;
const OUTPUT_HEADER_BYTES: usize = 5;
const RELAYED_HEADER_BYTES: usize = 3;
const MESSAGE_KIND: u8 = 0;
const OUTPUT_KIND: u8 = 1;
const INPUT_KIND: u8 = 2;
const RELAYED_KIND: u8 = 3;
const _: () = assert!(OUTPUT_HEADER_BYTES + OUTPUT_BYTES_MAX <= BODY_FROM_AGENT_BYTES_MAX);
const _: () = assert!(RELAYED_HEADER_BYTES <= OUTPUT_HEADER_BYTES);

/// A frame that has arrived.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum AgentFrame {
    /// A message in JSON.
    Message(Vec<u8>),
    /// Output of a rank. No bytes mean that the stream has ended.
    Output { rank: Rank, stream: OutputStream, bytes: Vec<u8> },
    /// A part of the standard input of ringrun. No bytes mean that the input has ended.
    Input(Vec<u8>),
    /// Bytes of a channel of a relay. No bytes mean that the stream has ended.
    Relayed { channel: u16, stream: OutputStream, bytes: Vec<u8> },
}

impl AgentFrame {
    /// Parses the message of a frame.
    pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
        serde_json::from_slice(body).map_err(|error| format!("it sent a message that is not valid: {error}"))
    }
}

/// Returns the frame of a message.
pub(super) fn encode_message(message: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("a message has only string keys and no failing serializer");
    encode_frame(MESSAGE_KIND, &[&body])
}

/// Returns the frame of output of a rank, of at most [`OUTPUT_BYTES_MAX`] bytes.
pub(super) fn encode_output(rank: Rank, stream: OutputStream, bytes: &[u8]) -> Vec<u8> {
    encode_frame(OUTPUT_KIND, &[&rank.get().to_le_bytes(), &[stream as u8], bytes])
}

/// Returns the frame of a part of the standard input.
pub(super) fn encode_input(bytes: &[u8]) -> Vec<u8> {
    encode_frame(INPUT_KIND, &[bytes])
}

/// Returns the frame of at most [`OUTPUT_BYTES_MAX`] bytes of a channel. To a relay, the stream is always the first.
pub(super) fn encode_relayed(channel: u16, stream: OutputStream, bytes: &[u8]) -> Vec<u8> {
    encode_frame(RELAYED_KIND, &[&channel.to_le_bytes(), &[stream as u8], bytes])
}

fn encode_frame(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let header = [&(length as u32).to_le_bytes()[..], &[kind]].concat();
    [&header[..], &parts.concat()].concat()
}

/// Cuts the received bytes into frames.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    body_bytes_max: usize,
    /// Whether [`MAGIC`] has not arrived yet.
    waits_for_magic: bool,
}

impl FrameReader {
    /// Reads the frames of ringrun.
    pub(super) fn of_launcher() -> Self {
        Self { buffer: Vec::new(), body_bytes_max: BODY_TO_AGENT_BYTES_MAX, waits_for_magic: false }
    }

    /// Reads the frames of an agent, which begin after [`MAGIC`].
    pub(super) fn of_agent() -> Self {
        Self { buffer: Vec::new(), body_bytes_max: BODY_FROM_AGENT_BYTES_MAX, waits_for_magic: true }
    }

    /// Adds received bytes. Call [`Self::next_frame`] until it returns `None` before you add more bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the text that the other host has printed before [`MAGIC`], or `None` after [`MAGIC`].
    pub(super) fn text_before_magic(&self) -> Option<&[u8]> {
        self.waits_for_magic.then_some(&self.buffer)
    }

    /// Returns the next frame, or `None` if it is not complete.
    ///
    /// # Errors
    ///
    /// A sentence that says which rule the sender has broken.
    pub(super) fn next_frame(&mut self) -> Result<Option<AgentFrame>, String> {
        if self.waits_for_magic {
            let Some(start) = self.buffer.windows(MAGIC.len()).position(|window| window == MAGIC) else {
                let is_too_long = self.buffer.len() > TEXT_BEFORE_MAGIC_BYTES_MAX;
                return if is_too_long {
                    Err("it printed text and did not start an agent".into())
                } else {
                    Ok(None)
                };
            };
            self.buffer.drain(..start + MAGIC.len());
            self.waits_for_magic = false;
        }
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [a, b, c, d, kind] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > self.body_bytes_max {
            return Err(format!(
                "it sent a message of {length} bytes; at most {} are allowed",
                self.body_bytes_max
            ));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let frame = parse_body(kind, body)?;
        self.buffer.drain(..HEADER_BYTES + length);
        Ok(Some(frame))
    }
}

fn parse_body(kind: u8, body: &[u8]) -> Result<AgentFrame, String> {
    match kind {
        MESSAGE_KIND => Ok(AgentFrame::Message(body.to_vec())),
        INPUT_KIND => Ok(AgentFrame::Input(body.to_vec())),
        OUTPUT_KIND => {
            let Some((&[a, b, c, d, stream], bytes)) = body.split_first_chunk::<OUTPUT_HEADER_BYTES>() else {
                return Err("it sent output without a rank".into());
            };
            let stream = parse_stream(stream)?;
            Ok(AgentFrame::Output {
                rank: Rank::new(u32::from_le_bytes([a, b, c, d])),
                stream,
                bytes: bytes.to_vec(),
            })
        }
        RELAYED_KIND => {
            let Some((&[a, b, stream], bytes)) = body.split_first_chunk::<RELAYED_HEADER_BYTES>() else {
                return Err("it sent bytes without a channel".into());
            };
            let (channel, stream) = (u16::from_le_bytes([a, b]), parse_stream(stream)?);
            Ok(AgentFrame::Relayed { channel, stream, bytes: bytes.to_vec() })
        }
        other => Err(format!("it sent a frame of the unknown kind {other}")),
    }
}

fn parse_stream(number: u8) -> Result<OutputStream, String> {
    match number {
        0 => Ok(OutputStream::Stdout),
        1 => Ok(OutputStream::Stderr),
        other => Err(format!("it sent output of the unknown stream {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the bytes one by one and returns all frames, or the first error.
    fn read(mut reader: FrameReader, bytes: &[u8]) -> Result<Vec<AgentFrame>, String> {
        let mut frames = Vec::new();
        for byte in bytes {
            reader.push(&[*byte]);
            frames.extend(reader.next_frame()?);
        }
        Ok(frames)
    }

    #[test]
    fn frames_are_read_in_any_pieces_and_after_text_of_the_shell() {
        let output = encode_output(Rank::new(7), OutputStream::Stderr, b"a\nb");
        let input = encode_input(b"in");
        let relayed = encode_relayed(258, OutputStream::Stdout, b"");
        let start = [&b"Welcome to b!\n"[..], MAGIC, &encode_message(&"hello")].concat();
        let bytes = [start, output, input, relayed].concat();
        let expected = [
            AgentFrame::Message(b"\"hello\"".to_vec()),
            AgentFrame::Output { rank: Rank::new(7), stream: OutputStream::Stderr, bytes: b"a\nb".to_vec() },
            AgentFrame::Input(b"in".to_vec()),
            AgentFrame::Relayed { channel: 258, stream: OutputStream::Stdout, bytes: Vec::new() },
        ];
        assert_eq!(read(FrameReader::of_agent(), &bytes).unwrap(), expected);
    }

    #[test]
    fn what_breaks_a_limit_is_refused() {
        let cases: [(&str, FrameReader, Vec<u8>, &str); 7] = [
            (
                "endless text",
                FrameReader::of_agent(),
                vec![b'x'; TEXT_BEFORE_MAGIC_BYTES_MAX + 1],
                "printed text",
            ),
            (
                "a long body",
                FrameReader::of_agent(),
                [MAGIC, &(BODY_FROM_AGENT_BYTES_MAX as u32 + 1).to_le_bytes(), &[0]].concat(),
                "at most",
            ),
            ("an unknown kind", FrameReader::of_launcher(), vec![0, 0, 0, 0, 9], "kind 9"),
            ("output without a rank", FrameReader::of_launcher(), vec![1, 0, 0, 0, 1, 5], "without a rank"),
            ("a third stream", FrameReader::of_launcher(), vec![5, 0, 0, 0, 1, 0, 0, 0, 0, 2], "stream 2"),
            ("no channel", FrameReader::of_launcher(), vec![2, 0, 0, 0, 3, 0, 0], "without a channel"),
            (
                "a channel's third stream",
                FrameReader::of_launcher(),
                vec![3, 0, 0, 0, 3, 0, 0, 2],
                "stream 2",
            ),
        ];
        for (case, mut reader, bytes, part) in cases {
            reader.push(&bytes);
            let error = reader.next_frame().expect_err(case);
            assert!(error.contains(part), "{case}: {error}");
        }
    }
}
