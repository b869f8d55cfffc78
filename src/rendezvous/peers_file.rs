//! Reads the peers file, which lists one `host:port` on each line, in rank order.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use crate::types::{Rank, WORLD_SIZE_MAX, WorldSize, debug_as_display};

/// The maximum length of a peers file in bytes. A file with [`WORLD_SIZE_MAX`] lines and long host names has fewer
/// bytes.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// Why a peers file cannot be used.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PeersFileError {
    /// The file cannot be read.
    #[error("the peers file {path} cannot be read: {source}")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file is too long.
    #[error("the peers file {path} is longer than {FILE_BYTES_MAX} bytes, too long for a list of hosts")]
    TooLong {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file contains no rank.
    #[error("the peers file {path} names no rank; write one host:port per line, in rank order")]
    Empty {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file contains too many ranks.
    #[error("the peers file {path} names more than {WORLD_SIZE_MAX} ranks")]
    TooMany {
        /// The path of the file.
        path: PathBuf,
    },
    /// A line is invalid.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// The path of the file.
        path: PathBuf,
        /// The number of the line, counted from 1.
        line: usize,
        /// What is wrong with the line.
        problem: String,
    },
}

debug_as_display!(PeersFileError);

/// The contents of a valid peers file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeersFile {
    path: PathBuf,
    entries: Vec<PeerEntry>,
}

/// A line of the file, which names the host and the port of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
struct PeerEntry {
    host: String,
    port: u16,
    /// The number of the line, counted from 1.
    line: usize,
}

impl fmt::Display for PeerEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl PeersFile {
    /// Reads and checks a peers file.
    ///
    /// # Errors
    ///
    /// [`PeersFileError`] if the file cannot be read or is invalid. The error names the invalid line.
    pub fn read(path: &Path) -> Result<Self, PeersFileError> {
        let unreadable = |source| PeersFileError::Unreadable { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        // The length in the file's metadata is not reliable: for example, a device has length 0.
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(PeersFileError::TooLong { path: path.to_owned() });
        }
        let text = String::from_utf8(bytes)
            .map_err(|_| unreadable(io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text")))?;
        Self::parse(path, &text)
    }

    /// Parses the text of a peers file. `path` is only for error messages.
    ///
    /// # Errors
    ///
    /// [`PeersFileError`] if the text is invalid. The error names the invalid line.
    pub fn parse(path: &Path, text: &str) -> Result<Self, PeersFileError> {
        let mut entries: Vec<PeerEntry> = Vec::new();
        let mut seen: HashMap<String, (usize, usize)> = HashMap::new();
        // Some editors begin a file with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (index, full_line) in text.lines().enumerate() {
            let content = full_line.split('#').next().unwrap_or_default().trim();
            if content.is_empty() {
                continue;
            }
            let line = index + 1;
            let line_error = |problem| PeersFileError::Line { path: path.to_owned(), line, problem };
            let (host, port) = parse_host_and_port(content).map_err(line_error)?;
            let entry = PeerEntry { host, port, line };
            if let Some((rank, earlier)) = seen.insert(entry.to_string(), (entries.len(), line)) {
                return Err(line_error(format!(
                    "{entry} is already rank {rank}, on line {earlier}; give every rank a different port"
                )));
            }
            if entries.len() >= WORLD_SIZE_MAX as usize {
                return Err(PeersFileError::TooMany { path: path.to_owned() });
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            return Err(PeersFileError::Empty { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), entries })
    }

    /// Returns the number of ranks in the file.
    pub fn world(&self) -> WorldSize {
        WorldSize::new(self.entries.len() as u32).unwrap_or(WorldSize::ONE)
    }

    /// Returns the host of a rank: a host name or an IP address, without brackets.
    pub fn host(&self, rank: Rank) -> &str {
        self.entries.get(rank.index()).map_or("", |entry| &entry.host)
    }

    /// Returns the name of a rank in error messages, for example `rank 2 (host:port)`.
    pub fn name(&self, rank: Rank) -> String {
        self.entries
            .get(rank.index())
            .map_or_else(|| format!("rank {rank}"), |entry| format!("rank {rank} ({entry})"))
    }

    /// Returns the SHA-256 digest of the entries, without comments and spaces.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for entry in &self.entries {
            hash.update(entry.to_string().to_lowercase());
            hash.update(b"\n");
        }
        hash.finalize().into()
    }

    /// Resolves the host name of a rank to an address.
    ///
    /// # Errors
    ///
    /// [`PeersFileError::Line`] if the host is unknown, and [`PeersFileError::Empty`] if the file does not contain the rank.
    pub fn resolve(&self, rank: Rank) -> Result<SocketAddr, PeersFileError> {
        let Some(entry) = self.entries.get(rank.index()) else {
            return Err(PeersFileError::Empty { path: self.path.clone() });
        };
        let line_error =
            |problem| PeersFileError::Line { path: self.path.clone(), line: entry.line, problem };
        let mut addresses = (entry.host.as_str(), entry.port)
            .to_socket_addrs()
            .map_err(|error| line_error(format!("the host `{}` cannot be resolved: {error}", entry.host)))?;
        addresses.next().ok_or_else(|| line_error(format!("the host `{}` has no address", entry.host)))
    }

