//! (k) Finds circles: files that import each other, directly or through other files. The files of a circle can only be
//! understood, tested and moved together.
//!
//! A file imports the file that defines a name, and not the file that re-exports the name. Code that is compiled only
//! for tests does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::source::{CodePath, Source};
use super::{all_sources, top_module};

/// The circles that exist: a folder, and the files below it, without `.rs`. Do not add a circle, and do not add a file
/// to a circle. Move the type that both files need to a file of its own.
const CIRCLES: &[(&str, &str)] = &[
    ("src/cli", "bench bench/flag_check"),
    ("src/cli/bench", "plan plan_error"),
    ("src/cli", "train train/commands train/generate"),
    ("src/cli/train", "args checkpoint_args config_file invocation option_set"),
    ("src/named", "client coordinator mod runtime stalls"),
    (
        "src/train",
        "arithmetic_check batch_norm_options buckets checkpoint checkpoint/error checkpoint/files \
         checkpoint/options checkpoint/state checkpoint/writer class_weights config curve_files data/archive \
         data/column_values data/compression data/csv/cells data/csv/dialect data/csv/mod data/csv/options \
         data/csv/records data/digits data/disk_features data/encoding data/exact_sum data/features data/file \
         data/file_digest data/format data/held_samples data/idx data/image_folder data/libsvm data/load \
         data/mod data/npy data/npy/npz data/npy/rounding data/parquet/column_type data/parquet/file \
         data/parquet/mod data/parquet/rows data/part_of_source data/raw_table data/row_cursor \
         data/rows_of_rank data/sample_blocks data/sample_words data/shared_samples data/skippable_reader \
         data/source data/split data/standard_input data/standardizer data/synthetic data/table_load \
         data/target data/text/byte_pairs data/text/mod data/text/stored_text data/text/vocabulary \
         data/text/windows data/unknown_classes data/unsplit_data divided_model_options early_stopping error \
         evaluation_work gossip/coordinator gossip/error gossip/quorum gradient_work learning_rate \
         metrics/classification metrics/mod metrics/regression model/architecture model/candle_layer \
         model/candle_parameters model/dense model/gpt model/loss model/network model/own_loss \
         model/own_model model/prediction model/spec model/tensor_split model_file/description \
         model_file/error model_file/inspection model_file/mod model_file/model_of_run model_file/saved_model \
         model_file/storage optimizer optimizer/kernels output_paths parameter_server/shard partition \
         progress rank_checks recipe report setup strategies/allreduce strategies/diloco \
         strategies/divided_step strategies/local_sgd strategies/local_training strategies/mod \
         strategies/model_average strategies/pipeline strategies/reproducible strategies/shard_step \
         strategies/sharded_optimizer strategies/tensor_parallel stream_options tensorboard",
    ),
    (
        "src/train",
        "gossip/api gossip/coordinator_trainer gossip/mod gossip/worker run server_run/first_server \
         server_run/mod server_run/worker summary_words",
    ),
    ("src/train/onnx", "columns graph layers mod"),
    ("src/train/predict", "arrays input samples table"),
    ("src/train/predict", "evaluation mod output text"),
    ("src/train", "runtime shard_exchange"),
    ("src/train", "trainer trainer/evaluation"),
];

/// For each file, the files that it imports, each with the line of the first import.
type Imports = BTreeMap<String, BTreeMap<String, usize>>;

/// The files of the crate, and the names that each file imports.
struct Modules<'a> {
    /// The source file of each module: `src/wire/frame.rs` for `["wire", "frame"]`.
    files: BTreeMap<Vec<String>, &'a Source>,
    /// The full path of each name that a module imports with `use`.
    imported_names: BTreeMap<(Vec<String>, String), Vec<String>>,
}

impl<'a> Modules<'a> {
    fn new(sources: &'a [Source]) -> Self {
        let in_crate = sources.iter().filter(|source| {
            top_module(&source.path).is_none_or(|module| module != "bin") && source.path.starts_with("src/")
        });
        let files = in_crate.map(|source| (source.module(), source)).collect();
        let mut modules = Self { files, imported_names: BTreeMap::new() };
        let mut imported_names = BTreeMap::new();
        for (module, source) in &modules.files {
            for path in source.used_paths().iter().filter(|path| source.inline_depth(path.at) == 0) {
                if let (Some(name), Some(full)) = (path.segments.last(), modules.full_path(source, path)) {
                    imported_names.insert((module.clone(), name.clone()), full);
                }
            }
        }
        modules.imported_names = imported_names;
        modules
    }

