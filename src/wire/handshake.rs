//! The handshake at the beginning of every connection: which rank of which job dials, and proofs that both sides know the
//! job's secret.
//!
//! The dialer sends its hello with a nonce. The acceptor answers with its nonce and an HMAC-SHA256 over both hellos. The dialer
//! sends an HMAC under another label, so that a proof cannot be reflected. The acceptor answers with its verdict. Nothing else
//! is read from a connection before that. Both sides are state machines without IO: [`Handshake::wanted`] says how many bytes
//! they need, and [`Handshake::feed`] takes them.

use super::VERSION;
use super::reader::{Excerpt, Reader};
use super::secret::Secret;
use crate::types::{Rank, WORLD_SIZE_MAX};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;
/// Bytes of the dialer's hello.
const DIALER_HELLO_BYTES: usize = 104;
/// Bytes of the acceptor's hello.
const ACCEPTOR_HELLO_BYTES: usize = 80;
/// Bytes of the acceptor's hello that its proof covers.
const ACCEPTOR_HELLO_PROVED: usize = ACCEPTOR_HELLO_BYTES - 32;
/// Bytes of the dialer's proof.
const PROOF_BYTES: usize = 32;
/// Bytes of the acceptor's verdict.
const VERDICT_BYTES: usize = 4;

const MAGIC: [u8; 8] = *b"RINGTRAI";
const ACCEPTOR_LABEL: &[u8] = b"ringtrain 1 acceptor";
const DIALER_LABEL: &[u8] = b"ringtrain 1 dialer";

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// It carries frames between two ranks.
    Link = 1,
    /// It connects a rank to the rendezvous.
    Rendezvous = 2,
}

/// The job's properties that both ends must have in common.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Job {
    /// Its id, made by the launcher; all zero for a job that a peers file describes.
    pub id: [u8; 16],
    /// The number of ranks.
    pub world: u32,
    /// A digest of the peers file; all zero for a launcher's job.
    pub peers_digest: [u8; 32],
}

/// The most connections that a link may have.
pub const STREAMS_MAX: u8 = 8;

/// Which of a link's connections this one is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    /// Its number, from 0. The link begins with number 0; the rank that has opened it also opens the others.
    pub index: u8,
    /// The number of the link's connections.
    pub of: u8,
}

impl Stream {
    /// The only connection of a link.
    pub const ONLY: Self = Self { index: 0, of: 1 };

    /// Whether a link may have such a connection.
    pub fn is_possible(self) -> bool {
        self.of <= STREAMS_MAX && self.index < self.of
    }
}

/// What the dialer says about itself and the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Introduction {
    /// What the connection is for.
    pub purpose: Purpose,
    /// The rank that dials.
    pub from: Rank,
    /// The rank that is dialed; for the rendezvous the rank that serves it.
    pub to: Rank,
    /// Which of a link's connections it is; for the rendezvous [`Stream::ONLY`].
    pub stream: Stream,
}

/// Why the acceptor refused; sent as the verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another protocol version.
    #[error("it speaks another version of the protocol")]
    Version,
    /// Another secret.
    #[error("it has another secret")]
    Secret,
    /// Another job.
    #[error("it belongs to another job")]
    Job,
    /// Another world size.
    #[error("it was started for another number of ranks")]
    World,
    /// Another peers file.
    #[error("its peers file differs")]
    PeersFile,
    /// The rank is not below the world size, or the connection was meant for another rank.
    #[error("the rank is out of range or the connection was meant for another rank")]
    Rank,
    /// The dialer claims the rank of the process that it dialed.
    #[error("both processes were started as the same rank; start each rank once")]
    SameRank,
    /// A stream that a link cannot have.
    #[error("a link has at most {STREAMS_MAX} connections, numbered from 0")]
    Stream,
}

impl Refusal {
    const ALL: [(u8, Self); 8] = [
        (1, Self::Version),
        (2, Self::Secret),
        (3, Self::Job),
        (4, Self::World),
        (5, Self::PeersFile),
        (6, Self::Rank),
        (7, Self::Stream),
        (8, Self::SameRank),
    ];

    fn to_byte(self) -> u8 {
        Self::ALL.iter().find(|(_, refusal)| *refusal == self).map_or(0, |&(byte, _)| byte)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.iter().find(|&&(b, _)| b == byte).map(|&(_, refusal)| refusal)
    }
}

