//! Tests of arrays, IDX files, sparse rows, images and texts whose samples are divided over ranks. The ranks are threads of the
//! test.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ndarray::{ArrayView2, ArrayViewMut2, s};
use ringtrain::Group;
use ringtrain::train::data::{DataSource, Task, TextOptions};
use ringtrain::train::model::{
    BackwardPass, ForwardMode, GradientSink, Layer, ModelSpec, OwnModel, SavedForBackward,
};
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{Config, Recipe, Summary, TrainError, Validation, run};

use super::formats::png;
use super::library::{PrintedLines, config, train};
use super::shared_tables::FirstBatchRows;
use super::strategies::{assert_close, parse_strategy, train_and_compare};
use super::util::{ranks, runs_long_tests};

/// The number of samples. With the number of features of each format, the samples are too large for each rank to hold all of
/// them.
pub(crate) const SAMPLES: usize = 70;
/// The width and the height of the images.
const SIDE: usize = 64;
/// The number of columns of the array of floating-point numbers.
const COLUMNS: usize = 1000;

/// The number of tokens in a window of the text.
const CONTEXT: usize = 2000;

/// What [`Format::write`] writes.
#[derive(Clone, Copy)]
pub(crate) struct Content {
    pub(crate) samples: usize,
    /// Whether the last sample is damaged.
    pub(crate) is_damaged: bool,
}

pub(crate) struct Format {
    pub(crate) name: &'static str,
    /// Writes data to a directory. Returns the source.
    pub(crate) write: fn(&Path, Content) -> DataSource,
    task: Task,
    /// A part of the error about the damaged sample. Empty if every rank reads the sample.
    damage: &'static str,
    /// Part of a message for the user, which needs the samples of all ranks. May be empty.
    note: &'static str,
}

pub(crate) const GOOD: Content = Content { samples: SAMPLES, is_damaged: false };

pub(crate) const FORMATS: [Format; 7] = [
    Format {
        name: "IDX",
        write: |directory, content| write_idx(directory, content, false),
        task: Task::Classification,
        damage: "train-images-idx3-ubyte: is truncated",
        note: "",
    },
    Format {
        name: "compressed IDX",
        write: |directory, content| write_idx(directory, content, true),
        task: Task::Classification,
        damage: "train-images-idx3-ubyte.gz: is truncated",
        note: "",
    },
    Format {
        name: "images in .npy files",
        write: write_pixels,
        task: Task::Regression,
        damage: "x.npy: is truncated",
        note: "",
    },
    Format {
        name: "column-major .npy files",
        write: write_columns,
        task: Task::Regression,
        damage: "x.npy: row 69, column 999 (both counted from 0): NaN",
        note: "x.npy, column 0 (counted from 0): large numbers that differ little",
    },
    Format {
        name: "sparse rows",
        write: write_sparse,
        task: Task::Classification,
        damage: "rows.libsvm: line 71, character 3: `x` is not a feature",
        note: "the target holds 3 distinct integers in 70 rows",
    },
    Format {
        name: "folders of images",
        write: write_images,
        task: Task::Classification,
        damage: "169.png: is damaged",
        note: "",
    },
    Format {
        name: "text",
        write: write_text,
        task: Task::Text,
        damage: "",
        note: "characters for training, and then 28000 for testing; 5 tokens in the vocabulary",
    },
];

/// The formats that are read as another one of [`FORMATS`], except for a few lines.
const SIMILAR_FORMATS: [&str; 2] = ["compressed IDX", "images in .npy files"];

/// Returns a pixel of an image.
fn pixel(sample: usize, index: usize) -> u8 {
    ((sample * 131 + index * (37 + sample % 5)) % 251) as u8
}

fn pixels(samples: usize) -> Vec<u8> {
    (0..samples).flat_map(|sample| (0..SIDE * SIDE).map(move |index| pixel(sample, index))).collect()
}

fn labels(samples: usize) -> Vec<u8> {
    (0..samples).map(|sample| (sample % 3) as u8).collect()
}

