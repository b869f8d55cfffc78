//! Tests of the guide in `docs/guide`: its table of contents names every page, and the messages that its pages explain exist in
//! the sources.

use std::fs;
use std::path::Path;

use super::pages::all_files;
use super::repository_root;

const GUIDE: &str = "docs/guide/src/";
/// The beginning of the names of the pages that explain messages.
const MESSAGE_PAGES: &str = "docs/guide/src/errors-";
/// A message must have a part of at least this length that is the same in the sources.
const STABLE_PART_MIN: usize = 11;

/// Returns the pages that the table of contents does not name.
fn find_unlisted_pages(summary: &str, pages: &[String]) -> Vec<String> {
    let is_unlisted =
        |page: &&String| page.as_str() != "SUMMARY.md" && !summary.contains(&format!("]({page})"));
    pages.iter().filter(is_unlisted).cloned().collect()
}

/// Returns the messages of a page: the texts in backticks at the beginning of the rows of its tables.
fn messages(page: &str) -> Vec<String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once("` | ")).map(|(message, _)| message.replace("\\|", "|")).collect()
}

/// Returns the messages that the sources do not contain. `...` in a message stands for any text, and a program may
/// print the texts before and after a colon separately. `sources` holds texts from [`joined_texts`].
fn find_unknown_messages(messages: &[String], sources: &str) -> Vec<String> {
    let is_known = |message: &str| {
        let parts = message.split("...").flat_map(|part| part.split(": "));
        let parts: Vec<&str> =
            parts.map(|part| part.trim_matches([' ', '`', '"', '(', ')', ';', ':', ','])).collect();
        parts.iter().any(|part| part.len() >= STABLE_PART_MIN)
            && parts.iter().filter(|part| part.len() >= STABLE_PART_MIN).all(|part| sources.contains(part))
    };
    messages.iter().filter(|message| !is_known(message)).cloned().collect()
}

/// Returns a source in which the texts that continue on the next line are joined, and without escapes of quotation marks.
fn joined_texts(source: &str) -> String {
    let mut joined = String::with_capacity(source.len());
    for line in source.lines() {
        let line = line.trim();
        // Rust continues a text after a backslash, and Python joins texts that follow each other.
        if joined.ends_with('\\') {
            joined.pop();
        } else if joined.ends_with('"') && (line.starts_with('"') || line.starts_with("f\"")) {
            joined.pop();
            joined.push_str(&line.trim_start_matches('f')[1..]);
            continue;
        } else {
            joined.push('\n');
        }
        joined.push_str(line);
    }
    joined.replace("\\\"", "\"")
}

fn read(path: &str) -> String {
    fs::read_to_string(repository_root().join(path)).expect("the file is a text")
}

#[test]
fn the_table_of_contents_names_every_page() {
    let pages: Vec<String> =
        all_files().iter().filter_map(|path| path.strip_prefix(GUIDE)).map(str::to_owned).collect();
    assert!(pages.len() > 10, "{pages:?}");
    let found = find_unlisted_pages(&read("docs/guide/src/SUMMARY.md"), &pages);
    assert!(found.is_empty(), "SUMMARY.md does not name {found:?}");
}

#[test]
fn the_messages_that_the_guide_explains_exist() {
    let files = all_files();
    let is_source = |path: &&String| {
        let is_code =
            Path::new(path).extension().is_some_and(|extension| extension == "rs" || extension == "py");
        let folders = ["src/", "bindings/python/src/", "bindings/python/python/"];
        is_code && folders.iter().any(|folder| path.starts_with(folder)) && !path.ends_with("tests.rs")
    };
    // A message in a test may no longer exist.
    let without_tests = |text: String| text.split("mod tests {").next().unwrap_or_default().to_owned();
    let sources: String =
        files.iter().filter(is_source).map(|path| joined_texts(&without_tests(read(path)))).collect();
    let mut found = Vec::new();
    for page in files.iter().filter(|path| path.starts_with(MESSAGE_PAGES)) {
        let messages = messages(&read(page));
        assert!(messages.len() > 5, "{page} explains only {messages:?}");
        found.extend(
            find_unknown_messages(&messages, &sources)
                .into_iter()
                .map(|message| format!("{page}: {message}")),
        );
    }
    assert!(found.is_empty(), "the sources have no such messages:\n{}\n", found.join("\n"));
}

#[test]
fn violations_in_the_guide_are_found() {
    let pages = ["SUMMARY.md", "a.md", "b.md"].map(str::to_owned);
    assert_eq!(find_unlisted_pages("- [A](a.md)", &pages), ["b.md"]);
    let sources = joined_texts(
        "error(\n  \"rank {rank} said \\\"no\\\" and \\\n   went away; see\"\n    \"the log\"\n)",
    );
    let page = "| message | x |\n| `rank ... said \"no\" and went away; seethe log` | x |\n| `rank ... has never been here` | x |\n";
    assert_eq!(find_unknown_messages(&messages(page), &sources), ["rank ... has never been here"]);
}