    /// Returns the path from the root of the crate, or `None` if the path leads out of the crate.
    fn full_path(&self, source: &Source, path: &CodePath) -> Option<Vec<String>> {
        let mut module = source.module();
        let names = &path.segments;
        let start = match names.first()?.as_str() {
            "crate" => return Some(names[1..].to_vec()),
            "super" => {
                module.extend((0..source.inline_depth(path.at)).map(|_| "inline".to_owned()));
                let supers = names.iter().take_while(|name| *name == "super").count();
                module.truncate(module.len().checked_sub(supers)?);
                supers
            }
            _ => {
                let child = [&module[..], &names[..1]].concat();
                self.files.contains_key(&child).then_some(0)?
            }
        };
        module.extend_from_slice(&names[start..]);
        Some(module)
    }

    /// Returns the file that defines what the full path names. Follows re-exports.
    fn defining_file(&self, full_path: &[String]) -> Option<&'a Source> {
        let mut full_path = full_path.to_vec();
        loop {
            let inside =
                (0..=full_path.len()).rev().find(|&len| self.files.contains_key(&full_path[..len]))?;
            let (module, names) = full_path.split_at(inside);
            let key = names.first().map(|name| (module.to_vec(), name.clone()));
            match key.and_then(|key| self.imported_names.get(&key)) {
                Some(other) if *other != full_path[..=inside] => full_path = [other, &names[1..]].concat(),
                _ => return self.files.get(module).copied(),
            }
        }
    }

    /// Returns the paths that a file names outside its tests, if they may lead to other files of the crate.
    fn paths_to_files(&self, module: &[String], source: &Source) -> Vec<CodePath> {
        let mut paths = source.code_paths();
        let children =
            self.files.range(module.to_vec()..).skip(1).map_while(|(path, _)| path.strip_prefix(module));
        for child in children.filter(|path| path.len() == 1) {
            paths.extend(source.paths_from(&child[0]).into_iter().filter(|path| path.segments.len() > 1));
        }
        paths.retain(|path| source.shipped.as_bytes()[path.at] != b' ');
        paths
    }

    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (module, source) in self.files.iter().filter(|(module, _)| !module.is_empty()) {
            let of_file = imports.entry(source.path.clone()).or_default();
            for path in self.paths_to_files(module, source) {
                let target = self.full_path(source, &path).and_then(|full| self.defining_file(&full));
                let target =
                    target.filter(|target| target.path != source.path && target.path != "src/lib.rs");
                if let Some(target) = target {
                    let line = source.line_number(path.at);
                    let first = of_file.entry(target.path.clone()).or_insert(line);
                    *first = line.min(*first);
                }
            }
        }
        imports
    }
}

/// Returns all files that `file` imports, directly or through other files.
fn reachable_files<'a>(imports: &'a Imports, file: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![file];
    while let Some(next) = open.pop() {
        for imported in imports.get(next).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(imported.as_str()) {
                open.push(imported);
            }
        }
    }
    reached
}

/// Returns the circles: the sets of two or more files of which each imports each other.
fn find_circles(imports: &Imports) -> Vec<BTreeSet<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (file.as_str(), reachable_files(imports, file))).collect();
    let mut found: Vec<BTreeSet<&str>> = Vec::new();
    for (file, others) in reached.iter().filter(|(file, others)| others.contains(**file)) {
        if !found.iter().any(|circle| circle.contains(file)) {
            found.push(others.iter().copied().filter(|other| reached[other].contains(file)).collect());
        }
    }
    found
}

/// Returns the imports among the top-level modules.
fn imports_of_modules(imports: &Imports) -> Imports {
    let module = |path: &str| top_module(path).unwrap_or_default().to_owned();
    let mut of_modules = Imports::new();
    for (file, imported) in imports {
        let of_module = of_modules.entry(module(file)).or_default();
        let targets = imported.iter().map(|(target, line)| (module(target), *line));
        of_module.extend(targets.filter(|(target, _)| *target != module(file)));
    }
    of_modules
}

