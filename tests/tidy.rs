//! Tests of the architecture and the style. The tests read the source files as text. `docs/ARCHITECTURE.md` explains
//! the rules.
//!
//! Each rule is a function that returns the violations in a source file. For each rule, `each_rule_can_fail` has a
//! test with a snippet of code that breaks the rule.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/each_rule_can_fail.rs"]
mod each_rule_can_fail;
#[path = "tidy/features.rs"]
mod features;
#[path = "tidy/guide.rs"]
mod guide;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use source::{Source, find_word, read_all};

/// For each top-level module of the crate, the other top-level modules that this module may import.
const MAY_IMPORT: &[(&str, &str)] = &[
    ("types", ""),
    ("exit", ""),
    ("observe", "types"),
    ("schedule", "types"),
    ("simd", ""),
    ("reduce", "types simd"),
    ("wire", "types"),
    ("codec", "types simd"),
    ("engine", "types schedule wire reduce codec"),
    ("shm", "types"),
    ("transport", "types wire shm"),
    ("rendezvous", "types wire transport"),
    ("runtime", "types observe schedule wire reduce codec engine shm transport rendezvous"),
    ("group", "types observe schedule wire reduce codec engine shm transport rendezvous runtime"),
    ("named", "types group codec"),
    ("train", "types observe simd codec group"),
    ("launch", "types wire rendezvous exit"),
    ("monitor", ""),
    (
        "cli",
        "types exit observe schedule reduce wire codec engine shm transport rendezvous group named train launch monitor",
    ),
    ("bin", "cli launch"),
];

/// The module that is compiled only for tests. It may import all modules, and their tests may import it.
const TEST_MODULE: &str = "simulation";
/// The modules without IO, whose functions depend only on their arguments.
const MODULES_WITHOUT_IO: &[&str] =
    &["types", "exit", "schedule", "simd", "reduce", "codec", "wire", "engine"];
/// The names that the modules in [`MODULES_WITHOUT_IO`] must not use, with the reason.
const NAMES_FORBIDDEN_WITHOUT_IO: &[(&str, &str)] = &[
    ("std::time::Instant", "pass the time as an argument"),
    ("std::time::SystemTime", "pass the time as an argument"),
    ("std::net", "this module opens no socket"),
    ("std::thread", "this module starts no thread and does not sleep"),
    ("std::env", "pass the environment as an argument"),
    ("std::fs", "this module reads no file"),
    ("std::process", "this module starts no process"),
    ("HashMap", "its order differs between runs"),
    ("HashSet", "its order differs between runs"),
    ("rand::rng", "pass the random numbers as an argument"),
    ("rand::random", "pass the random numbers as an argument"),
];
/// Exceptions to [`NAMES_FORBIDDEN_WITHOUT_IO`]: a module, and a name that this module may use. `exit` defines exit
/// codes with `std::process::ExitCode`.
const NAMES_ALLOWED_WITHOUT_IO: &[(&str, &str)] = &[("exit", "std::process")];

const MAY_READ_THE_CLOCK: &[&str] =
    &["observe", "rendezvous", "runtime", "group", "named", "train", "launch", "monitor", "cli"];
const MAY_READ_THE_ENVIRONMENT: &[&str] = &["rendezvous", "launch", "cli", "bin"];
const MAY_BE_UNSAFE: &[&str] = &["shm", "transport", "simd", "simulation", "bindings"];
/// Further files that may contain `unsafe`. They access buffers of callers and of other libraries, and an inherited pipe.
const MAY_BE_UNSAFE_FILES: &[&str] =
    &["src/runtime/memory.rs", "src/group/foreign.rs", "src/rendezvous/inherited_pipe.rs"];
/// The modules that process bytes from other processes, and so must not panic.
const MODULES_THAT_MUST_NOT_PANIC: &[&str] =
    &["wire", "engine", "shm", "transport", "rendezvous", "named", "monitor"];