/// Why a handshake failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other side is another kind of program, such as a browser or a port scanner.
    #[error("it does not speak ringtrain's protocol (it began with {began_with})")]
    NotRingtrain {
        /// Its first bytes, escaped.
        began_with: String,
    },
    /// The peer speaks another version.
    #[error(
        "it speaks protocol version {theirs}, this is version {VERSION}; install the same ringtrain on every host"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The proof is wrong.
    #[error("its secret is not ours; give every rank the same --secret-file")]
    Secret,
    /// The peer refused this rank, before or after its proof.
    #[error("it refused this rank: from its side, {0}")]
    Refused(Refusal),
    /// This side refuses the peer.
    #[error("refused: {0}")]
    Unwelcome(Refusal),
    /// A field has a value that this version does not know.
    #[error("its hello has an unknown {0}")]
    Unknown(&'static str),
}

/// One side of a handshake, without its IO.
pub trait Handshake {
    /// How many bytes it needs before it can go on; 0 when the handshake is over.
    fn wanted(&self) -> usize;

    /// Takes up to [`Handshake::wanted`] bytes from the connection.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`]. Send the remaining [`Handshake::take_output`] before you close the connection.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError>;

    /// Takes the bytes to send now; empty if there are none.
    fn take_output(&mut self) -> Vec<u8>;
}

/// The side that opened the connection.
pub struct Dialer {
    secret: Secret,
    state: DialerState,
    hello: Vec<u8>,
    input: Vec<u8>,
    output: Vec<u8>,
}

#[derive(PartialEq, Eq)]
enum DialerState {
    Hello,
    Verdict,
    Done,
}

impl Dialer {
    /// A dialer of `job` that introduces itself; `nonce` is random.
    pub fn new(secret: Secret, job: &Job, introduction: Introduction, nonce: [u8; NONCE_BYTES]) -> Self {
        let mut hello = Vec::with_capacity(DIALER_HELLO_BYTES);
        hello.extend_from_slice(&MAGIC);
        hello.extend_from_slice(&VERSION.to_le_bytes());
        hello.push(introduction.purpose as u8);
        hello.extend_from_slice(&[0; 13]);
        hello.extend_from_slice(&job.world.to_le_bytes());
        hello.extend_from_slice(&introduction.from.get().to_le_bytes());
        hello.extend_from_slice(&introduction.to.get().to_le_bytes());
        hello.extend_from_slice(&[introduction.stream.index, introduction.stream.of, 0, 0]);
        hello.extend_from_slice(&job.id);
        hello.extend_from_slice(&digest_prefix(job));
        hello.extend_from_slice(&nonce);
        debug_assert_eq!(hello.len(), DIALER_HELLO_BYTES, "the layout of docs/wire-format.md");
        Self { secret, state: DialerState::Hello, output: hello.clone(), hello, input: Vec::new() }
    }

    /// Whether it has sent its proof. From then on the acceptor may accept the connection at any moment.
    pub fn has_proved(&self) -> bool {
        self.state != DialerState::Hello
    }

    fn read_hello(&mut self) -> Result<(), HandshakeError> {
        let input = std::mem::take(&mut self.input);
        let mut reader = Reader(&input);
        let fields = (|| Some((reader.array::<8>()?, reader.u16()?, reader.u8()?)))();
        let (magic, version, refusal) = fields.ok_or(HandshakeError::Unknown("length"))?;
        if magic != MAGIC {
            return Err(HandshakeError::NotRingtrain { began_with: Excerpt(&input).to_string() });
        }
        if version != VERSION {
            return Err(HandshakeError::Version { theirs: version });
        }
        if let Some(refusal) = Refusal::from_byte(refusal) {
            return Err(HandshakeError::Refused(refusal));
        }
        let (proved, proof) = input.split_at(ACCEPTOR_HELLO_PROVED);
        let proof = proof.try_into().map_err(|_| HandshakeError::Unknown("length"))?;
        if !self.secret.verifies(&[ACCEPTOR_LABEL, &self.hello, proved], proof) {
            // This tells the acceptor why the dialer closes the connection. A real proof would help an attacker to guess.
            self.output = vec![0; PROOF_BYTES];
            return Err(HandshakeError::Secret);
        }
        self.output = self.secret.mac(&[DIALER_LABEL, &self.hello, &input]).to_vec();
        self.state = DialerState::Verdict;
        Ok(())
    }