    /// Resolves the host names of all ranks to addresses.
    ///
    /// # Errors
    ///
    /// [`PeersFileError::Line`] if a host is unknown or if two ranks have the same address.
    pub fn resolve_all(&self) -> Result<Vec<SocketAddr>, PeersFileError> {
        let mut seen = HashMap::new();
        let mut addresses = Vec::with_capacity(self.entries.len());
        for (rank, entry) in self.world().ranks().zip(&self.entries) {
            let address = self.resolve(rank)?;
            if let Some(other) = seen.insert(address, rank) {
                return Err(PeersFileError::Line {
                    path: self.path.clone(),
                    line: entry.line,
                    problem: format!("{entry} is the same address as {}, {address}", self.name(other)),
                });
            }
            addresses.push(address);
        }
        Ok(addresses)
    }
}

/// Parses a line of the file, without its comment, into a host and a port.
fn parse_host_and_port(text: &str) -> Result<(String, u16), String> {
    if text.contains("://") {
        return Err(format!("`{text}` is a URL; write only host:port"));
    }
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, ',' | ';'));
    if words.filter(|word| word.contains(':')).count() > 1 {
        return Err(format!("`{text}` is more than one address; write one host:port per line"));
    }
    let bracketed = text.strip_prefix('[').map(|rest| {
        rest.split_once("]:").ok_or_else(|| format!("`{text}`: an IPv6 address is written [address]:port"))
    });
    let (host, port) = if let Some(split) = bracketed {
        let (host, port) = split?;
        let address: std::net::Ipv6Addr =
            host.parse().map_err(|_| format!("`{host}` is not an IPv6 address"))?;
        (address.to_string(), port)
    } else {
        let (host, port) =
            text.rsplit_once(':').ok_or_else(|| format!("`{text}` has no port; write host:port"))?;
        if host.contains(':') {
            let is_address = [text, host].iter().any(|text| text.parse::<std::net::Ipv6Addr>().is_ok());
            return Err(if is_address {
                format!("`{text}`: an IPv6 address is written in brackets, [address]:port")
            } else {
                format!("`{text}` has more than one port; write host:port")
            });
        }
        (host.to_owned(), port)
    };
    let is_host_name_character = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    if host.is_empty() || host.len() > 255 || !host.chars().all(is_host_name_character) {
        return Err(format!("`{host}` is not a host name"));
    }
    match port.parse() {
        Ok(0) => Err("port 0 means any free port; give each rank a fixed port that its peers know".into()),
        Ok(port) if port_has_only_digits(text) => Ok((host, port)),
        _ => Err(format!("`{port}` is not a port; ports are 1 to 65535")),
    }
}

/// Returns whether the port at the end of `text` has only digits. Without this check, `+80` would be accepted.
fn port_has_only_digits(text: &str) -> bool {
    text.rsplit(':').next().is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PeersFile, PeersFileError> {
        PeersFile::parse(Path::new("hosts.txt"), text)
    }

    #[test]
    fn hosts_comments_and_brackets_are_parsed() {
        let file =
            parse("# four hosts\na:1\n\n  b.example:65535 # the second\n[::1]:7\n10.0.0.1:80\n").unwrap();
        assert_eq!(file.world().get(), 4);
        assert_eq!(file.name(Rank::new(1)), "rank 1 (b.example:65535)");
        assert_eq!(file.name(Rank::new(2)), "rank 2 ([::1]:7)");
        assert_eq!(file.resolve(Rank::new(2)).unwrap(), "[::1]:7".parse().unwrap());
    }

    #[test]
    fn errors_name_the_invalid_line() {
        let cases = [
            ("", "names no rank"),
            ("# nothing\n", "names no rank"),
            ("a:1\nb\n", "line 2: `b` has no port"),
            ("a:0\n", "line 1: port 0"),
            ("a:65536\n", "`65536` is not a port"),
            ("a:-1\n", "`-1` is not a port"),
            ("a:+80\n", "`+80` is not a port"),
            ("a:\n", "`` is not a port"),
            (":80\n", "`` is not a host name"),
            ("a b:80\n", "`a b` is not a host name"),
            ("::1:80\n", "in brackets"),
            ("2001:db8::1\n", "in brackets"),
            ("http://127.0.0.1:45000\n", "line 1: `http://127.0.0.1:45000` is a URL"),
            ("127.0.0.1:1:3\n", "`127.0.0.1:1:3` has more than one port"),
            ("a:1 b:2\n", "`a:1 b:2` is more than one address"),
            ("a:1,b:2\n", "is more than one address"),
            ("[::1]80\n", "[address]:port"),
            ("[zz]:80\n", "`zz` is not an IPv6 address"),
            ("a:1\nb:2\na:1\n", "line 3: a:1 is already rank 0, on line 1"),
        ];
        for (text, expected) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    /// Some editors begin a file with a byte order mark.
    #[test]
    fn a_byte_order_mark_is_ignored() {
        assert_eq!(parse("\u{feff}a:1\r\nb:2\r\n").unwrap(), parse("a:1\nb:2\n").unwrap());
    }

    #[test]
    fn an_endless_file_is_an_error() {
        let error = PeersFile::read(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(error, PeersFileError::TooLong { .. }), "{error}");
    }

    #[test]
    fn the_digest_depends_on_the_order_but_not_on_comments() {
        let digest = |text| parse(text).unwrap().digest();
        assert_eq!(digest("a:1\nb:2\n"), digest("# x\nA:1 # y\n\nb:2"));
        assert_ne!(digest("a:1\nb:2\n"), digest("b:2\na:1\n"));
        assert_ne!(digest("a:1\nb:2\n"), digest("a:1\nb:3\n"));
    }

    #[test]
    fn two_ranks_with_the_same_address_are_an_error() {
        let error = parse("localhost:9\n127.0.0.1:9\n").unwrap().resolve_all().unwrap_err().to_string();
        assert!(error.contains("same address as rank 0") || error.contains("[::1]"), "{error}");
    }
}