/// The folders of strategies, with names that belong to the messages of a group. The first folder sends and receives through the
/// trait in `src/train/runtime.rs`, and the others through `src/train/peer_link.rs`.
const NAMES_FORBIDDEN_IN_STRATEGIES: &[(&str, &[&str])] = &[
    ("src/train/strategies/", &["Group", "Messenger", "Handle", "subgroup", "isolated"]),
    ("src/train/parameter_server/", &["Handle", "Received", "subgroup", "isolated"]),
    ("src/train/gossip/", &["Handle", "Received", "subgroup", "isolated"]),
    ("src/train/server_run/", &["Handle", "Received", "subgroup", "isolated", "Messenger"]),
];
/// This file gets the group of a run, and passes it to the strategies as the trait.
const STRATEGY_FACTORY: &str = "src/train/strategies/mod.rs";

const FILE_LINES_MAX: usize = 500;
/// Files that may have more than `FILE_LINES_MAX` lines: the path, and the number of lines allowed. Do not add files
/// to this list, and do not increase the numbers.
const LONG_FILES: &[(&str, usize)] = &[];

const COLUMNS_MAX: usize = 130;

/// Words that no text may use, because they make a sentence hard to understand. The list may grow.
const UNCLEAR_WORDS: &[&str] = &["nobody", "whoever", "whatever", "becomes of", "such as are"];
/// The files in which tests may sleep, with the number of calls of `sleep` in each file. Two kinds of code may sleep:
/// the loop that waits for a condition, and tests that measure times.
const MAY_SLEEP: &[(&str, usize)] =
    &[("tests/util/mod.rs", 2), ("tests/launch/ending.rs", 1), ("tests/idle.rs", 1)];

fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn all_sources() -> Vec<Source> {
    read_all(repository_root(), &["src", "tests", "benches", "bindings", "tools"])
}

/// Panics with all violations that the rule finds in the sources, if there are any.
fn assert_no_violations(sources: &[Source], rule: impl Fn(&Source) -> Vec<String>) {
    let found: Vec<String> = sources.iter().flat_map(rule).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

/// Returns the top-level module of a file: `wire` for `src/wire/frame.rs`, `bin` for `src/bin/ringrun.rs`, and `None`
/// for files outside `src`.
fn top_module(path: &str) -> Option<&str> {
    let inner = path.strip_prefix("src/")?;
    Some(inner.split('/').next().unwrap_or_default().trim_end_matches(".rs"))
        .filter(|&module| module != "lib")
}

/// Returns the text of a violation, with the file and line of the violation.
fn violation_at(source: &Source, offset: usize, text: &str) -> String {
    format!("{}:{}: {text}", source.path, source.line_number(offset))
}

/// (a) Checks that a module imports only modules that [`MAY_IMPORT`] allows. `reexports` maps each name that `lib.rs`
/// re-exports to its top-level module.
fn check_imports(source: &Source, reexports: &BTreeMap<String, String>) -> Vec<String> {
    let Some(own) = top_module(&source.path).filter(|&own| own != TEST_MODULE) else { return Vec::new() };
    let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == own) else {
        return vec![format!("{}: the module `{own}` is not in MAY_IMPORT of tests/tidy.rs", source.path)];
    };
    let mut found = BTreeSet::new();
    for named in source.code_paths() {
        let mut module = source.module();
        module.extend((0..source.inline_depth(named.at)).map(|_| "inline".to_owned()));
        let supers = named.segments.iter().take_while(|segment| *segment == "super").count();
        let target = match named.segments.first().map(String::as_str) {
            Some("crate") => named.segments.get(1),
            Some("ringtrain") if own == "bin" => named.segments.get(1),
            Some("super") if own != "bin" && supers >= module.len() => named.segments.get(supers),
            _ => None,
        };
        let Some(target) = target else { continue };
        let target = reexports.get(target).unwrap_or(target);
        if target != own && target != TEST_MODULE && !allowed.split(' ').any(|module| module == target) {
            found.insert(violation_at(source, named.at, &format!("`{own}` must not import `{target}`")));
        }
    }
    found.into_iter().collect()
}

/// Maps each name that `lib.rs` re-exports at the root of the crate to its top-level module.
fn reexports(sources: &[Source]) -> BTreeMap<String, String> {
    let root = sources.iter().find(|source| source.path == "src/lib.rs").expect("the crate has a root");
    let full_paths = root.code_paths().into_iter().filter(|named| named.segments.len() >= 2);
    full_paths
        .map(|named| (named.segments.last().cloned().unwrap_or_default(), named.segments[0].clone()))
        .collect()
}