    fn read_verdict(&mut self) -> Result<(), HandshakeError> {
        self.state = DialerState::Done;
        match self.input.first() {
            Some(0) => Ok(()),
            Some(&byte) => {
                Err(Refusal::from_byte(byte)
                    .map_or(HandshakeError::Unknown("verdict"), HandshakeError::Refused))
            }
            None => Err(HandshakeError::Unknown("verdict")),
        }
    }
}

impl Handshake for Dialer {
    fn wanted(&self) -> usize {
        let size = match self.state {
            DialerState::Hello => ACCEPTOR_HELLO_BYTES,
            DialerState::Verdict => VERDICT_BYTES,
            DialerState::Done => 0,
        };
        size.saturating_sub(self.input.len())
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.input.extend_from_slice(&bytes[..bytes.len().min(self.wanted())]);
        if self.state == DialerState::Hello {
            reject_strangers(&self.input)?;
        }
        if self.wanted() > 0 {
            return Ok(());
        }
        match self.state {
            DialerState::Hello => self.read_hello(),
            DialerState::Verdict => self.read_verdict(),
            DialerState::Done => Ok(()),
        }
    }

    fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }
}

/// The side that accepted the connection.
pub struct Acceptor {
    secret: Secret,
    job: Job,
    own_rank: Option<Rank>,
    nonce: [u8; NONCE_BYTES],
    state: AcceptorState,
    claimed: Option<Introduction>,
    input: Vec<u8>,
    output: Vec<u8>,
}

enum AcceptorState {
    Hello,
    Proof { hello: Vec<u8>, own_hello: Vec<u8>, introduction: Introduction },
    Done(Introduction),
    Failed,
}

impl Acceptor {
    /// An acceptor of `job`. Links must be meant for `own_rank`, which is `None` for a launcher's rendezvous because it is not a
    /// rank. `nonce` is random.
    pub fn new(secret: Secret, job: Job, own_rank: Option<Rank>, nonce: [u8; NONCE_BYTES]) -> Self {
        let state = AcceptorState::Hello;
        Self { secret, job, own_rank, nonce, state, claimed: None, input: Vec::new(), output: Vec::new() }
    }

    /// The dialer, once the handshake is over.
    pub fn introduction(&self) -> Option<Introduction> {
        match self.state {
            AcceptorState::Done(introduction) => Some(introduction),
            _ => None,
        }
    }

    /// Whether the dialer has said, without proof, that it wants a link.
    pub fn is_link(&self) -> bool {
        self.claimed.is_some_and(|introduction| introduction.purpose == Purpose::Link)
    }

    /// The rank that the dialer claims to be, without proof.
    pub fn claimed_rank(&self) -> Option<Rank> {
        self.claimed.map(|introduction| introduction.from)
    }

    /// Whether the dialer has sent nothing.
    pub fn is_silent(&self) -> bool {
        self.claimed.is_none() && self.input.is_empty()
    }

    fn read_hello(&mut self) -> Result<(), HandshakeError> {
        let hello = std::mem::take(&mut self.input);
        let own_hello = |refusal: u8, nonce: &[u8; NONCE_BYTES]| {
            let mut out = Vec::with_capacity(ACCEPTOR_HELLO_BYTES);
            out.extend_from_slice(&MAGIC);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.push(refusal);
            out.extend_from_slice(&[0; 5]);
            out.extend_from_slice(nonce);
            out
        };
        let mut reader = Reader(&hello);
        let version = reader.bytes(8).and(reader.u16()).ok_or(HandshakeError::Unknown("length"))?;
        if version != VERSION {
            self.output = own_hello(Refusal::Version.to_byte(), &self.nonce);
            self.output.extend_from_slice(&[0; 32]);
            self.state = AcceptorState::Failed;
            return Err(HandshakeError::Version { theirs: version });
        }
        let introduction = (|| {
            let purpose = match reader.u8()? {
                1 => Purpose::Link,
                2 => Purpose::Rendezvous,
                _ => return None,
            };
            reader.bytes(13)?;
            let _world = reader.u32()?;
            let (from, to) = (Rank::new(reader.u32()?), Rank::new(reader.u32()?));
            let stream = Stream { index: reader.u8()?, of: reader.u8()? };
            Some(Introduction { purpose, from, to, stream })
        })()
        .ok_or(HandshakeError::Unknown("purpose"))?;
        self.claimed = Some(introduction);
        let mut answer = own_hello(0, &self.nonce);
        let proof = self.secret.mac(&[ACCEPTOR_LABEL, &hello, &answer]);
        answer.extend_from_slice(&proof);
        debug_assert_eq!(answer.len(), ACCEPTOR_HELLO_BYTES, "the layout of docs/wire-format.md");
        self.output.clone_from(&answer);
        self.state = AcceptorState::Proof { hello, own_hello: answer, introduction };
        Ok(())
    }

