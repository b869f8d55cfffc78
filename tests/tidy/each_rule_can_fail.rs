//! Tests every rule on code that breaks the rule and on code that follows the rule.

use super::*;

fn count_violations(path: &str, text: &str, rule: impl Fn(&Source) -> Vec<String>) -> usize {
    rule(&Source::new(path, text)).len()
}

#[test]
fn forbidden_imports_are_found_in_every_form() {
    let root: BTreeMap<String, String> = [("Group".to_owned(), "group".to_owned())].into();
    let rule = |source: &Source| check_imports(source, &root);
    for (path, text, expected) in [
        ("src/types.rs", "use crate::wire::Cause;", 1),
        ("src/types.rs", "use super::wire::Cause;", 1),
        ("src/types.rs", "// use crate::wire\nconst A: &str = \"crate::wire::x\";", 0),
        ("src/wire/frame.rs", "use crate::{types::Rank, engine::{self, Engine}};", 1),
        ("src/wire/frame.rs", "use super::super::engine;", 1),
        ("src/wire/frame.rs", "use super::reader::Reader;", 0),
        ("src/wire/frame.rs", "mod tests { use super::super::reader; use crate::types::Rank; }", 0),
        ("src/wire/frame.rs", "mod tests { use super::super::super::engine; }", 1),
        ("src/wire/mod.rs", "fn f() { let x = crate::group::Error; }", 1),
        ("src/wire/mod.rs", "fn f(_: crate::Group) {}", 1),
        ("src/train/run.rs", "use crate::Group;", 0),
        ("src/train/run.rs", "use crate::{\n    cli,\n    types::Rank,\n};", 1),
        ("src/bin/ringrun.rs", "use ringtrain::{cli, launch};", 0),
        ("src/bin/ringrun.rs", "use ringtrain::{cli, group};", 1),
        ("src/attic/mod.rs", "", 1),
    ] {
        assert_eq!(count_violations(path, text, rule), expected, "{path}: {text}");
    }
}

#[test]
fn clocks_sockets_and_environment_are_found_except_in_tests() {
    for (path, text, expected) in [
        ("src/engine/mod.rs", "use std::time::{Duration, Instant};", 1),
        ("src/engine/mod.rs", "use std::time::Duration;", 0),
        ("src/engine/mod.rs", "use std::{env, net::TcpStream};", 2),
        ("src/engine/mod.rs", "fn f() { std::thread::yield_now(); }", 1),
        ("src/engine/mod.rs", "use std::collections::HashMap;", 1),
        ("src/engine/mod.rs", "fn f() -> u8 { rand::random() }", 1),
        ("src/engine/mod.rs", "use rand::rng;", 1),
        ("src/engine/mod.rs", "use rand::rngs::StdRng;", 0),
        ("src/engine/mod.rs", "#[cfg(test)]\nmod tests { use std::time::Instant; use std::env; }", 0),
        ("src/exit.rs", "use std::process::ExitCode;", 0),
        ("src/wire/mod.rs", "use std::process::Command;", 1),
        ("src/group/mod.rs", "use std::time::Instant;", 0),
    ] {
        assert_eq!(count_violations(path, text, check_modules_without_io), expected, "{path}: {text}");
    }
    for (path, text, expected) in [
        ("src/transport/tcp/mod.rs", "use std::time::Instant;", 1),
        ("src/group/join.rs", "use std::env;", 1),
        ("src/group/join.rs", "use std::time::Instant;", 0),
        ("src/train/run.rs", "fn f() { let _ = std::env::var_os(\"A\"); }", 1),
        ("src/launch/job.rs", "use std::env;", 0),
    ] {
        assert_eq!(count_violations(path, text, check_clock_and_environment), expected, "{path}: {text}");
    }
}

#[test]
fn messages_of_a_group_are_found_in_strategies() {
    for (path, text, expected) in [
        ("src/train/strategies/allreduce.rs", "use crate::group::{Error, Group};", 1),
        ("src/train/strategies/allreduce.rs", "use crate::group::Error;", 0),
        ("src/train/strategies/mod.rs", "use crate::group::Group;", 0),
        ("src/train/gossip/api.rs", "fn f(group: &mut Group) { group.isolated(); }", 1),
        ("src/train/gossip/api.rs", "fn f(group: &mut Group) { group.barrier(); }", 0),
        ("src/train/peer_link.rs", "fn f(group: &mut Group) { group.isolated(); }", 0),
    ] {
        assert_eq!(count_violations(path, text, check_strategies), expected, "{path}: {text}");
    }
}

#[test]
fn forbidden_unsafe_code_is_found() {
    let code = "fn f() {\n    unsafe { g() }\n}";
    for (path, text, expected) in [
        ("src/simd/mod.rs", code, 0),
        ("src/wire/mod.rs", code, 1),
        ("tests/x.rs", code, 1),
        ("src/wire/mod.rs", "// unsafe\nconst A: &str = \"unsafe\"; fn unsafely() {}", 0),
    ] {
        assert_eq!(count_violations(path, text, check_unsafe), expected, "{path}: {text}");
    }
}