/// Returns the offset at which the code of a file names `what`: a path such as `std::env`, or a word such as
/// `HashMap`. Ignores the tests in the file.
fn find_forbidden_name(source: &Source, what: &str) -> Option<usize> {
    let last = what.rsplit("::").next().unwrap_or(what);
    let wanted: Vec<&str> = what.split("::").collect();
    let in_code = |offset: usize| {
        !source.shipped[offset..].trim_start().is_empty() && source.shipped.as_bytes()[offset] != b' '
    };
    if wanted.len() == 1 || last.chars().next().is_some_and(char::is_uppercase) {
        return find_word(&source.shipped, last, 0);
    }
    let named = source.code_paths().into_iter().find(|named| {
        in_code(named.at)
            && named.segments.iter().map(String::as_str).take(wanted.len()).eq(wanted.iter().copied())
    });
    named.map(|named| named.at).or_else(|| find_word(&source.shipped, what, 0))
}

/// (b) Checks that modules without IO use none of the names in [`NAMES_FORBIDDEN_WITHOUT_IO`].
fn check_modules_without_io(source: &Source) -> Vec<String> {
    let Some(own) = top_module(&source.path).filter(|own| MODULES_WITHOUT_IO.contains(own)) else {
        return Vec::new();
    };
    let forbidden = NAMES_FORBIDDEN_WITHOUT_IO
        .iter()
        .filter(|(what, _)| !NAMES_ALLOWED_WITHOUT_IO.contains(&(own, what)));
    forbidden
        .filter_map(|(what, why)| {
            find_forbidden_name(source, what)
                .map(|offset| violation_at(source, offset, &format!("`{own}` must not name {what}: {why}")))
        })
        .collect()
}

/// (b) Checks that only the listed modules read the clock or the environment.
fn check_clock_and_environment(source: &Source) -> Vec<String> {
    let Some(own) = top_module(&source.path) else { return Vec::new() };
    let mut found = Vec::new();
    for (modules, what) in [
        (MAY_READ_THE_CLOCK, "std::time::Instant"),
        (MAY_READ_THE_CLOCK, "std::time::SystemTime"),
        (MAY_READ_THE_ENVIRONMENT, "std::env"),
    ] {
        if !modules.contains(&own)
            && let Some(offset) = find_forbidden_name(source, what)
        {
            found.push(violation_at(
                source,
                offset,
                &format!("only the modules {modules:?} may name {what}"),
            ));
        }
    }
    found
}

/// (b) Checks that strategies use none of the names in [`NAMES_FORBIDDEN_IN_STRATEGIES`].
fn check_strategies(source: &Source) -> Vec<String> {
    let folders = NAMES_FORBIDDEN_IN_STRATEGIES.iter();
    let Some((folder, names)) = folders.into_iter().find(|(folder, _)| source.path.starts_with(folder))
    else {
        return Vec::new();
    };
    if source.path == STRATEGY_FACTORY {
        return Vec::new();
    }
    names
        .iter()
        .filter_map(|name| find_forbidden_name(source, name).map(|offset| (name, offset)))
        .map(|(name, offset)| violation_at(source, offset, &format!("{folder} must not name {name}")))
        .collect()
}

/// (c) Checks that only the listed modules and files contain `unsafe`. Clippy checks that each use of `unsafe` has a
/// `SAFETY:` comment.
fn check_unsafe(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = 0;
    while let Some(offset) = find_word(&source.code, "unsafe", rest) {
        rest = offset + 1;
        let own =
            top_module(&source.path).unwrap_or_else(|| source.path.split('/').next().unwrap_or_default());
        if !MAY_BE_UNSAFE.contains(&own) && !MAY_BE_UNSAFE_FILES.contains(&source.path.as_str()) {
            found.push(violation_at(source, offset, &format!("only {MAY_BE_UNSAFE:?} may contain `unsafe`")));
        }
    }
    found
}