/// Returns the listed circles, each with the full paths of its files.
fn listed_circles(listed: &[(&str, &str)]) -> Vec<BTreeSet<String>> {
    let files = |&(folder, names): &(&str, &str)| {
        names.split_whitespace().map(|name| format!("{folder}/{name}.rs")).collect()
    };
    listed.iter().map(files).collect()
}

/// Describes a circle that is not listed: its files, and all imports among them that begin or end at a file of no
/// listed circle.
fn describe_new_circle(circle: &BTreeSet<&str>, listed: &[BTreeSet<String>], imports: &Imports) -> String {
    let is_listed = |file: &str| listed.iter().any(|other| other.contains(file));
    let new: Vec<&str> = circle.iter().copied().filter(|file| !is_listed(file)).collect();
    let mut text = format!(
        "these files are in a circle of {} files: {}. Move a type to a file of its own. The imports are",
        circle.len(),
        if new.is_empty() { circle.iter().copied().collect() } else { new.clone() }.join(" ")
    );
    for file in circle {
        let inside = imports[*file].iter().filter(|(other, _)| circle.contains(other.as_str()));
        for (other, line) in
            inside.filter(|(other, _)| new.is_empty() || new.contains(file) || new.contains(&other.as_str()))
        {
            let _ = write!(text, "\n    {file}:{line} imports {other}");
        }
    }
    text
}

/// Compares the circles with the listed circles. Returns the circles that are new or have more files, and the listed
/// circles that no longer exist or have fewer files.
fn compare_with_list(imports: &Imports, listed: &[(&str, &str)]) -> Vec<String> {
    let found = find_circles(imports);
    let listed = listed_circles(listed);
    let is_same = |circle: &BTreeSet<&str>, other: &BTreeSet<String>| circle.iter().eq(other.iter());
    let is_part =
        |circle: &BTreeSet<&str>, other: &BTreeSet<String>| circle.iter().all(|file| other.contains(*file));
    let mut violations = Vec::new();
    for circle in found.iter().filter(|circle| !listed.iter().any(|other| is_part(circle, other))) {
        violations.push(describe_new_circle(circle, &listed, imports));
    }
    for other in listed.iter().filter(|other| !found.iter().any(|circle| is_same(circle, other))) {
        let left = found.iter().filter(|circle| is_part(circle, other));
        let left: Vec<String> = left.map(|circle| format!("{circle:?}")).collect();
        violations.push(format!(
            "the circle {other:?} has changed: remove it from CIRCLES in tests/tidy/circles.rs. Its parts that are \
             still circles: [{}]",
            left.join(", ")
        ));
    }
    violations
}

#[test]
fn no_circle_of_files_is_added() {
    let sources = all_sources();
    let imports = Modules::new(&sources).imports();
    let violations = compare_with_list(&imports, CIRCLES);
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
    let of_modules = imports_of_modules(&imports);
    let circles = find_circles(&of_modules);
    assert!(circles.is_empty(), "these modules import each other: {circles:?}, {of_modules:?}");
}

fn imports_of(files: &[(&str, &str)]) -> Imports {
    let sources: Vec<Source> =
        files.iter().map(|(name, text)| Source::new(&format!("src/{name}.rs"), text)).collect();
    Modules::new(&sources).imports()
}