fn write_idx(directory: &Path, content: Content, is_compressed: bool) -> DataSource {
    let header = |dimensions: u8, lengths: &[usize]| {
        let lengths = lengths.iter().flat_map(|&length| (length as u32).to_be_bytes());
        [0, 0, 8, dimensions].into_iter().chain(lengths).collect::<Vec<u8>>()
    };
    for (set, samples, is_damaged) in [("train", content.samples, content.is_damaged), ("t10k", 11, false)] {
        let mut images = [header(3, &[samples, SIDE, SIDE]), pixels(samples)].concat();
        images.truncate(images.len() - usize::from(is_damaged));
        let name = format!("{set}-images-idx3-ubyte");
        if is_compressed {
            let file = fs::File::create(directory.join(name + ".gz")).unwrap();
            let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
            encoder.write_all(&images).unwrap();
            encoder.finish().unwrap();
        } else {
            fs::write(directory.join(name), images).unwrap();
        }
        let labels = [header(1, &[samples]), labels(samples)].concat();
        fs::write(directory.join(format!("{set}-labels-idx1-ubyte")), labels).unwrap();
    }
    DataSource::Idx(directory.to_owned())
}

/// Writes an array in numpy's format.
fn write_npy(path: &Path, (descr, is_fortran): (&str, bool), shape: &str, elements: &[u8]) {
    let order = if is_fortran { "True" } else { "False" };
    let text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    let header = format!("{text:117}\n");
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    fs::write(path, [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), elements].concat()).unwrap();
}

fn write_pixels(directory: &Path, Content { samples, is_damaged }: Content) -> DataSource {
    let [x, y] = ["x.npy", "y.npy"].map(|name| directory.join(name));
    let mut elements = pixels(samples);
    elements.truncate(elements.len() - usize::from(is_damaged));
    write_npy(&x, ("|u1", false), &format!("({samples}, {SIDE}, {SIDE})"), &elements);
    let targets: Vec<u8> = (0..samples).map(|sample| (sample * 57 % 199) as u8).collect();
    write_npy(&y, ("|u1", false), &format!("({samples},)"), &targets);
    DataSource::Npy(x, y)
}

fn write_columns(directory: &Path, Content { samples, is_damaged }: Content) -> DataSource {
    let [x, y] = ["x.npy", "y.npy"].map(|name| directory.join(name));
    let value = |row: usize, column: usize| match column {
        0 => 1.7e9 + (row / 30) as f64,
        _ if is_damaged && (row, column) == (samples - 1, COLUMNS - 1) => f64::NAN,
        _ => ((row * 131 + column * (31 + row % 7)) % 997) as f64 / 7.0,
    };
    let elements = (0..COLUMNS).flat_map(|column| (0..samples).map(move |row| (row, column)));
    let elements: Vec<u8> = elements.flat_map(|(row, column)| value(row, column).to_le_bytes()).collect();
    write_npy(&x, ("<f8", true), &format!("({samples}, {COLUMNS})"), &elements);
    let targets: Vec<u8> = (0..samples).map(|row| (row * 57 % 199) as u8).collect();
    write_npy(&y, ("|u1", false), &format!("({samples}, 1)"), &targets);
    DataSource::Npy(x, y)
}

fn write_sparse(directory: &Path, Content { samples, is_damaged }: Content) -> DataSource {
    let mut text = "# rows\n".to_owned();
    for row in 0..samples {
        write!(text, "{}", row % 3).unwrap();
        if is_damaged && row == samples - 1 {
            text.push_str(" x");
        }
        // The last row has the largest index.
        for position in 0..500 {
            write!(text, " {}:{}", 8 * position + row / 10 + 1, pixel(row, position)).unwrap();
        }
        text.push('\n');
    }
    let path = directory.join("rows.libsvm");
    fs::write(&path, text).unwrap();
    DataSource::Libsvm(path)
}

