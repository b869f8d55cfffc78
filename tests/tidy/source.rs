//! Source files as text, for the rules in `tests/tidy.rs`. Comments and literals are replaced by spaces, which hides
//! their text from the rules and keeps all offsets and line numbers.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A source file.
pub(crate) struct Source {
    /// The path of the file from the root of the repository, such as `src/wire/frame.rs`.
    pub(crate) path: String,
    /// The text of the file.
    pub(crate) text: String,
    /// The text of the file, in which comments and the contents of literals are replaced by spaces.
    pub(crate) code: String,
    /// The same as `code`, but items that are compiled only for tests are also replaced by spaces.
    pub(crate) shipped: String,
}

/// A path in the code, such as `crate::wire::Cause`, and the offset at which it begins.
pub(crate) struct CodePath {
    pub(crate) segments: Vec<String>,
    pub(crate) at: usize,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let code = blank_comments_and_literals(text);
        let shipped = blank_tests(&code);
        Self { path: path.to_owned(), text: text.to_owned(), code, shipped }
    }

    /// Returns the module path of this file: `["wire", "frame"]` for `src/wire/frame.rs`, and `[]` for `src/lib.rs`.
    pub(crate) fn module(&self) -> Vec<String> {
        let inner = self.path.trim_start_matches("src/").trim_end_matches(".rs");
        let mut parts: Vec<String> = inner.split('/').map(str::to_owned).collect();
        if parts.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib")) {
            parts.pop();
        }
        parts
    }

    /// Returns the line number of an offset, counted from 1.
    pub(crate) fn line_number(&self, at: usize) -> usize {
        self.text[..at].matches('\n').count() + 1
    }

    /// Returns every path that the code names: the paths of `use` items, with their groups expanded, and the paths in
    /// expressions and types.
    pub(crate) fn code_paths(&self) -> Vec<CodePath> {
        let mut found = self.used_paths();
        for root in ["crate", "super", "ringtrain", "std"] {
            found.extend(self.paths_from(root).into_iter().filter(|path| path.segments.len() > 1));
        }
        found
    }

    /// Returns the paths of the `use` items, with their groups expanded.
    pub(crate) fn used_paths(&self) -> Vec<CodePath> {
        let mut found = Vec::new();
        for item in self.use_items() {
            expand_use(self.code[item.start + 3..item.end].trim(), &[], item.start, &mut found);
        }
        found
    }

    /// Returns the paths outside `use` items that begin with `root`. The path after `in` of a visibility, as in
    /// `pub(in crate::group)`, does not count.
    pub(crate) fn paths_from(&self, root: &str) -> Vec<CodePath> {
        let items = self.use_items();
        let mut found = Vec::new();
        let mut rest = 0;
        while let Some(at) = find_word(&self.code, root, rest) {
            rest = at + root.len();
            let before = self.code[..at].trim_end();
            let is_start = !before.ends_with("::") && !before.ends_with("(in");
            if is_start && !items.iter().any(|item| item.contains(&at)) {
                found.push(CodePath { segments: leading_path(&self.code[at..]), at });
            }
        }
        found
    }

    /// Returns the offsets of the `use` items.
    fn use_items(&self) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        let mut rest = 0;
        while let Some(at) = find_word(&self.code, "use", rest) {
            rest = at + 3;
            // `impl Trait + use<>` is not an item.
            if !self.code[rest..].starts_with('<') {
                rest = self.code[at..].find(';').map_or(self.code.len(), |end| at + end);
                found.push(at..rest);
            }
        }
        found
    }

    /// Returns the number of inline modules (`mod tests { .. }`) that enclose an offset.
    pub(crate) fn inline_depth(&self, at: usize) -> usize {
        let mut depth = 0;
        let mut rest = 0;
        while let Some(start) = find_word(&self.code, "mod", rest) {
            rest = start + 3;
            let Some(stop) = self.code[start..].find(['{', ';']).map(|stop| start + stop) else { break };
            if self.code.as_bytes()[stop] == b'{' && stop < at && at < closing_brace(&self.code, stop) {
                depth += 1;
            }
        }
        depth
    }

    /// Returns the files that this file declares as modules only for tests: `#[cfg(test)] mod tests;`.
    pub(crate) fn test_files(&self) -> Vec<String> {
        let Some((folder, _)) = self.path.rsplit_once('/') else { return Vec::new() };
        let mut found = Vec::new();
        let mut rest = &self.code[..];
        while let Some(at) = rest.find(TEST_ONLY) {
            rest = &rest[at + TEST_ONLY.len()..];
            let item = &rest[..rest.find(['{', ';']).map_or(rest.len(), |end| end + 1)];
            if let Some(name) = item.trim_end().strip_suffix(';').and_then(|item| item.split("mod ").nth(1)) {
                found.push(format!("{folder}/{}.rs", name.trim()));
            }
        }
        found
    }
}

/// Reads all `.rs` files below the folders, sorted by path. In files that are compiled only for tests, `shipped` is
/// blank.
pub(crate) fn read_all(root: &Path, folders: &[&str]) -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in folders {
        find_rust_files(&root.join(folder), &mut paths);
    }
    paths.sort();
    let mut sources: Vec<Source> = paths
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).expect("a source file can be read");
            let name = path.strip_prefix(root).expect("the file is below the root");
            Source::new(name.to_str().expect("the path is UTF-8"), &text)
        })
        .collect();
    let for_tests: Vec<String> = sources.iter().flat_map(Source::test_files).collect();
    for source in &mut sources {
        if for_tests.contains(&source.path)
            || ["tests/", "src/simulation/"].iter().any(|folder| source.path.starts_with(folder))
        {
            source.shipped = source.shipped.chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
        }
    }
    sources
}

