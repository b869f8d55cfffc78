//! Parses the head of an HTTP request: <https://www.rfc-editor.org/rfc/rfc9112>.

/// The maximum length in bytes of the request line and the headers together.
pub(super) const HEAD_BYTES_MAX: usize = 8 << 10;

/// A request that the server can answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HttpRequest {
    /// The path, without the query.
    pub(super) path: String,
    /// Whether the answer has a body. False for the method HEAD.
    pub(super) wants_body: bool,
}

/// What the bytes are that a client has sent so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ParsedHead {
    /// The client has not sent the whole head.
    Incomplete,
    Complete(HttpRequest),
    /// The server refuses the request: the status, such as `400 Bad Request`, and the reason.
    Refused(&'static str, &'static str),
}

/// Parses the bytes that a client has sent.
pub(super) fn parse_head(bytes: &[u8]) -> ParsedHead {
    let head = &bytes[..bytes.len().min(HEAD_BYTES_MAX)];
    let Some(end) = find(head, b"\r\n\r\n").or_else(|| find(head, b"\n\n")) else {
        if bytes.len() < HEAD_BYTES_MAX {
            return ParsedHead::Incomplete;
        }
        return ParsedHead::Refused(
            "431 Request Header Fields Too Large",
            "the request line and the headers may have at most 8192 bytes",
        );
    };
    let Ok(text) = std::str::from_utf8(&head[..end]) else {
        return ParsedHead::Refused("400 Bad Request", "the headers are not text");
    };
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return ParsedHead::Refused("400 Bad Request", "the first line is not METHOD PATH VERSION");
    };
    if !version.starts_with("HTTP/1.") {
        return ParsedHead::Refused("505 HTTP Version Not Supported", "use HTTP/1.1");
    }
    if !matches!(method, "GET" | "HEAD") {
        return ParsedHead::Refused("405 Method Not Allowed", "use GET or HEAD");
    }
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return ParsedHead::Refused("400 Bad Request", "a header is not NAME: VALUE");
        };
        let has_body = name.eq_ignore_ascii_case("content-length") && value.trim() != "0"
            || name.eq_ignore_ascii_case("transfer-encoding");
        if has_body {
            return ParsedHead::Refused("413 Content Too Large", "a request must have no body");
        }
    }
    let path = target.split(['?', '#']).next().unwrap_or_default().to_owned();
    ParsedHead::Complete(HttpRequest { path, wants_body: method == "GET" })
}

/// Returns the first offset of `pattern` in `bytes`.
fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes.windows(pattern.len()).position(|window| window == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_parsed_or_refused() {
        let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(HEAD_BYTES_MAX));
        for (text, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "/metrics"),
            ("GET /status?pretty=1 HTTP/1.0\n\n", "/status"),
            ("HEAD / HTTP/1.1\r\nContent-Length: 0\r\n\r\nrest", "HEAD /"),
            ("", "incomplete"),
            ("GET / HTTP/1.1\r\nHost: a\r\n", "incomplete"),
            (&long[..], "431"),
            ("\r\n\r\n", "400"),
            ("GET /\r\n\r\n", "400"),
            ("GET / HTTP/1.1 x\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nno colon\r\n\r\n", "400"),
            ("GET / HTTP/2\r\n\r\n", "505"),
            ("POST / HTTP/1.1\r\n\r\n", "405"),
            ("GET / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n", "413"),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "413"),
        ] {
            let found = match parse_head(text.as_bytes()) {
                ParsedHead::Incomplete => "incomplete".to_owned(),
                ParsedHead::Complete(HttpRequest { path, wants_body: true }) => path,
                ParsedHead::Complete(HttpRequest { path, wants_body: false }) => format!("HEAD {path}"),
                ParsedHead::Refused(status, _) => status[..3].to_owned(),
            };
            assert_eq!(found, expected, "{text}");
        }
        assert_eq!(
            parse_head(b"GET /\xff HTTP/1.1\r\n\r\n"),
            ParsedHead::Refused("400 Bad Request", "the headers are not text")
        );
    }
}