/// Only the last image has colours.
fn write_images(directory: &Path, Content { samples, is_damaged }: Content) -> DataSource {
    for sample in 0..samples {
        let class = directory.join(if sample < samples / 2 { "dark" } else { "light" });
        fs::create_dir_all(&class).unwrap();
        let grey = (sample * 2 + 100 * (sample % 2)) as u8;
        let is_last = sample == samples - 1;
        let channels = [grey, grey / 2, grey / 3];
        let mut image = png(40, 40, &channels[..if is_last { 3 } else { 1 }]);
        if is_last && is_damaged {
            image.truncate(image.len() / 2);
        }
        fs::write(class.join(format!("{}.png", 100 + sample)), image).unwrap();
    }
    DataSource::Images(directory.to_owned())
}

/// A line for each window.
fn write_text(directory: &Path, Content { samples, .. }: Content) -> DataSource {
    let letter = |line: usize, index: usize| b'a' + pixel(line, index) % 4;
    let line = |line| (1..CONTEXT).map(move |index| letter(line, index)).chain([b'\n']);
    let text: Vec<u8> = (0..samples).flat_map(line).collect();
    let path = directory.join("a.txt");
    fs::write(&path, text).unwrap();
    DataSource::Text(vec![path])
}

/// Predicts the next token from the last token alone. Entry (i, j) of the parameters is the output for token j after token i.
#[derive(Debug)]
struct Bigrams {
    tokens: usize,
}

impl Layer for Bigrams {
    fn inputs(&self) -> usize {
        CONTEXT
    }

    fn outputs(&self) -> usize {
        CONTEXT * self.tokens
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        vec![("outputs".into(), vec![self.tokens, self.tokens])]
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        parameters.fill_with(uniform);
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        _: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) -> Result<(), String> {
        for (window, mut output) in input.rows().into_iter().zip(output.rows_mut()) {
            for (&token, mut output) in window.iter().zip(output.exact_chunks_mut(self.tokens)) {
                let start = token as usize * self.tokens;
                let outputs = &parameters[start..start + self.tokens];
                output.iter_mut().zip(outputs).for_each(|(to, &from)| *to = from);
            }
        }
        Ok(())
    }

    fn backward(
        &self,
        _: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        gradients.add_gradients(pass.input.nrows(), |rows, gradients| {
            let (input, delta) = (pass.input.slice(s![rows.clone(), ..]), pass.delta.slice(s![rows, ..]));
            for (&token, delta) in input.iter().zip(delta.exact_chunks((1, self.tokens))) {
                let start = token as usize * self.tokens;
                let sums = &mut gradients[start..start + self.tokens];
                sums.iter_mut().zip(delta).for_each(|(sum, value)| *sum += value);
            }
        });
        Ok(())
    }
}

pub(crate) fn config_of(format: &Format, source: DataSource) -> Config {
    let bigrams = |_, outputs| Ok(vec![Arc::new(Bigrams { tokens: outputs / CONTEXT }) as Arc<dyn Layer>]);
    let model = match format.task {
        Task::Regression => "linear".parse().unwrap(),
        Task::Classification => "mlp:8".parse().unwrap(),
        Task::Text => ModelSpec::Own(OwnModel::new("bigrams", bigrams)),
    };
    let task = Some(Task::Regression).filter(|&task| task == format.task);
    let text = TextOptions { context: CONTEXT, ..TextOptions::default() };
    Config { source, model: Some(model), task, text, epochs: Some(1), ..config() }
}

/// Runs on `n` ranks. `sources` holds the source of each rank. Returns the result and the messages of each rank.
fn run_on_ranks(
    sources: Vec<DataSource>,
    config: &Config,
) -> Vec<(Result<Summary, TrainError>, Vec<String>)> {
    let config = config.clone();
    ranks::run(sources.len() as u32, move |mut group: Group| {
        let config = Config { source: sources[group.rank().index()].clone(), ..config.clone() };
        let mut lines = PrintedLines(Vec::new());
        (run(&mut group, &config, &AtomicBool::new(false), &mut lines), lines.0)
    })
}

