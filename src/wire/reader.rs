//! Reads fields from bytes that a peer sent.

use std::fmt;

/// A cursor over received bytes. Every read returns a whole field or `None`.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads the next `length` bytes.
    pub(super) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(length)?;
        self.0 = tail;
        Some(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads the length of a text (16 bits) and then the text. Replaces control characters in the text.
    pub(super) fn text(&mut self) -> Option<String> {
        let length = usize::from(self.u16()?);
        self.bytes(length).map(|bytes| printable(&String::from_utf8_lossy(bytes)))
    }
}

/// Returns the beginning of `text`: as many whole characters as fit into `bytes_max` bytes.
pub(super) fn truncate(text: &str, bytes_max: u16) -> String {
    text[..text.floor_char_boundary(text.len().min(usize::from(bytes_max)))].to_owned()
}

/// Appends the length of a text (16 bits) and then the text to `out`. If the text has more than `bytes_max` bytes, only
/// its beginning is appended.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str, bytes_max: u16) {
    let end = text.floor_char_boundary(text.len().min(usize::from(bytes_max)));
    out.extend_from_slice(&(end as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// Replaces the control characters of a text, so that a text from a peer cannot control a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Displays the first 16 bytes of an unknown message, with escapes.
pub(super) struct Excerpt<'a>(pub(super) &'a [u8]);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.0[..self.0.len().min(16)];
        write!(f, "\"{}\"", shown.escape_ascii())
    }
}