fn find_rust_files(folder: &Path, paths: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            find_rust_files(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            paths.push(path);
        }
    }
}

const TEST_ONLY: &str = "#[cfg(test)]";

fn is_word_character(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the first offset, from `from` on, at which `word` is a whole word.
pub(crate) fn find_word(code: &str, word: &str, from: usize) -> Option<usize> {
    let mut from = from;
    loop {
        let at = from + code.get(from..)?.find(word)?;
        let before = code[..at].chars().next_back().is_some_and(is_word_character);
        let after = code[at + word.len()..].chars().next().is_some_and(is_word_character);
        if !before && !after {
            return Some(at);
        }
        from = at + word.len();
    }
}

/// Returns the offset of the brace that closes the brace at `open`, or the end of the code if no brace closes it.
fn closing_brace(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len().saturating_sub(1)
}

/// Returns the segments of the path at the beginning of `code`: for example `crate`, `wire` and `Cause`.
fn leading_path(code: &str) -> Vec<String> {
    let end = code.find(|c| !is_word_character(c) && c != ':').unwrap_or(code.len());
    let segments = code[..end].split("::").map(str::trim).filter(|s| !s.is_empty());
    segments.map(|segment| segment.trim_end_matches(':').to_owned()).collect()
}

/// Expands the tree of paths of a `use` item, such as `a::{b, c::{d, self}}`, and adds the full paths to `found`.
/// Each full path begins with `prefix`, and gets the offset `at`.
fn expand_use(tree: &str, prefix: &[String], at: usize, found: &mut Vec<CodePath>) {
    let (path, group) = tree.split_once('{').map_or((tree, None), |(path, group)| (path, Some(group)));
    let path = path.split(" as ").next().unwrap_or_default();
    let mut segments = prefix.to_vec();
    segments.extend(path.split("::").map(|s| s.trim().to_owned()).filter(|s| !s.is_empty() && s != "self"));
    let Some(group) = group else {
        found.push(CodePath { segments, at });
        return;
    };
    let mut depth = 0;
    let mut start = 0;
    for (index, byte) in group.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth > 0 => depth -= 1,
            b',' | b'}' if depth == 0 => {
                if !group[start..index].trim().is_empty() {
                    expand_use(group[start..index].trim(), &segments, at, found);
                }
                start = index + 1;
            }
            _ => {}
        }
    }
}

/// Replaces each item with the attribute `#[cfg(test)]` by spaces.
fn blank_tests(code: &str) -> String {
    let mut bytes = code.as_bytes().to_vec();
    let mut from = 0;
    while let Some(at) = code[from..].find(TEST_ONLY).map(|at| from + at) {
        let end = code[at..].find(['{', ';']).map_or(code.len(), |end| at + end);
        let end = if code.as_bytes().get(end) == Some(&b'{') { closing_brace(code, end) } else { end };
        overwrite_with_spaces(&mut bytes, at, (end + 1).min(code.len()));
        from = (end + 1).min(code.len());
    }
    String::from_utf8(bytes).expect("complete items are replaced by ASCII characters")
}

fn overwrite_with_spaces(bytes: &mut [u8], from: usize, to: usize) {
    for byte in &mut bytes[from..to] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

/// Replaces comments and the contents of string and character literals by spaces.
fn blank_comments_and_literals(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        let (skip, end) = if rest.starts_with(b"//") {
            (0, text[at..].find('\n').map_or(text.len(), |end| at + end))
        } else if rest.starts_with(b"/*") {
            (0, end_of_block_comment(text, at))
        } else if let Some(hashes) = raw_string_hashes(text, at) {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = at + 2 + hashes;
            (2 + hashes, text[open..].find(&close).map_or(text.len(), |end| open + end))
        } else if rest[0] == b'"' {
            (1, end_of_quote(text, at + 1, b'"'))
        } else if is_character_literal(rest) {
            (1, end_of_quote(text, at + 1, b'\''))
        } else {
            at += 1;
            continue;
        };
        overwrite_with_spaces(&mut bytes, at + skip, end);
        let is_comment = rest[0] == b'/';
        at = if is_comment { end } else { end + 1 };
    }
    String::from_utf8(bytes).expect("complete comments and literals are replaced by ASCII characters")
}

fn end_of_block_comment(text: &str, start: usize) -> usize {
    let mut depth = 0;
    let bytes = text.as_bytes();
    let mut at = start;
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" if depth == 1 => return at + 2,
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    text.len()
}

/// Returns the number of hashes of the raw string whose `r` is at offset `at`, or `None` if there is no raw string.
fn raw_string_hashes(text: &str, at: usize) -> Option<usize> {
    let rest = text.get(at..)?.strip_prefix('r')?;
    let before = text[..at].chars().next_back();
    let is_prefix =
        before.is_none_or(|c| !is_word_character(c) || (c == 'b' && !ends_in_word(&text[..at - 1])));
    let hashes = rest.bytes().take_while(|&byte| byte == b'#').count();
    (is_prefix && rest[hashes..].starts_with('"')).then_some(hashes)
}

fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_word_character)
}

/// Returns whether `rest` begins with a character literal and not with a lifetime.
fn is_character_literal(rest: &[u8]) -> bool {
    rest[0] == b'\'' && rest.len() > 2 && (rest[1] == b'\\' || rest[1] >= 0x80 || rest[2] == b'\'')
}

fn end_of_quote(text: &str, from: usize, quote: u8) -> usize {
    let mut at = from;
    while at < text.len() && text.as_bytes()[at] != quote {
        at += if text.as_bytes()[at] == b'\\' { 2 } else { 1 };
    }
    at.min(text.len())
}
