//! Tests of data in other formats than tables, with the program `ringtrain`.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use serde_json::Value;

use super::cnn::write_array;
use super::program::{assert_fails, ringtrain_stdout};

fn read_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn read_hash(report: &Path) -> Value {
    read_json(&fs::read_to_string(report).unwrap())["parameters_hash"].clone()
}

/// Sparse rows and a table of the same numbers must give the same model, bit for bit.
#[test]
fn sparse_rows_give_the_same_model_as_a_table() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let (mut table, mut sparse) = ("a,b,c,kind\n".to_owned(), String::new());
    for row in 0..60_u32 {
        let kind = row % 3;
        let cells = [row * 7 % 10 + 4 * kind, if row % 4 == 0 { row % 5 } else { 0 }, 2 * (kind % 2)];
        writeln!(table, "{},{},{},{kind}", cells[0], cells[1], cells[2]).unwrap();
        write!(sparse, "{kind}").unwrap();
        for (index, cell) in cells.iter().enumerate().filter(|(_, cell)| **cell > 0) {
            write!(sparse, " {}:{cell}", index + 1).unwrap();
        }
        sparse.push('\n');
    }
    let write = |name: &str, text: &str| fs::write(place.join(name), text).unwrap();
    write("rows.csv", &table);
    write("rows.libsvm", &sparse);
    write("rows", &sparse);
    let options = "--model mlp:4 --epochs 2 --report r.json --save-model";
    ringtrain_stdout(place, &format!("--data rows.csv --target kind {options} table.model"));
    let hash = read_hash(&place.join("r.json"));
    for data in ["rows.libsvm", "rows --format libsvm"] {
        let printed = ringtrain_stdout(place, &format!("--data {data} {options} m"));
        assert!(printed.contains("3 distinct integers in 60 rows: treated as classes"), "{printed}");
        assert_eq!(read_hash(&place.join("r.json")), hash);
    }
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data rows.libsvm --json"));
    let expected = read_json(&ringtrain_stdout(place, "eval --model table.model --data rows.csv --json"));
    assert_eq!(evaluation, expected);

    // `predict` ignores the targets. The last features may be missing in all rows, because they are 0.
    write("new.libsvm", "0 1:7\n0 1:9 2:1\n");
    write("new.csv", "a,b,c\n7,0,0\n9,1,0\n");
    let predictions = ringtrain_stdout(place, "predict --model m --data new.libsvm");
    assert_eq!(predictions, ringtrain_stdout(place, "predict --model table.model --data new.csv"));
    write("wide.libsvm", "0 1:7 4:1\n");
    write("class.libsvm", "0 1:7\n# comment\n9 1:7\n");
    for (line, expected) in [
        (
            "predict --model m --data wide.libsvm",
            "wide.libsvm has the index 4, but the model was trained on 3",
        ),
        (
            "eval --model m --data class.libsvm",
            "class.libsvm: line 3: the class `9` did not occur in training",
        ),
        ("predict --model m --data absent.libsvm", "cannot read absent.libsvm"),
        ("--data rows.csv --format libsvm", "rows.csv: line 1, character 1: the target `a,b,c,kind`"),
    ] {
        assert_fails(place, line, 4, expected);
    }
}

/// Returns an image in the PNG format, which has the same channels in all pixels: one channel (grey) or three (colour).
pub(crate) fn png(width: u32, height: u32, channels: &[u8]) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let body = [kind.as_slice(), data].concat();
        let checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, &body) as u32;
        [&(data.len() as u32).to_be_bytes()[..], &body, &checksum.to_be_bytes()].concat()
    };
    let colour_type = if channels.len() == 1 { 0 } else { 2 };
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, colour_type, 0, 0, 0]].concat();
    let row = [&[0], &channels.repeat(width as usize)[..]].concat();
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&row.repeat(height as usize)).unwrap();
    let data = encoder.finish().unwrap();
    let parts = [chunk(b"IHDR", &header), chunk(b"IDAT", &data), chunk(b"IEND", &[])];
    [&b"\x89PNG\r\n\x1a\n"[..], &parts.concat()].concat()
}

#[test]
fn images_in_folders_of_classes_are_learned_and_predicted() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let write = |name: &str, bytes: Vec<u8>| {
        let path = place.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    for index in 0..20_u8 {
        write(&format!("train/dark/{index}.png"), png(4, 3, &[2 * index]));
        write(&format!("train/light/{index}.png"), png(4, 3, &[255 - 3 * index]));
    }
    ringtrain_stdout(place, "--data train --model mlp:4 --epochs 30 --batch-size 8 --lr 0.05 --save-model m");
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data train --json"));
    assert_eq!((&evaluation["rows"], &evaluation["accuracy"]), (&40.into(), &1.0.into()));
    let inspection = read_json(&ringtrain_stdout(place, "inspect m --json"));
    assert_eq!(inspection["description"]["classes"], serde_json::json!(["dark", "light"]));
    assert_eq!(inspection["description"]["pixel_divisor"], 255.0);

    write("new/a.png", png(4, 3, &[250]));
    write("new/b.png", png(4, 3, &[5]));
    for data in ["new", "new --format images"] {
        let text = ringtrain_stdout(place, &format!("predict --model m --data {data}"));
        let classes: Vec<&str> = text.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
        assert_eq!(classes, ["light", "dark"]);
    }
    write("large/a.png", png(5, 3, &[9]));
    write("classes/dark/a.png", png(4, 3, &[9]));
    write("classes/red/a.png", png(4, 3, &[9]));
    for (line, expected) in [
        ("predict --model m --data large", "large/a.png: has 5 x 3 pixels, but the model has 12 inputs"),
        ("eval --model m --data new", "new/a.png: the image is not in the folder of a class"),
        ("eval --model m --data classes", "classes/red/a.png: the class `red` did not occur in training"),
        ("--data new", "new: holds images that are not in the folder of a class"),
    ] {
        assert_fails(place, line, 4, expected);
    }
}

