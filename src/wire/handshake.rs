//! The handshake at the beginning of every connection. The dialer sends its rank and the id of its job, and each side
//! proves that it knows the job's secret.
//!
//! The dialer sends its hello with a nonce. The acceptor answers with its nonce and an HMAC-SHA256 over both hellos.
//! The dialer then sends its own HMAC, which uses another label. Because the labels differ, a dialer cannot send the
//! acceptor's proof back as its own. The acceptor answers with its verdict, which accepts or refuses the connection.
//! Neither side reads a frame before the verdict. Both sides are state machines without IO (see [`Handshake`]).

use super::VERSION;
pub use super::introduction::{ConnectionPurpose, Introduction, Job, STREAMS_MAX, StreamId};
use super::reader::{Excerpt, Reader};
use super::secret::Secret;
use crate::types::{Rank, WORLD_SIZE_MAX};

/// The length of a nonce in bytes.
pub const NONCE_BYTES: usize = 32;
/// The length of the dialer's hello in bytes.
const DIALER_HELLO_BYTES: usize = 104;
/// The length of the acceptor's hello in bytes.
const ACCEPTOR_HELLO_BYTES: usize = 80;
/// The length in bytes of the acceptor's hello without its last field, the proof. The proof covers these bytes.
const ACCEPTOR_HELLO_PROVED_BYTES: usize = ACCEPTOR_HELLO_BYTES - 32;
/// The length of the dialer's proof in bytes.
const PROOF_BYTES: usize = 32;
/// The length of the acceptor's verdict in bytes.
const VERDICT_BYTES: usize = 4;

/// The first eight bytes of both hellos.
const MAGIC: [u8; 8] = *b"RINGTRAI";
/// The first input of the HMAC of the acceptor's proof. The dialer's proof has another label.
const ACCEPTOR_LABEL: &[u8] = b"ringtrain 1 acceptor";
const DIALER_LABEL: &[u8] = b"ringtrain 1 dialer";

/// Why the acceptor refused a connection. The verdict contains this reason. In the error messages, "it" means the
/// dialer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The two sides have different protocol versions.
    #[error("it speaks another version of the protocol")]
    Version,
    /// The two sides have different secrets.
    #[error("it has another secret")]
    Secret,
    /// The two sides have different job ids.
    #[error("it belongs to another job")]
    Job,
    /// The two sides have different world sizes.
    #[error("it was started for another number of ranks")]
    World,
    /// The two sides have different peers files.
    #[error("its peers file differs")]
    PeersFile,
    /// The rank is not below the world size, or the connection was meant for another rank.
    #[error("the rank is out of range or the connection was meant for another rank")]
    Rank,
    /// The dialer claims the rank of the process that it dialed.
    #[error("both processes were started as the same rank; start each rank once")]
    SameRank,
    /// A link cannot have a connection with this number.
    #[error("a link has at most {STREAMS_MAX} connections, numbered from 0")]
    Stream,
    /// The acceptor does not expect this connection of an isolated group.
    #[error("it opened a connection of an isolated group that this rank does not expect")]
    Group,
}

impl Refusal {
    const ALL: [(u8, Self); 9] = [
        (1, Self::Version),
        (2, Self::Secret),
        (3, Self::Job),
        (4, Self::World),
        (5, Self::PeersFile),
        (6, Self::Rank),
        (7, Self::Stream),
        (8, Self::SameRank),
        (9, Self::Group),
    ];

    fn to_byte(self) -> u8 {
        Self::ALL.iter().find(|(_, refusal)| *refusal == self).map_or(0, |&(byte, _)| byte)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.iter().find(|&&(b, _)| b == byte).map(|&(_, refusal)| refusal)
    }
}

/// Why a handshake failed. In the error messages, "it" means the process at the other end.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other side is another kind of program, for example a browser or a port scanner.
    #[error("it does not speak ringtrain's protocol (it began with {began_with})")]
    NotRingtrain {
        /// The first bytes that the other side sent, with escapes.
        began_with: String,
    },
    /// The peer has another protocol version.
    #[error(
        "it speaks protocol version {theirs}, this process speaks version {VERSION}; install the same version of ringtrain on every host"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The peer's proof is wrong, so the peer has a different secret.
    #[error("its secret differs from the secret of this rank; give every rank the same --secret-file")]
    Secret,
    /// The peer refused this rank, before or after this rank sent its proof.
    #[error("it refused this rank and said about this rank: \"{0}\"")]
    Refused(Refusal),
    /// This side refused the peer.
    #[error("{0}")]
    RefusedPeer(Refusal),
    /// A field has a value that this version does not know.
    #[error("it sent a message with an unknown {0}")]
    Unknown(&'static str),
}