#[test]
fn unexplained_expects_are_found() {
    for (path, text, expected) in [
        ("src/wire/mod.rs", "fn f() { x.expect(\"ok\") }", 1),
        ("src/wire/mod.rs", "fn f() { x.expect(why) }", 1),
        ("src/wire/mod.rs", "fn f() { x.expect(\"HMAC takes keys of any length\") }", 0),
        ("src/wire/mod.rs", "#[cfg(test)]\nmod tests { fn f() { x.expect(\"ok\") } }", 0),
        ("src/group/mod.rs", "fn f() { x.expect(\"ok\") }", 0),
    ] {
        assert_eq!(count_violations(path, text, check_expects), expected, "{path}: {text}");
    }
}

#[test]
fn long_files_are_found() {
    let path = "src/a.rs";
    for (lines, known, expected) in
        [(500, None, 0), (501, None, 1), (600, Some(600), 0), (601, Some(600), 1), (599, Some(600), 1)]
    {
        let known: Vec<_> = known.iter().map(|&known| (path, known)).collect();
        let rule = |source: &Source| check_file_length(source, &known);
        assert_eq!(count_violations(path, &"//\n".repeat(lines), rule), expected, "{lines}, {known:?}");
    }
}

#[test]
fn long_lines_and_unfinished_work_are_found() {
    let repeat = |letter: &str| letter.repeat(131);
    for (text, expected) in [
        ("fn f() {}\n".to_owned(), 0),
        (format!("// {}\n", repeat("x")), 1),
        (format!("    f(\"{}\");\n", repeat("x")), 0),
        (format!("    f(\"x\"); {}\n", repeat("y")), 1),
        (format!("// {}: later\n", ["FIX", "ME"].concat()), 1),
    ] {
        assert_eq!(count_violations("src/a.rs", &text, check_lines), expected, "{text}");
    }
}

#[test]
fn unclear_words_are_found() {
    for (text, expected) in [("Nobody waits.", 1), ("what becomes of it", 1), ("somebody's", 0)] {
        assert_eq!(check_words("docs/a.md", text).len(), expected, "{text}");
    }
}

#[test]
fn ambiguous_types_are_found() {
    for (text, expected) in [
        ("pub(crate) struct Link {", 1),
        ("    unsafe trait Link<T> {", 1),
        ("type Link = u8;", 1),
        ("    type Link = u8;", 0),
        ("// struct Link", 0),
        ("struct LinkState;", 0),
        ("fn f(link: Link) {}", 0),
    ] {
        let sources = [("src/a.rs", "pub enum Link {}"), ("bindings/python/src/b.rs", text)];
        let sources = sources.map(|(path, text)| Source::new(path, text));
        assert_eq!(find_ambiguous_types(&sources).len(), expected, "{text}");
    }
}

#[test]
fn sleeps_are_found() {
    assert_eq!(count_violations("tests/a.rs", "fn f() { thread::sleep(LONG); }", check_sleeps), 1);
    assert_eq!(count_violations("tests/a.rs", "fn f() { run(\"sleep(1)\"); }", check_sleeps), 0);
    assert_eq!(count_violations("tests/util/mod.rs", &"sleep(A);".repeat(3), check_sleeps), 1);
    assert_eq!(count_violations("src/a.rs", "fn f() { thread::sleep(LONG); }", check_sleeps), 0);
}

#[test]
fn unlisted_modules_and_unlinked_pages_are_found() {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (architecture, linking) = ("wire/  bytes\n[a](a.md)", "wire/ [a](a.md) [b](docs/b.md#part)");
    assert!(
        find_unmentioned(architecture, linking, &words("wire lib.rs"), &words("ARCHITECTURE.md a.md b.md"))
            .is_empty()
    );
    assert_eq!(
        find_unmentioned(architecture, linking, &words("wire attic"), &words("c.md")),
        ["attic", "c.md"]
    );
}

#[test]
fn comments_literals_and_tests_are_blanked() {
    let text = "let a = 'x'; // b\nlet c = \"d\\\"e\"; /* f /* g */ h */ let i: &'j str = r#\"k\"l\"#; let m = b'\\'';";
    let source = Source::new("src/a.rs", text);
    let letters: String = source.code.chars().filter(char::is_ascii_lowercase).collect();
    assert_eq!(letters, "letaletcletijstrrletmb");
    assert_eq!(source.code.len(), text.len());
    let source = Source::new("src/a/mod.rs", "mod a;\n#[cfg(test)]\nmod proof;\nfn f() {}\n");
    assert_eq!(source.test_files(), ["src/a/proof.rs"]);
    assert!(!source.shipped.contains("proof") && source.shipped.contains("fn f"));
}