#[test]
fn circles_are_found_in_every_form_of_import() {
    for (files, expected) in [
        // Two files that import each other.
        (&[("a/b", "use super::c::C;"), ("a/c", "use crate::a::b::B;")][..], 2),
        (&[("a/b", "use super::c::{C, D};"), ("a/c", "fn f(_: super::b::B) {}")], 2),
        (&[("a/b", "use super::c::C;"), ("a/c", "mod inner { use super::super::b::B; }")], 2),
        (&[("a/b", "use super::c::C;"), ("a/c", "// use super::b::B;\nconst A: &str = \"super::b::B\";")], 0),
        (&[("a/b", "use super::c::C;"), ("a/c", "#[cfg(test)]\nmod tests { use crate::a::b::B; }")], 0),
        (&[("a/b", "use super::c::C;"), ("a/c", "pub(in crate::a::b) struct C;")], 0),
        (&[("a/b", "use super::c::C;"), ("a/c", "use std::b::B; use b::B;")], 0),
        // A folder's own file and a file of the folder. The type is in the folder's own file.
        (&[("a/mod", "mod b; pub struct A; fn f() { b::g(); }"), ("a/b", "use super::A;")], 2),
        (&[("a", "mod b; use b::{B}; pub struct A;"), ("a/b", "use super::A;")], 2),
        (&[("a", "mod b; pub struct A;"), ("a/b", "use super::A;")], 0),
        // The type has moved to a file of its own. The folder's own file re-exports the type.
        (
            &[
                ("a/mod", "mod b; mod c; pub use c::{A}; pub use b::B;"),
                ("a/b", "use super::A;"),
                ("a/c", ""),
            ],
            0,
        ),
        (
            &[
                ("a/mod", "mod b; mod c; pub use self::c::A;"),
                ("a/b", "use crate::a::A;"),
                ("a/c", "use super::b;"),
            ],
            2,
        ),
        (
            &[
                ("lib", "pub use a::B; pub mod a;"),
                ("a", "pub use b::B;"),
                ("a/b", "use super::c::C;"),
                ("a/c", "use crate::B;"),
            ],
            2,
        ),
        // Longer circles, also through several folders.
        (&[("a/b", "use super::c;"), ("a/c", "use super::d::D;"), ("a/d", "use super::{b::B};")], 3),
        (&[("a/b", "use super::c;"), ("a/c", "use super::d::D;"), ("a/d", "use super::c::C;")], 2),
        (&[("a/b/c", "use crate::a::d::D;"), ("a/d", "use super::b;"), ("a/b/mod", "use c::C;")], 3),
        (&[("bin/b", "use super::c;"), ("bin/c", "use super::b;")], 0),
    ] {
        let imports = imports_of(files);
        let circles = find_circles(&imports);
        assert_eq!(circles.iter().map(BTreeSet::len).sum::<usize>(), expected, "{files:?}: {imports:?}");
    }
}

#[test]
fn new_larger_and_smaller_circles_are_reported() {
    let imports = imports_of(&[
        ("a/b", "use super::c;"),
        ("a/c", "use super::{b, d};"),
        ("a/d", "\nuse super::c;"),
        ("e/f", "use super::g;"),
        ("e/g", "use super::f;"),
    ]);
    let ef = ("src/e", "f g");
    for (listed, expected) in [
        (&[("src/a", "b c d"), ef][..], &[][..]),
        (&[("src/a", "b c d")], &["src/e/f.rs src/e/g.rs. "]),
        (&[("src/a", "b c"), ef], &["files: src/a/d.rs. ", "\"src/a/b.rs\", \"src/a/c.rs\"} has changed"]),
        (&[("src/a", "b c d f"), ef], &["src/a/f.rs\"} has changed"]),
        (&[("src/a", "b c d"), ef, ("src/h", "i j")], &["\"src/h/j.rs\"} has changed"]),
    ] {
        let violations = compare_with_list(&imports, listed);
        assert_eq!(violations.len(), expected.len(), "{listed:?}: {violations:?}");
        for (violation, words) in violations.iter().zip(expected) {
            assert!(violation.contains(words), "{violation} must contain {words}");
        }
    }
    let grown = &compare_with_list(&imports, &[("src/a", "b c"), ef])[0];
    assert!(grown.contains("src/a/d.rs:2 imports src/a/c.rs") && !grown.contains("src/a/b.rs:1"), "{grown}");
}

#[test]
fn modules_that_import_each_other_are_found() {
    let circles_of_modules =
        |files: &[(&str, &str)]| find_circles(&imports_of_modules(&imports_of(files))).len();
    assert_eq!(
        circles_of_modules(&[("a/b", "use crate::c::d;"), ("c/d", ""), ("c/e", "use crate::a::b;")]),
        1
    );
    assert_eq!(circles_of_modules(&[("a/b", "use crate::c::d;"), ("c/d", ""), ("c/e", "use super::d;")]), 0);
}