/// One side of a handshake, without its IO.
pub trait Handshake {
    /// Returns how many bytes this side needs next, or 0 when the handshake is over.
    fn wanted_bytes(&self) -> usize;

    /// Processes bytes that the connection has received, at most [`Handshake::wanted_bytes`] of them.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`] if the handshake failed. After an error, send the bytes that [`Handshake::take_output`]
    /// returns, and then close the connection.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError>;

    /// Removes and returns the bytes to send now. The result may be empty.
    fn take_output(&mut self) -> Vec<u8>;
}

/// The side that opened the connection.
pub struct Dialer {
    secret: Secret,
    state: DialerState,
    /// The dialer's hello. Both proofs cover its bytes.
    hello: Vec<u8>,
    /// The received bytes of the acceptor's current message.
    input: Vec<u8>,
    /// The bytes that the next call of [`Handshake::take_output`] returns.
    output: Vec<u8>,
}

/// The message for which the dialer waits, or `Done` after the handshake.
#[derive(PartialEq, Eq)]
enum DialerState {
    /// The acceptor's hello.
    Hello,
    /// The acceptor's verdict.
    Verdict,
    Done,
}

impl Dialer {
    /// Creates the dialer's side of a handshake. `nonce` must be random.
    pub fn new(secret: Secret, job: &Job, introduction: Introduction, nonce: [u8; NONCE_BYTES]) -> Self {
        let mut hello = Vec::with_capacity(DIALER_HELLO_BYTES);
        hello.extend_from_slice(&MAGIC);
        hello.extend_from_slice(&VERSION.to_le_bytes());
        let (purpose, group) = introduction.purpose.encode();
        hello.extend_from_slice(&[purpose, 0, 0, 0, 0, 0]);
        hello.extend_from_slice(&group.to_le_bytes());
        hello.extend_from_slice(&job.world.to_le_bytes());
        hello.extend_from_slice(&introduction.from.get().to_le_bytes());
        hello.extend_from_slice(&introduction.to.get().to_le_bytes());
        hello.extend_from_slice(&[introduction.stream.index, introduction.stream.total, 0, 0]);
        hello.extend_from_slice(&job.id);
        hello.extend_from_slice(&peers_digest_prefix(job));
        hello.extend_from_slice(&nonce);
        debug_assert_eq!(hello.len(), DIALER_HELLO_BYTES, "the layout of docs/wire-format.md");
        Self { secret, state: DialerState::Hello, output: hello.clone(), hello, input: Vec::new() }
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
        let (proved, proof) = input.split_at(ACCEPTOR_HELLO_PROVED_BYTES);
        let proof = proof.try_into().map_err(|_| HandshakeError::Unknown("length"))?;
        if !self.secret.verifies(&[ACCEPTOR_LABEL, &self.hello, proved], proof) {
            // Zeros instead of a proof tell the acceptor that the secrets differ. A real proof would let an attacker
            // test guesses of the secret.
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
    fn wanted_bytes(&self) -> usize {
        let size = match self.state {
            DialerState::Hello => ACCEPTOR_HELLO_BYTES,
            DialerState::Verdict => VERDICT_BYTES,
            DialerState::Done => 0,
        };
        size.saturating_sub(self.input.len())
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.input.extend_from_slice(&bytes[..bytes.len().min(self.wanted_bytes())]);
        if self.state == DialerState::Hello {
            check_magic(&self.input)?;
        }
        if self.wanted_bytes() > 0 {
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
    /// The contents of the dialer's hello, which is not authenticated.
    claimed: Option<Introduction>,
    /// The received bytes of the dialer's current message.
    input: Vec<u8>,
    output: Vec<u8>,
}

/// The message of the dialer for which the acceptor waits, or the result of the handshake.
enum AcceptorState {
    Hello,
    Proof { hello: Vec<u8>, own_hello: Vec<u8>, introduction: Introduction },
    Done(Introduction),
    Failed,
}

impl Acceptor {
    /// Creates the acceptor's side of a handshake. The acceptor refuses connections that are meant for another rank
    /// than `own_rank`. A launcher's rendezvous is not a rank and passes `None`. `nonce` must be random.
    pub fn new(secret: Secret, job: Job, own_rank: Option<Rank>, nonce: [u8; NONCE_BYTES]) -> Self {
        let state = AcceptorState::Hello;
        Self { secret, job, own_rank, nonce, state, claimed: None, input: Vec::new(), output: Vec::new() }
    }

    /// Returns what the dialer has said about itself, or `None` until the handshake has succeeded.
    pub fn introduction(&self) -> Option<Introduction> {
        match self.state {
            AcceptorState::Done(introduction) => Some(introduction),
            _ => None,
        }
    }

    /// Returns whether the hello requests a link. Until the handshake has succeeded, the hello is not authenticated.
    pub fn requests_link(&self) -> bool {
        self.claimed.is_some_and(|introduction| introduction.purpose == ConnectionPurpose::Link)
    }

    /// Returns the rank that the dialer's hello names. Until the handshake has succeeded, the hello is not authenticated.
    pub fn claimed_rank(&self) -> Option<Rank> {
        self.claimed.map(|introduction| introduction.from)
    }

    /// Returns whether no bytes of the dialer have arrived yet.
    pub fn has_received_nothing(&self) -> bool {
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
            let purpose = reader.u8()?;
            reader.bytes(5)?;
            let purpose = ConnectionPurpose::decode(purpose, reader.u64()?)?;
            let _world = reader.u32()?;
            let (from, to) = (Rank::new(reader.u32()?), Rank::new(reader.u32()?));
            let stream = StreamId { index: reader.u8()?, total: reader.u8()? };
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
            self.output = encode_verdict(Some(Refusal::Secret));
            return Err(HandshakeError::Secret);
        }
        // The exact reason of a refusal is sent only to a dialer whose proof is valid.
        let refusal = self.reason_to_refuse(&hello, introduction);
        self.output = encode_verdict(refusal);
        if let Some(refusal) = refusal {
            return Err(HandshakeError::RefusedPeer(refusal));
        }
        self.state = AcceptorState::Done(introduction);
        Ok(())
    }

    /// Checks the hello of a dialer that knows the secret. Returns the reason to refuse the dialer, or `None` to
    /// accept it.
    fn reason_to_refuse(&self, hello: &[u8], introduction: Introduction) -> Option<Refusal> {
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
        if digest != peers_digest_prefix(&self.job) {
            return Some(Refusal::PeersFile);
        }
        let is_misdirected = self.own_rank.is_some_and(|own| own != introduction.to);
        if introduction.from.get() >= world || is_misdirected {
            return Some(Refusal::Rank);
        }
        if self.own_rank == Some(introduction.from) {
            return Some(Refusal::SameRank);
        }
        (!introduction.stream.is_valid()).then_some(Refusal::Stream)
    }
}

impl Handshake for Acceptor {
    fn wanted_bytes(&self) -> usize {
        let size = match self.state {
            AcceptorState::Hello => DIALER_HELLO_BYTES,
            AcceptorState::Proof { .. } => PROOF_BYTES,
            AcceptorState::Done(_) | AcceptorState::Failed => 0,
        };
        size.saturating_sub(self.input.len())
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.input.extend_from_slice(&bytes[..bytes.len().min(self.wanted_bytes())]);
        if matches!(self.state, AcceptorState::Hello)
            && let Err(error) = check_magic(&self.input)
        {
            self.state = AcceptorState::Failed;
            return Err(error);
        }
        if self.wanted_bytes() > 0 {
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

/// Compares the received bytes with the magic bytes, even if not all magic bytes have arrived. So an HTTP client, for
/// example, is refused at its first wrong byte.
fn check_magic(input: &[u8]) -> Result<(), HandshakeError> {
    let received = input.len().min(MAGIC.len());
    if input[..received] == MAGIC[..received] {
        return Ok(());
    }
    Err(HandshakeError::NotRingtrain { began_with: Excerpt(input).to_string() })
}

/// Encodes the acceptor's verdict; `None` accepts the connection.
pub(crate) fn encode_verdict(refusal: Option<Refusal>) -> Vec<u8> {
    vec![refusal.map_or(0, Refusal::to_byte), 0, 0, 0]
}

/// Returns the first half of the digest of the peers file, which is enough to distinguish two files.
fn peers_digest_prefix(job: &Job) -> [u8; 16] {
    std::array::from_fn(|index| job.peers_digest[index])
}