/// (d) Checks each `expect` in the modules that process bytes from other processes: its text must state why the
/// `expect` cannot fail. Clippy checks that these modules do not use `unwrap`, `panic!` or `unreachable!`.
fn check_expects(source: &Source) -> Vec<String> {
    if !top_module(&source.path).is_some_and(|own| MODULES_THAT_MUST_NOT_PANIC.contains(&own)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (offset, what) in source.shipped.match_indices(".expect(") {
        let message = source.text[offset + what.len()..].trim_start().strip_prefix('"');
        let words = message.map_or(0, |m| m.split('"').next().unwrap_or_default().split_whitespace().count());
        if words < 4 {
            found.push(violation_at(
                source,
                offset,
                "the message of `expect` must be a sentence that states why it cannot fail",
            ));
        }
    }
    found
}

/// (e) Checks the length of files. `known` lists the files that may have more than `FILE_LINES_MAX` lines.
fn check_file_length(source: &Source, known: &[(&str, usize)]) -> Vec<String> {
    let lines = source.text.lines().count();
    match known.iter().find(|(path, _)| *path == source.path) {
        None if lines > FILE_LINES_MAX => {
            vec![format!(
                "{} has {lines} lines, more than {FILE_LINES_MAX}: split it into two files with one idea each",
                source.path
            )]
        }
        Some((path, allowed)) if lines > *allowed => {
            vec![format!("{path} has grown from {allowed} lines to {lines}")]
        }
        Some((path, allowed)) if lines < *allowed || lines <= FILE_LINES_MAX => {
            vec![format!("{path} has {lines} lines now; lower its number in LONG_FILES, or remove it")]
        }
        _ => Vec::new(),
    }
}

/// (f) Checks single lines. Text in quotes does not count for the width of a line: a message must stay on one line,
/// so that a search for the message finds it.
fn check_lines(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let width_without_quotes = |text: &str, code: &str| {
        if text.contains('"') {
            code.split('"').map(|piece| piece.trim_end().chars().count()).sum()
        } else {
            text.chars().count()
        }
    };
    for (index, (text, code)) in source.text.lines().zip(source.code.lines()).enumerate() {
        let mut report = |what: &str| found.push(format!("{}:{}: {what}", source.path, index + 1));
        if width_without_quotes(text, code) > COLUMNS_MAX {
            report("more than 130 columns");
        }
        let markers = ["FIX", "XX"].map(|half| half.to_owned() + if half == "XX" { "X" } else { "ME" });
        if markers.iter().any(|word| text.contains(word)) {
            report("a marker of unfinished work");
        }
    }
    found
}

/// (g) Returns the lines of a text that contain one of [`UNCLEAR_WORDS`].
fn check_words(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let lower = line.to_lowercase();
        for word in UNCLEAR_WORDS.iter().filter(|word| find_word(&lower, word, 0).is_some()) {
            found.push(format!("{path}:{}: write `{word}` in plain words", index + 1));
        }
    }
    found
}

/// (h) Checks that tests do not sleep. A test must wait for a condition, and not for a time.
fn check_sleeps(source: &Source) -> Vec<String> {
    let words = source.code.match_indices("sleep(");
    let count = words.filter(|&(at, _)| find_word(&source.code, "sleep", at) == Some(at)).count();
    let allowed = MAY_SLEEP.iter().find(|(path, _)| *path == source.path).map_or(0, |(_, count)| *count);
    if !source.path.starts_with("tests/") || count <= allowed {
        return Vec::new();
    }
    vec![format!(
        "{} sleeps {count} times, but only {allowed} are allowed: wait for a condition with util::wait_until",
        source.path
    )]
}

/// (j) Checks that no two types or traits have the same name. The crate and the bindings are checked together.
fn find_ambiguous_types(sources: &[Source]) -> Vec<String> {
    let mut first: BTreeMap<&str, String> = BTreeMap::new();
    let mut found = Vec::new();
    for source in
        sources.iter().filter(|source| source.path.starts_with("src") || source.path.starts_with("bindings"))
    {
        for (index, line) in source.code.lines().enumerate() {
            let Some(name) = defined_type(line) else { continue };
            let place = format!("{}:{}", source.path, index + 1);
            if let Some(other) = first.get(name) {
                found.push(format!("{place}: `{name}` is also the name of a type at {other}"));
            } else {
                first.insert(name, place);
            }
        }
    }
    found
}