    fn read_proof(&mut self) -> Result<(), HandshakeError> {
        let state = std::mem::replace(&mut self.state, AcceptorState::Failed);
        let AcceptorState::Proof { hello, own_hello, introduction } = state else { return Ok(()) };
        let proof: [u8; PROOF_BYTES] =
            std::mem::take(&mut self.input).try_into().map_err(|_| HandshakeError::Unknown("length"))?;
        if !self.secret.verifies(&[DIALER_LABEL, &hello, &own_hello], &proof) {
            self.output = verdict(Some(Refusal::Secret));
            return Err(HandshakeError::Secret);
        }
        // The exact reason of a refusal is sent only to a dialer whose proof is valid.
        let refusal = self.objection(&hello, introduction);
        self.output = verdict(refusal);
        if let Some(refusal) = refusal {
            return Err(HandshakeError::Unwelcome(refusal));
        }
        self.state = AcceptorState::Done(introduction);
        Ok(())
    }

    fn objection(&self, hello: &[u8], introduction: Introduction) -> Option<Refusal> {
        let mut reader = Reader(hello.get(24..)?);
        let world = reader.u32()?;
        reader.bytes(12)?;
        let id = reader.array::<16>()?;
        let digest = reader.array::<16>()?;
        if id != self.job.id {
            return Some(Refusal::Job);
        }
        if world != self.job.world || world > WORLD_SIZE_MAX {
            return Some(Refusal::World);
        }
        if digest != digest_prefix(&self.job) {
            return Some(Refusal::PeersFile);
        }
        let misdirected = self.own_rank.is_some_and(|own| own != introduction.to);
        if introduction.from.get() >= world || misdirected {
            return Some(Refusal::Rank);
        }
        if self.own_rank == Some(introduction.from) {
            return Some(Refusal::SameRank);
        }
        (!introduction.stream.is_possible()).then_some(Refusal::Stream)
    }
}

impl Handshake for Acceptor {
    fn wanted(&self) -> usize {
        let size = match self.state {
            AcceptorState::Hello => DIALER_HELLO_BYTES,
            AcceptorState::Proof { .. } => PROOF_BYTES,
            AcceptorState::Done(_) | AcceptorState::Failed => 0,
        };
        size.saturating_sub(self.input.len())
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.input.extend_from_slice(&bytes[..bytes.len().min(self.wanted())]);
        if matches!(self.state, AcceptorState::Hello)
            && let Err(stranger) = reject_strangers(&self.input)
        {
            self.state = AcceptorState::Failed;
            return Err(stranger);
        }
        if self.wanted() > 0 {
            return Ok(());
        }
        match self.state {
            AcceptorState::Hello => self.read_hello(),
            AcceptorState::Proof { .. } => self.read_proof(),
            AcceptorState::Done(_) | AcceptorState::Failed => Ok(()),
        }
    }

    fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }
}

/// Fails as soon as the first bytes differ from the magic, so that this side does not wait for more of them.
fn reject_strangers(input: &[u8]) -> Result<(), HandshakeError> {
    let known = input.len().min(MAGIC.len());
    if input[..known] == MAGIC[..known] {
        return Ok(());
    }
    Err(HandshakeError::NotRingtrain { began_with: Excerpt(input).to_string() })
}

fn verdict(refusal: Option<Refusal>) -> Vec<u8> {
    vec![refusal.map_or(0, Refusal::to_byte), 0, 0, 0]
}

/// The first half of the digest, which is enough to distinguish two files.
fn digest_prefix(job: &Job) -> [u8; 16] {
    let mut prefix = [0; 16];
    prefix.copy_from_slice(&job.peers_digest[..16]);
    prefix
}
