//! Architecture and style as tests. They read the source files as text; `docs/ARCHITECTURE.md` has the reasons.
//!
//! Each rule is a function from a source to its violations, and is itself tested on a snippet that breaks it.

#[path = "tidy/each_rule_can_fail.rs"]
mod each_rule_can_fail;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use source::{Source, find_word, read_all};

/// Which of the crate's top-level modules each of them may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("exit", &[]),
    ("schedule", &["types"]),
    ("reduce", &["types"]),
    ("wire", &["types"]),
    ("codec", &["types"]),
    ("engine", &["types", "schedule", "wire", "reduce", "codec"]),
    ("transport", &["types", "wire"]),
    ("rendezvous", &["types", "wire", "transport"]),
    ("group", &["types", "schedule", "wire", "reduce", "codec", "engine", "transport", "rendezvous"]),
    ("named", &["types", "group", "codec"]),
    ("train", &["types", "codec", "group"]),
    ("launch", &["types", "wire", "rendezvous", "exit"]),
    (
        "cli",
        &[
            "types",
            "exit",
            "schedule",
            "reduce",
            "wire",
            "codec",
            "engine",
            "transport",
            "rendezvous",
            "group",
            "named",
            "train",
            "launch",
        ],
    ),
    ("bin", &["cli", "launch"]),
];

/// Rooms whose code is a function of its arguments: what they must not name, with the reason.
const PURE: &[&str] = &["types", "exit", "schedule", "reduce", "codec", "wire", "engine"];
const IMPURE: &[(&str, &str)] = &[
    ("std::time::Instant", "time is an argument"),
    ("std::time::SystemTime", "time is an argument"),
    ("std::net", "it opens no socket"),
    ("std::thread", "it starts no thread and does not sleep"),
    ("std::env", "the environment is an argument"),
    ("std::fs", "it reads no file"),
    ("std::process", "it starts no process"),
    ("HashMap", "its order differs between runs"),
    ("HashSet", "its order differs between runs"),
    ("rand::rng", "randomness is an argument"),
    ("rand::random", "randomness is an argument"),
];
/// `ExitCode` is what this module is for.
const PURE_EXCEPTIONS: &[(&str, &str)] = &[("exit", "std::process")];

const MAY_READ_THE_CLOCK: &[&str] = &["rendezvous", "group", "named", "train", "launch", "cli"];
const MAY_READ_THE_ENVIRONMENT: &[&str] = &["rendezvous", "launch", "cli", "bin"];
const MAY_BE_UNSAFE: &[&str] = &["transport", "reduce", "bindings"];
/// Further files: buffers that callers lend to operations, and foreign buffers.
const MAY_BE_UNSAFE_FILES: &[&str] = &["src/group/memory.rs", "src/group/foreign.rs"];
const NEVER_PANIC: &[&str] = &["wire", "engine", "transport", "rendezvous", "named"];

const FUNCTION_LINES_MAX: usize = 70;
/// Functions that are longer all the same. The numbers may only shrink; new names are not added.
const LONG_FUNCTIONS: &[(&str, &str, usize)] = &[];

const FILE_LINES_MAX: usize = 500;
/// Files that are longer all the same. The numbers may only shrink; new names are not added.
const LONG_FILES: &[(&str, usize)] = &[];

const COLUMNS_MAX: usize = 130;

/// Where tests may sleep: in the one loop that waits for a condition, and where a moment in time is itself the test.
const MAY_SLEEP: &[(&str, usize)] =
    &[("tests/util/mod.rs", 2), ("tests/launch/ending.rs", 1), ("tests/idle.rs", 1)];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn all() -> Vec<Source> {
    read_all(root(), &["src", "tests", "benches", "bindings", "tools"])
}

/// Fails with every violation that the rule finds in any of the sources.
fn check(sources: &[Source], rule: impl Fn(&Source) -> Vec<String>) {
    let found: Vec<String> = sources.iter().flat_map(rule).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

/// The module that a file belongs to: `src/wire/frame.rs` is in `wire`, `src/bin/ringrun.rs` in `bin`; `None` outside `src`.
fn module(path: &str) -> Option<&str> {
    let inner = path.strip_prefix("src/")?;
    Some(inner.split('/').next().unwrap_or_default().trim_end_matches(".rs"))
        .filter(|&module| module != "lib")
}

fn at(source: &Source, offset: usize, text: &str) -> String {
    format!("{}:{}: {text}", source.path, source.line(offset))
}

/// (a) Who imports whom. `reexports` are the names at the crate's root and the modules they come from.
fn imports(source: &Source, reexports: &BTreeMap<String, String>) -> Vec<String> {
    let Some(own) = module(&source.path) else { return Vec::new() };
    let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == own) else {
        return vec![format!("{}: the module `{own}` is not in MAY_IMPORT of tests/tidy.rs", source.path)];
    };
    let mut found = BTreeSet::new();
    for named in source.named_paths() {
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
        if target != own && !allowed.contains(&target.as_str()) {
            found.insert(at(source, named.at, &format!("`{own}` must not import `{target}`")));
        }
    }
    found.into_iter().collect()
}