/// With one sample in each batch, all ranks except one have a gradient of 0, so the sum of the gradients is exact. If
/// the order of the samples and the statistics are the same, each number of ranks gives the same bits. The samples have less
/// than a block of the shuffle in blocks, so with `--stream` their order is the same.
#[test]
fn each_number_of_ranks_computes_the_same_parameters_also_from_temporary_files() {
    // `each_rank_holds_only_a_part_of_the_samples` also reads the formats that the short tests leave out here.
    for format in FORMATS.iter().filter(|format| runs_long_tests() || !SIMILAR_FORMATS.contains(&format.name))
    {
        let directory = tempfile::tempdir().unwrap();
        let source = (format.write)(directory.path(), GOOD);
        let recipe =
            Recipe { validation: Some(Validation { fraction: 0.1, patience: None }), ..Recipe::default() };
        let config = Config {
            learning_rate: Some(1e-5),
            rule: Some(Rule::Sgd),
            batch_size: Some(1),
            recipe,
            ..config_of(format, source.clone())
        };
        let mut lines = PrintedLines(Vec::new());
        let alone = run(&mut Group::solo(), &config, &AtomicBool::new(false), &mut lines).unwrap();
        let is_about_data = |line: &&String| !format.note.is_empty() && line.contains(format.note);
        let notes: Vec<&String> = lines.0.iter().filter(is_about_data).collect();
        assert_eq!(notes.len(), usize::from(!format.note.is_empty()), "{}: {:?}", format.name, lines.0);
        let stream_directory = tempfile::tempdir().unwrap();
        let short: &[(usize, bool, &str)] = &[(3, true, "allreduce")];
        let more: &[(usize, bool, &str)] = &[
            (2, true, "ps-sync"),
            (2, false, "allreduce"),
            (3, false, "allreduce"),
            (1, true, "allreduce"),
            (5, false, "allreduce"),
            (2, true, "allreduce"),
            (5, true, "allreduce"),
            (3, true, "ps-sync"),
        ];
        // The short tests read one format on a parameter server.
        let some = if format.name == "IDX" { &more[..1] } else { &[] };
        for &(n, is_streamed, strategy) in short.iter().chain(if runs_long_tests() { more } else { some }) {
            let stream_directory = is_streamed.then(|| stream_directory.path().to_owned());
            let config = Config { stream_directory, strategy: parse_strategy(strategy), ..config.clone() };
            for (summary, lines) in run_on_ranks(vec![source.clone(); n], &config) {
                let summary = summary.unwrap();
                assert_eq!(
                    summary.parameters, alone.parameters,
                    "{} on {n} ranks, {is_streamed}, {strategy}",
                    format.name
                );
                assert_eq!(summary.report.train_samples, alone.report.train_samples);
                assert_eq!(lines.iter().filter(is_about_data).collect::<Vec<_>>(), notes, "{n} ranks");
            }
        }
    }
}

/// If a batch has all samples, each rank processes the samples that it holds. With `tensor` and `ps-sync`, the ranks gather all
/// samples.
#[test]
#[ignore = "runs with tools/test --full"]
fn each_rank_holds_only_a_part_of_the_samples() {
    for format in &FORMATS {
        let directory = tempfile::tempdir().unwrap();
        let source = (format.write)(directory.path(), GOOD);
        let config = Config {
            rule: Some(Rule::Sgd),
            learning_rate: Some(0.01),
            batch_size: Some(SAMPLES),
            ..config_of(format, source)
        };
        let alone = train(&config).unwrap();
        let is_tested_here = runs_long_tests() || !SIMILAR_FORMATS.contains(&format.name);
        if format.task != Task::Regression && is_tested_here {
            let strategy = if format.task == Task::Text { "ps-sync" } else { "tensor" };
            let config = Config { strategy: parse_strategy(strategy), ..config.clone() };
            let found = train_and_compare(2, &config);
            assert_close(&found.parameters, &alone.parameters, format.name);
        }
        let results = ranks::run(3, move |mut group: Group| {
            let mut recorder = FirstBatchRows(Vec::new());
            let summary = run(&mut group, &config, &AtomicBool::new(false), &mut recorder).unwrap();
            (summary, recorder.0)
        });
        let mut rows = Vec::new();
        for (summary, held) in results {
            assert_close(&summary.parameters, &alone.parameters, format.name);
            // The ranks divide the bytes of sparse rows, and the number of samples of all other formats.
            assert!(held.len() <= SAMPLES.div_ceil(3) + 2, "{}: {} samples", format.name, held.len());
            rows.extend(held);
        }
        // The parts of the ranks follow each other.
        assert!(rows.into_iter().eq(0..alone.report.train_samples as u32), "{}", format.name);
    }
}