/// Returns the name of the type or trait that a line defines. Returns `None` for an indented `type`, because it is an
/// associated type of a trait.
fn defined_type(line: &str) -> Option<&str> {
    let item = line.trim_start();
    let item = item.strip_prefix("pub").map_or(item, |rest| match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')').map_or("", |(_, rest)| rest),
        None => rest,
    });
    let (keyword, rest) = item.trim_start().trim_start_matches("unsafe ").split_once(' ')?;
    let defines = match keyword {
        "struct" | "enum" | "union" | "trait" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    let name = rest.split(|c: char| !c.is_alphanumeric()).next()?;
    (defines && !name.is_empty()).then_some(name)
}

#[test]
fn modules_import_only_the_modules_below_them() {
    let sources = all_sources();
    let reexports = reexports(&sources);
    assert_eq!(reexports.get("Group").map(String::as_str), Some("group"));
    assert_no_violations(&sources, |source| check_imports(source, &reexports));
}

#[test]
fn modules_without_io_name_no_clock_socket_thread_or_environment() {
    assert_no_violations(&all_sources(), check_modules_without_io);
    assert_no_violations(&all_sources(), check_clock_and_environment);
}

#[test]
fn strategies_send_and_receive_through_one_file() {
    assert_no_violations(&all_sources(), check_strategies);
}

#[test]
fn unsafe_code_is_only_in_some_modules() {
    assert_no_violations(&all_sources(), check_unsafe);
}

#[test]
fn modules_that_process_bytes_from_other_processes_explain_each_expect() {
    assert_no_violations(&all_sources(), check_expects);
}

#[test]
fn files_are_short() {
    let sources = all_sources();
    assert_no_violations(&sources, |source| check_file_length(source, LONG_FILES));
    for path in LONG_FILES.iter().map(|listed| listed.0) {
        assert!(
            sources.iter().any(|source| source.path == path),
            "{path} does not exist; remove it from the list"
        );
    }
}

#[test]
fn lines_are_not_too_wide_and_have_no_markers_of_unfinished_work() {
    assert_no_violations(&all_sources(), check_lines);
}

#[test]
fn texts_have_no_unclear_words() {
    let mut found = Vec::new();
    for path in pages::all_files() {
        let is_text = [".rs", ".py", ".pyi", ".md"].iter().any(|ending| path.ends_with(ending));
        // The tests of this rule contain the words.
        if is_text && !path.starts_with("tests/tidy") {
            let text = fs::read_to_string(repository_root().join(&path)).expect("the file is a text");
            found.extend(check_words(&path, &text));
        }
    }
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_type_name_has_one_meaning() {
    let found = find_ambiguous_types(&all_sources());
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn tests_do_not_sleep() {
    assert_no_violations(&all_sources(), check_sleeps);
}

#[test]
fn the_architecture_page_lists_every_module_and_every_page_is_linked() {
    let read = |path: &str| fs::read_to_string(repository_root().join(path)).unwrap_or_default();
    let architecture = read("docs/ARCHITECTURE.md");
    let linking = format!("{architecture}{}", read("README.md"));
    let missing = find_unmentioned(
        &architecture,
        &linking,
        &file_names_in_folder("src"),
        &file_names_in_folder("docs"),
    );
    assert!(missing.is_empty(), "{missing:?}");
}

/// (i) Returns the `folders` that the text `architecture` does not name, and the `pages` to which the text `linking`
/// has no link.
fn find_unmentioned(architecture: &str, linking: &str, folders: &[String], pages: &[String]) -> Vec<String> {
    let modules =
        folders.iter().filter(|name| !name.contains('.') && !architecture.contains(&format!("{name}/")));
    let pages = pages.iter().filter(|name| {
        let target = name.as_str();
        Path::new(target).extension().is_some_and(|extension| extension == "md")
            && target != "ARCHITECTURE.md"
            && ![format!("({target}"), format!("(docs/{target}")].iter().any(|link| linking.contains(link))
    });
    modules.chain(pages).cloned().collect()
}

fn file_names_in_folder(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(repository_root().join(folder)).expect("the folder is there").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