/// The names that `lib.rs` gives at the crate's root, and the modules they come from.
fn reexports(sources: &[Source]) -> BTreeMap<String, String> {
    let facade = sources.iter().find(|source| source.path == "src/lib.rs").expect("the crate has a root");
    let whole = facade.named_paths().into_iter().filter(|named| named.segments.len() >= 2);
    whole
        .map(|named| (named.segments.last().cloned().unwrap_or_default(), named.segments[0].clone()))
        .collect()
}

/// Whether the shipped code names a path or a word of this meaning, and where.
fn names(source: &Source, what: &str) -> Option<usize> {
    let last = what.rsplit("::").next().unwrap_or(what);
    let wanted: Vec<&str> = what.split("::").collect();
    let in_code = |offset: usize| {
        !source.shipped[offset..].trim_start().is_empty() && source.shipped.as_bytes()[offset] != b' '
    };
    if wanted.len() == 1 || last.chars().next().is_some_and(char::is_uppercase) {
        return find_word(&source.shipped, last, 0);
    }
    let named = source.named_paths().into_iter().find(|named| {
        in_code(named.at)
            && named.segments.iter().map(String::as_str).take(wanted.len()).eq(wanted.iter().copied())
    });
    named.map(|named| named.at).or_else(|| find_word(&source.shipped, what, 0))
}

/// (b) What modules without IO must not name.
fn purity(source: &Source) -> Vec<String> {
    let Some(own) = module(&source.path).filter(|own| PURE.contains(own)) else { return Vec::new() };
    let forbidden = IMPURE.iter().filter(|(what, _)| !PURE_EXCEPTIONS.contains(&(own, what)));
    forbidden
        .filter_map(|(what, why)| {
            names(source, what)
                .map(|offset| at(source, offset, &format!("`{own}` must not name {what}: {why}")))
        })
        .collect()
}

/// (b) Who reads the clock and the environment.
fn surroundings(source: &Source) -> Vec<String> {
    let Some(own) = module(&source.path) else { return Vec::new() };
    let mut found = Vec::new();
    for (modules, what) in [
        (MAY_READ_THE_CLOCK, "std::time::Instant"),
        (MAY_READ_THE_CLOCK, "std::time::SystemTime"),
        (MAY_READ_THE_ENVIRONMENT, "std::env"),
    ] {
        if !modules.contains(&own)
            && let Some(offset) = names(source, what)
        {
            found.push(at(source, offset, &format!("only {modules:?} may name {what}")));
        }
    }
    found
}

/// (c) Where `unsafe` is, and its reason.
fn unsafety(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = 0;
    while let Some(offset) = find_word(&source.code, "unsafe", rest) {
        rest = offset + 1;
        let own = module(&source.path).unwrap_or_else(|| source.path.split('/').next().unwrap_or_default());
        if !MAY_BE_UNSAFE.contains(&own) && !MAY_BE_UNSAFE_FILES.contains(&source.path.as_str()) {
            found.push(at(source, offset, &format!("only {MAY_BE_UNSAFE:?} may be unsafe")));
        }
        let above = source.text.lines().take(source.line(offset) - 1).collect::<Vec<_>>();
        let comment = above.iter().rev().take_while(|line| line.trim_start().starts_with("//"));
        if !comment.into_iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety")) {
            found.push(at(source, offset, "`unsafe` without `SAFETY:` right above"));
        }
    }
    found
}

/// (d) What a byte from outside must not reach.
fn panics(source: &Source) -> Vec<String> {
    if !module(&source.path).is_some_and(|own| NEVER_PANIC.contains(&own)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for what in [".unwrap()", "panic!", "unreachable!", "todo!", "unimplemented!", ".unwrap_err()"] {
        for (offset, _) in source.shipped.match_indices(what) {
            found.push(at(source, offset, &format!("{what} where bytes from outside may come")));
        }
    }
    for (offset, what) in source.shipped.match_indices(".expect(") {
        let message = source.text[offset + what.len()..].trim_start().strip_prefix('"');
        let words = message.map_or(0, |m| m.split('"').next().unwrap_or_default().split_whitespace().count());
        if words < 4 {
            found.push(at(
                source,
                offset,
                "an `expect` states, in a sentence, the invariant that it rests on",
            ));
        }
    }
    found
}

/// (e) Long functions, against the list.
fn long_functions(source: &Source, known: &[(&str, &str, usize)]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, line, lines) in source.functions() {
        let listed = known.iter().find(|(path, function, _)| *path == source.path && *function == name);
        let allowed = listed.map_or(FUNCTION_LINES_MAX, |(.., lines)| *lines);
        if lines > allowed {
            found.push(format!("{}:{line}: `{name}` has {lines} lines, more than {allowed}", source.path));
        }
    }
    for (path, function, allowed) in known.iter().filter(|(path, ..)| *path == source.path) {
        let longest =
            source.functions().into_iter().filter(|(name, ..)| name == function).map(|found| found.2).max();
        if longest.is_none_or(|lines| lines < *allowed || lines <= FUNCTION_LINES_MAX) {
            found.push(format!(
                "{path}: `{function}` has {longest:?} lines now; lower LONG_FUNCTIONS, or take it out"
            ));
        }
    }
    found
}

