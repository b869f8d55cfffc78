//! The job's secret, and the message authentication codes (MACs) that are computed with it.

use std::fmt::{self, Write as _};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use crate::types::counted;

/// The shortest secret that is accepted, in bytes.
pub const SECRET_BYTES_MIN: usize = 16;
/// The longest secret that is accepted, in bytes.
pub const SECRET_BYTES_MAX: usize = 4096;

/// Why a text cannot be a secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecretError {
    /// The text is too short.
    #[error(
        "the secret has {} and needs at least {SECRET_BYTES_MIN}; make one with `head -c 32 /dev/urandom | base64`",
        counted(.0, "byte")
    )]
    TooShort(usize),
    /// The text is too long.
    #[error("the secret has {0} bytes, more than {SECRET_BYTES_MAX}; is this the right file?")]
    TooLong(usize),
}

/// The secret that only the ranks of a job know. The secret is never printed.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Creates a secret from the text of a file or an environment variable. Removes white space at both ends of the
    /// text.
    ///
    /// # Errors
    ///
    /// [`SecretError`] if the text is shorter than 16 bytes or longer than 4,096 bytes.
    pub fn new(text: &[u8]) -> Result<Self, SecretError> {
        let text = text.trim_ascii();
        match text.len() {
            length if length < SECRET_BYTES_MIN => Err(SecretError::TooShort(length)),
            length if length > SECRET_BYTES_MAX => Err(SecretError::TooLong(length)),
            _ => Ok(Self(text.to_vec())),
        }
    }

    /// Returns the value for a job without a secret. Such a job may use only loopback addresses, and any process
    /// of this machine can join the job.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns whether the job has no secret ([`Secret::none`]).
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text of a secret for one purpose, `label`, from which this secret cannot be computed.
    pub fn derive(&self, label: &[u8]) -> String {
        let digest = self.mac(&[b"ringtrain derived secret", label]);
        digest.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// Returns the HMAC-SHA256 (RFC 2104) of the concatenated parts.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }

    /// Returns whether `mac` is the MAC of the concatenated parts. The comparison takes constant time.
    pub(super) fn verifies(&self, parts: &[&[u8]], mac: &[u8; 32]) -> bool {
        self.mac(parts).ct_eq(mac).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_none() { "no secret" } else { "a secret" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2: key "Jefe", data "what do ya want for nothing?".
    #[test]
    fn the_mac_matches_rfc_4231() {
        let mac = Secret(b"Jefe".to_vec()).mac(&[b"what do ya want ", b"for nothing?"]);
        assert_eq!(&mac[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
    }

    #[test]
    fn a_secret_has_limits_and_is_never_printed() {
        assert_eq!(Secret::new(b" short \n").unwrap_err(), SecretError::TooShort(5));
        assert_eq!(Secret::new(&[b'x'; 5000]).unwrap_err(), SecretError::TooLong(5000));
        let secret = Secret::new(b"0123456789abcdef\n").unwrap();
        assert_eq!(format!("{secret:?}"), "a secret");
    }
}