/// Writes a `.npz` file. Each array has a name, and the content of a `.npy` file in `directory`.
fn write_npz(directory: &Path, name: &str, arrays: &[(&str, &str)]) {
    let mut writer = zip::ZipWriter::new(fs::File::create(directory.join(name)).unwrap());
    for (array, file) in arrays {
        let options = zip::write::SimpleFileOptions::default();
        let options = options.compression_method(zip::CompressionMethod::Stored);
        writer.start_file(format!("{array}.npy"), options).unwrap();
        writer.write_all(&fs::read(directory.join(file)).unwrap()).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes arrays to `.npy` files, and the same arrays to `.npz` files. `sets.npz` has a training set and a test set.
fn write_arrays(place: &Path) {
    let write = |name: &str, rows: usize, columns: usize, seed: usize| {
        let cells: Vec<u8> = (0..rows * columns).map(|cell| ((cell * 37 + seed) % 101) as u8).collect();
        write_array(&place.join(format!("{name}.npy")), &[rows, columns], &cells);
        let classes: Vec<u8> = cells.chunks(columns).map(|row| row[0] % 3).collect();
        write_array(&place.join(format!("{name}-classes.npy")), &[rows], &classes);
    };
    write("a", 60, 3, 0);
    write("b", 30, 3, 50);
    write("wide", 30, 4, 50);
    write_npz(place, "d.npz", &[("X", "a.npy"), ("y", "a-classes.npy")]);
    write_npz(place, "wide.npz", &[("x", "wide.npy"), ("y", "wide-classes.npy")]);
    write_npz(place, "odd.npz", &[("a", "a.npy"), ("b", "a-classes.npy")]);
    write_npz(place, "features.npz", &[("x", "b.npy")]);
    let sets = [
        ("x_train", "a.npy"),
        ("y_train", "a-classes.npy"),
        ("x_test", "b.npy"),
        ("y_test", "b-classes.npy"),
    ];
    write_npz(place, "sets.npz", &[&sets[..], &[("names", "b.npy")]].concat());
}

#[test]
fn npz_files_give_the_same_results_as_pairs_of_npy_files() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_arrays(place);
    let train = |data: &str| {
        let options = "--model mlp:4 --epochs 2 --report r.json --save-model m";
        let printed = ringtrain_stdout(place, &format!("--data {data} {options}"));
        let report = read_json(&fs::read_to_string(place.join("r.json")).unwrap());
        ((report["parameters_hash"].clone(), report["test_loss"].clone()), printed)
    };
    let (expected, _) = train("a.npy,a-classes.npy");
    for data in ["d.npz", "d.npz/X.npy,d.npz/y.npy", "odd.npz/a.npy,odd.npz/b.npy"] {
        assert_eq!(train(data).0, expected, "{data}");
    }
    let (expected, _) = train("a.npy,a-classes.npy --test-data b.npy,b-classes.npy");
    let (found, _) = train("d.npz --test-data sets.npz");
    assert_eq!(found, expected);
    let (found, printed) = train("sets.npz");
    assert_eq!(found, expected);
    assert!(printed.contains("sets.npz: ignored the arrays names"), "{printed}");
    for (npz, npy) in [
        ("predict --model m --data sets.npz", "predict --model m --data b.npy"),
        ("predict --model m --data features.npz", "predict --model m --data b.npy"),
        ("eval --model m --data sets.npz", "eval --model m --data b.npy,b-classes.npy"),
        ("eval --model m --data d.npz", "eval --model m --data a.npy,a-classes.npy"),
    ] {
        assert_eq!(ringtrain_stdout(place, npz), ringtrain_stdout(place, npy), "{npz}");
    }
}

#[test]
fn npz_files_with_other_arrays_are_refused_and_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_arrays(place);
    ringtrain_stdout(place, "--data d.npz --model softmax --epochs 1 --save-model m");
    for (line, code, expected) in [
        ("--data sets.npz --test-data d.npz", 2, "--test-data does not apply: sets.npz has its own test set"),
        (
            "--data sets.npz --test-fraction 0.1",
            2,
            "--test-fraction does not apply: sets.npz has its own test set",
        ),
        ("--data d.npz --report d.npz", 2, "--report would replace d.npz, which --data of this run uses"),
        (
            "--data d.npz --test-data odd.npz/a.npy,odd.npz/b.npy --report odd.npz",
            2,
            "which --test-data of this run uses",
        ),
        (
            "predict --model m --data d.npz/X.npy --output d.npz",
            2,
            "--output would replace d.npz, which --data uses",
        ),
        (
            "--data odd.npz",
            4,
            "odd.npz: holds the arrays a, b; ringtrain needs two arrays with the names x and y",
        ),
        ("--data features.npz", 4, "features.npz: holds the arrays x; ringtrain needs"),
        ("eval --model m --data features.npz", 4, "features.npz/x.npy: has no targets"),
        (
            "--data d.npz --test-data wide.npz",
            4,
            "the test set wide.npz has 4 features, but --data d.npz has 3 features",
        ),
    ] {
        assert_fails(place, line, code, expected);
    }
}