/// (e) Long files, against the list.
fn long_files(source: &Source, known: &[(&str, usize)]) -> Vec<String> {
    let lines = source.text.lines().count();
    match known.iter().find(|(path, _)| *path == source.path) {
        None if lines > FILE_LINES_MAX => {
            vec![format!(
                "{} has {lines} lines, more than {FILE_LINES_MAX}: look for the second idea in it",
                source.path
            )]
        }
        Some((path, allowed)) if lines > *allowed => {
            vec![format!("{path} has grown from {allowed} lines to {lines}")]
        }
        Some((path, allowed)) if lines < *allowed || lines <= FILE_LINES_MAX => {
            vec![format!("{path} has {lines} lines now; lower LONG_FILES, or take it out")]
        }
        _ => Vec::new(),
    }
}

/// (f) Lines. What stands in quotes does not count: a message stays in one piece, so that it can be searched for.
fn lines(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let unquoted = |text: &str, code: &str| {
        if text.contains('"') {
            code.split('"').map(|piece| piece.trim_end().chars().count()).sum()
        } else {
            text.chars().count()
        }
    };
    for (index, (text, code)) in source.text.lines().zip(source.code.lines()).enumerate() {
        let mut complain = |what: &str| found.push(format!("{}:{}: {what}", source.path, index + 1));
        if text.contains('\t') {
            complain("a tab");
        }
        if text.ends_with([' ', '\r']) {
            complain("white space at the end");
        }
        if unquoted(text, code) > COLUMNS_MAX {
            complain("more than 130 columns");
        }
        let leftover = ["FIX", "XX"].map(|half| half.to_owned() + if half == "XX" { "X" } else { "ME" });
        if leftover.iter().any(|word| text.contains(word)) || code.contains("dbg!") {
            complain("a leftover of work in progress");
        }
    }
    found
}

/// (h) Tests wait for conditions, not for time.
fn sleeps(source: &Source) -> Vec<String> {
    let words = source.code.match_indices("sleep(");
    let count = words.filter(|&(at, _)| find_word(&source.code, "sleep", at) == Some(at)).count();
    let allowed = MAY_SLEEP.iter().find(|(path, _)| *path == source.path).map_or(0, |(_, count)| *count);
    if !source.path.starts_with("tests/") || count <= allowed {
        return Vec::new();
    }
    vec![format!(
        "{} sleeps {count} times, {allowed} allowed: wait for a condition with util::wait_until",
        source.path
    )]
}

#[test]
fn modules_import_only_what_is_below_them() {
    let sources = all();
    let reexports = reexports(&sources);
    assert_eq!(reexports.get("Group").map(String::as_str), Some("group"));
    check(&sources, |source| imports(source, &reexports));
}

#[test]
fn modules_without_io_name_no_clock_socket_thread_or_environment() {
    check(&all(), purity);
    check(&all(), surroundings);
}

#[test]
fn unsafe_code_stays_where_it_belongs_and_says_why() {
    check(&all(), unsafety);
}

#[test]
fn bytes_from_outside_reach_no_panic() {
    check(&all(), panics);
}

#[test]
fn functions_and_files_stay_short() {
    let sources = all();
    check(&sources, |source| long_functions(source, LONG_FUNCTIONS));
    check(&sources, |source| long_files(source, LONG_FILES));
    for path in LONG_FUNCTIONS.iter().map(|listed| listed.0).chain(LONG_FILES.iter().map(|listed| listed.0)) {
        assert!(sources.iter().any(|source| source.path == path), "{path} is gone; take it off the list");
    }
}

#[test]
fn lines_are_clean() {
    check(&all(), lines);
}

#[test]
fn tests_do_not_sleep() {
    check(&all(), sleeps);
}

#[test]
fn every_module_is_on_the_map_and_every_page_is_linked() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap_or_default();
    let map = read("docs/ARCHITECTURE.md");
    let linked = format!("{map}{}", read("README.md"));
    let missing = not_mentioned(&map, &linked, &entries("src"), &entries("docs"));
    assert!(missing.is_empty(), "{missing:?}");
}

/// (g) Folders of `src` that the map leaves out, and pages that nothing links to.
fn not_mentioned(map: &str, linked: &str, folders: &[String], pages: &[String]) -> Vec<String> {
    let modules = folders.iter().filter(|name| !name.contains('.') && !map.contains(&format!("{name}/")));
    let pages = pages.iter().filter(|name| {
        let target = name.as_str();
        Path::new(target).extension().is_some_and(|extension| extension == "md")
            && target != "ARCHITECTURE.md"
            && ![format!("({target}"), format!("(docs/{target}")].iter().any(|link| linked.contains(link))
    });
    modules.chain(pages).cloned().collect()
}

fn entries(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(folder)).expect("the folder is there").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