/// Only the last rank reads the damaged sample.
#[test]
fn all_ranks_name_a_damaged_sample() {
    for format in FORMATS.iter().filter(|format| !format.damage.is_empty()) {
        let directory = tempfile::tempdir().unwrap();
        let source = (format.write)(directory.path(), Content { is_damaged: true, ..GOOD });
        let stream_directory = tempfile::tempdir().unwrap();
        for stream_directory in [None, Some(stream_directory.path().to_owned())] {
            let config = Config { stream_directory, ..config_of(format, source.clone()) };
            for (index, (result, _)) in run_on_ranks(vec![source.clone(); 3], &config).into_iter().enumerate()
            {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(format.damage), "{}: {error} / {}", format.name, format.damage);
                assert_eq!(error.starts_with("rank 2"), index != 2, "{error}");
            }
        }
    }
}

/// The files of rank 1 have the same names and shapes as those of rank 0. A byte of one file differs, or an image has one byte
/// more. The files are short, so the ranks hash all their bytes.
#[test]
fn ranks_with_different_content_of_the_same_shape_end_with_an_error() {
    for (format, file, position, named) in [
        (&FORMATS[0], "train-images-idx3-ubyte", Some(9000), "train-images-idx3-ubyte"),
        (&FORMATS[1], "t10k-labels-idx1-ubyte", Some(10), "t10k-labels-idx1-ubyte"),
        (&FORMATS[2], "x.npy", Some(9000), "x.npy"),
        (&FORMATS[3], "y.npy", Some(130), "y.npy"),
        (&FORMATS[4], "rows.libsvm", Some(2), "rows.libsvm"),
        (&FORMATS[5], "light/105.png", None, ""),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let sources = ["one", "other"].map(|name| {
            let place: PathBuf = directory.path().join(name);
            fs::create_dir(&place).unwrap();
            (format.write)(&place, Content { samples: 6, is_damaged: false })
        });
        let path = directory.path().join("other").join(file);
        let mut content = fs::read(&path).unwrap();
        match position {
            Some(position) => content[position] ^= 1,
            None => content.push(0),
        }
        fs::write(&path, content).unwrap();
        let [first, last] = sources;
        let config = config_of(format, first.clone());
        for (rank, (result, _)) in run_on_ranks(vec![first, last], &config).into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            let own_path = directory.path().join(["one", "other"][rank]).join(named);
            assert!(error.starts_with("rank 1 on ") && error.contains(" and rank 0 on "), "{error}");
            let own_path = own_path.to_str().unwrap().trim_end_matches('/');
            assert!(error.contains(&format!("different data from {own_path};")), "{error}");
        }
    }
}

#[test]
fn ranks_with_different_files_end_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let write = |place: &str, format: &Format, samples| {
        let place = directory.path().join(place);
        fs::create_dir(&place).unwrap();
        (format.write)(&place, Content { samples, is_damaged: false })
    };
    let formats = &FORMATS;
    let of_same_format = formats.iter().map(|format| (format, format, SAMPLES + 1));
    // Arrays have two files, and sparse rows have one.
    let of_other_format = [(&formats[2], &formats[4], SAMPLES), (&formats[4], &formats[2], SAMPLES)];
    for (case, (format, last_format, samples)) in of_same_format.chain(of_other_format).enumerate() {
        let first = write(&format!("first {case}"), format, SAMPLES);
        let last = write(&format!("last {case}"), last_format, samples);
        let config = config_of(format, first.clone());
        for (result, _) in run_on_ranks(vec![first.clone(), first, last], &config) {
            let error = result.unwrap_err();
            let is_expected = matches!(&error, TrainError::DataDiffer { rank, .. } if rank.get() == 2);
            assert!(is_expected, "{}, {}: {error}", format.name, last_format.name);
        }
    }
}
