//! Tests of the Markdown pages: the files that a page links or names exist, every page can be reached by links, and
//! no page is too long.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::repository_root;

const PAGE_LINES_MAX: usize = 150;
/// The pages that may have more than [`PAGE_LINES_MAX`] lines, because they are references.
const LONG_PAGES: &[&str] = &["README.md", "CHANGELOG.md", "docs/wire-format.md"];
/// The folders whose files do not belong to the repository.
const IGNORED_FOLDERS: &[&str] = &["target", ".git", ".venv", "__pycache__", "node_modules"];

/// Returns all files of the repository, with their paths from its root.
pub(crate) fn all_files() -> Vec<String> {
    let mut files = Vec::new();
    find_files(Path::new(""), &mut files);
    files
}

/// Adds all files below `folder` to `found`, with their paths from the root of the repository.
fn find_files(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(repository_root().join(folder)).expect("the folder is there").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = folder.join(&name);
        if IGNORED_FOLDERS.contains(&name.as_str()) {
            continue;
        }
        if entry.path().is_dir() {
            find_files(&path, found);
        } else {
            found.push(path.to_string_lossy().into_owned());
        }
    }
}

/// Returns the text of a page without its blocks of code.
fn without_code_blocks(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// Returns the targets of a page's links to files, as paths from the root of the repository.
fn linked_files(page: &str, text: &str) -> Vec<String> {
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
    let local = targets.filter(|target| !target.is_empty() && !target.contains("://"));
    local.map(|target| without_parent_dirs(&folder.join(target))).collect()
}

/// Returns the path with its `..` components resolved.
fn without_parent_dirs(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.to_string_lossy().into_owned()
}

/// Returns the source files that a page names in backticks.
fn named_files(text: &str) -> Vec<&str> {
    let spans = text.split('`').skip(1).step_by(2);
    let is_path = |span: &&str| {
        let extension = Path::new(span).extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| ["rs", "py"].contains(&extension))
            && span.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter))
    };
    spans.filter(is_path).collect()
}

/// Returns whether a page has the content of the file `path`, for example of a program that its reader saves: a comment before a
/// block says `file: path`.
fn is_file_of_page(page_text: &str, path: &str) -> bool {
    page_text.contains(&format!("<!-- file: {path} -->"))
}

fn exists(files: &[String], path: &str) -> bool {
    let end = format!("/{path}");
    files.iter().any(|file| file == path || file.ends_with(&end))
}

/// Returns the violations in a page.
fn find_violations(page: &str, text: &str, files: &[String]) -> Vec<String> {
    let prose = without_code_blocks(text);
    let mut found = Vec::new();
    for link in linked_files(page, &prose) {
        let is_folder =
            files.iter().any(|file| file.starts_with(&format!("{}/", link.trim_end_matches('/'))));
        if !is_folder && !files.contains(&link) {
            found.push(format!("{page} links to {link}, which does not exist"));
        }
    }
    let is_missing = |path: &&str| !exists(files, path) && !is_file_of_page(text, path);
    for path in named_files(&prose).into_iter().filter(is_missing) {
        found.push(format!("{page} names {path}, which does not exist"));
    }
    let lines = text.lines().count();
    if lines > PAGE_LINES_MAX && !LONG_PAGES.contains(&page) {
        found.push(format!("{page} has {lines} lines, more than {PAGE_LINES_MAX}: split it into a page for each kind of reader"));
    }
    found
}

/// Returns the pages under `docs` that no chain of links reaches from the README or from `ARCHITECTURE.md`.
fn unreachable_pages(pages: &[(String, String)]) -> Vec<String> {
    let mut reached = vec!["README.md".to_owned(), "docs/ARCHITECTURE.md".to_owned()];
    let mut next = 0;
    while let Some(page) = reached.get(next).cloned() {
        next += 1;
        let text = pages.iter().find(|(path, _)| *path == page).map(|(_, text)| without_code_blocks(text));
        for link in linked_files(&page, &text.unwrap_or_default()) {
            if !reached.contains(&link) {
                reached.push(link);
            }
        }
    }
    let in_docs = pages.iter().map(|(path, _)| path).filter(|path| path.starts_with("docs/"));
    in_docs.filter(|path| !reached.contains(path)).cloned().collect()
}

#[test]
fn pages_name_only_existing_files_and_are_reachable() {
    let mut all = Vec::new();
    find_files(Path::new(""), &mut all);
    let is_page = |path: &&String| {
        let is_markdown = Path::new(path).extension().is_some_and(|extension| extension == "md");
        is_markdown
            && (!path.contains('/') || path.starts_with("docs/") || path.starts_with("bindings/python/"))
    };
    let read =
        |path: &String| (path.clone(), fs::read_to_string(repository_root().join(path)).unwrap_or_default());
    let pages: Vec<(String, String)> = all.iter().filter(is_page).map(read).collect();
    let mut found: Vec<String> = pages
        .iter()
        .filter(|(path, _)| !path.starts_with("bindings/"))
        .flat_map(|(path, text)| find_violations(path, text, &all))
        .collect();
    found.extend(unreachable_pages(&pages).into_iter().map(|page| format!("no page links to {page}")));
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn violations_in_pages_are_found() {
    let files = ["docs/a.md", "src/wire/frame.rs"].map(str::to_owned);
    let text =
        "[a](a.md#part) [root](../README.md) `wire/frame.rs` `wire/gone.rs` `a.b()`\n```\n[no](link)\n```\n";
    let found = find_violations("docs/b.md", text, &files);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(find_violations("docs/b.md", &"x\n".repeat(151), &files).len(), 1);
    let pages =
        [("README.md", "[a](docs/a.md)"), ("docs/a.md", "[b](b.md)"), ("docs/b.md", ""), ("docs/c.md", "")];
    let pages = pages.map(|(path, text)| (path.to_owned(), text.to_owned()));
    assert_eq!(unreachable_pages(&pages), ["docs/c.md"]);
}
