//! Tests of data in other formats than tables, with the program `ringtrain`.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use serde_json::Value;

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

/// Returns a grey image in the PNG format, which has the same value in all pixels.
fn grey_png(width: u32, height: u32, value: u8) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let body = [kind.as_slice(), data].concat();
        let checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, &body) as u32;
        [&(data.len() as u32).to_be_bytes()[..], &body, &checksum.to_be_bytes()].concat()
    };
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 0, 0, 0, 0]].concat();
    let rows: Vec<u8> =
        (0..height).flat_map(|_| std::iter::once(0).chain((0..width).map(|_| value))).collect();
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&rows).unwrap();
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
        write(&format!("train/dark/{index}.png"), grey_png(4, 3, 2 * index));
        write(&format!("train/light/{index}.png"), grey_png(4, 3, 255 - 3 * index));
    }
    ringtrain_stdout(place, "--data train --model mlp:4 --epochs 30 --batch-size 8 --lr 0.05 --save-model m");
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data train --json"));
    assert_eq!((&evaluation["rows"], &evaluation["accuracy"]), (&40.into(), &1.0.into()));
    let inspection = read_json(&ringtrain_stdout(place, "inspect m --json"));
    assert_eq!(inspection["description"]["classes"], serde_json::json!(["dark", "light"]));
    assert_eq!(inspection["description"]["pixel_divisor"], 255.0);

    write("new/a.png", grey_png(4, 3, 250));
    write("new/b.png", grey_png(4, 3, 5));
    for data in ["new", "new --format images"] {
        let text = ringtrain_stdout(place, &format!("predict --model m --data {data}"));
        let classes: Vec<&str> = text.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
        assert_eq!(classes, ["light", "dark"]);
    }
    write("large/a.png", grey_png(5, 3, 9));
    write("classes/dark/a.png", grey_png(4, 3, 9));
    write("classes/red/a.png", grey_png(4, 3, 9));
    for (line, expected) in [
        ("predict --model m --data large", "large/a.png: has 5 x 3 pixels, but the model has 12 inputs"),
        ("eval --model m --data new", "new/a.png: the image is not in the folder of a class"),
        ("eval --model m --data classes", "classes/red/a.png: the class `red` did not occur in training"),
        ("--data new", "new: holds images that are not in the folder of a class"),
    ] {
        assert_fails(place, line, 4, expected);
    }
}
