"""Tests of `ringtrain.load_model`: a loaded model predicts the same values as the program `ringtrain predict`."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ringtrain._encoding import encode_column
from tables import ringtrain, save

ROWS = 300
NAMES = ["width", "length", "constant", "weight"]


def make_table() -> np.ndarray:
    random = np.random.default_rng(3)
    return random.normal([0.0, 5.0, 2.5, -300.0], [1.0, 0.1, 0.0, 40.0], (ROWS, 4))


def make_targets(task: str, x: np.ndarray) -> list:
    size = x[:, 0] + 10 * (x[:, 1] - 5) + (x[:, 3] + 300) / 40
    return list(size * 7 + 100) if task == "regression" else [["small", "medium", "large"][k] for k in np.digitize(size, [-1, 1])]


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trains a model of each kind. Returns the paths of the model files by the names of the models."""
    folder = tmp_path_factory.mktemp("models")
    x = make_table()
    paths = {}
    for model, task in [
        ("softmax", "classification"),
        ("mlp:8,5", "classification"),
        ("linear", "regression"),
        ("mlp:6,batchnorm,dropout0.1,4", "regression"),
    ]:
        columns = dict(zip(NAMES, x.T.tolist(), strict=True)) | {"y": make_targets(task, x)}
        data = save(folder / f"{task}.csv", columns)
        paths[f"{model} {task}"] = folder / f"{model}-{task}"
        options = ["--model", model, "--task", task, "--epochs", 3, "--save-model", paths[f"{model} {task}"]]
        ringtrain("--data", data, "--target", "y", *options)
    paths["pixels"] = folder / "pixels"
    ringtrain("--data", "digits", "--epochs", 1, "--model", "mlp:16", "--save-model", paths["pixels"])
    for name, layers in [
        ("cnn", "cnn:conv2x3,pool2,dropout0.5,conv3x1,pool3,dense4"),
        ("batchnorm", "cnn:conv2x3,batchnorm,pool2,dense4,batchnorm,dropout0.5"),
    ]:
        paths[name] = folder / name
        options = ["--epochs", 1, "--batch-size", 500, "--test-fraction", 0.5, "--save-model", paths[name]]
        ringtrain("--data", "digits", "--model", layers, *options)
    return paths


@pytest.mark.parametrize(
    "name", ["softmax classification", "mlp:8,5 classification", "linear regression", "mlp:6,batchnorm,dropout0.1,4 regression"]
)
def test_predictions_equal_those_of_the_program(saved_models: dict[str, Path], tmp_path: Path, name: str):
    x = make_table()[::-1] * 1.5
    data = save(tmp_path / "new.csv", dict(zip(NAMES, x.T.tolist(), strict=True)))
    rows = list(csv.reader(ringtrain("predict", "--model", saved_models[name], "--data", data).splitlines()))
    model = ring.load_model(saved_models[name])
    assert model.columns == NAMES
    if model.task == "regression":
        expected = np.array([float(row[0]) for row in rows[1:]])
        assert np.abs(model.predict(x) - expected).max() < 1e-6 * np.abs(expected).max()
        with pytest.raises(ring.InvalidArgument, match="call predict"):
            model.predict_proba(x)
    else:
        assert rows[0][1:] == [f"probability_{name}" for name in model.classes]
        probabilities = model.predict_proba(x)
        assert np.abs(probabilities - np.array([row[1:] for row in rows[1:]], dtype=float)).max() < 1e-6
        assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-12)
        assert model.predict(x).tolist() == [row[0] for row in rows[1:]]
    assert json.loads(ringtrain("inspect", saved_models[name], "--json"))["description"] == model.description


def test_pixels_are_divided_as_in_training(saved_models: dict[str, Path], tmp_path: Path):
    pixels = np.random.default_rng(5).integers(0, 17, (40, 64)).astype(np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    ringtrain("predict", "--model", saved_models["pixels"], "--data", tmp_path / "x.npy", "--output", tmp_path / "out.npy")
    expected = np.load(tmp_path / "out.npy")
    assert (expected.shape, expected.dtype) == ((40, 10), np.float32)
    model = ring.load_model(str(saved_models["pixels"]))
    assert np.abs(model.predict_proba(pixels) - expected).max() < 1e-6
    assert model.predict(pixels).tolist() == model.classes[expected.argmax(axis=1)].tolist()


def test_the_program_reads_the_arrays_that_numpy_writes(saved_models: dict[str, Path], tmp_path: Path):
    pixels = np.random.default_rng(6).integers(0, 17, (40, 64)).astype(np.uint8)

    def predict(data: Path) -> np.ndarray:
        ringtrain("predict", "--model", saved_models["pixels"], "--data", data, "--output", tmp_path / "out.npy")
        return np.load(tmp_path / "out.npy")

    np.save(tmp_path / "x.npy", pixels)
    expected = predict(tmp_path / "x.npy")
    for dtype in ["i1", "<i2", ">u2", "<i4", ">u4", "<i8", ">u8", "<f2", ">f2", ">f4", "<f8"]:
        np.savez(tmp_path / "stored.npz", x=pixels.astype(dtype))
        assert (predict(tmp_path / "stored.npz") == expected).all(), dtype
    np.savez_compressed(tmp_path / "packed.npz", X_test=np.asfortranarray(pixels), x_train=pixels[:9], other=pixels)
    assert (predict(tmp_path / "packed.npz") == expected).all()
    np.save(tmp_path / "bool.npy", pixels > 8)
    np.save(tmp_path / "byte.npy", (pixels > 8).astype(np.uint8))
    assert (predict(tmp_path / "bool.npy") == predict(tmp_path / "byte.npy")).all()


@pytest.mark.parametrize("name", ["cnn", "batchnorm"])
def test_a_cnn_predicts_the_same_as_the_program_from_images_and_from_rows(
    saved_models: dict[str, Path], tmp_path: Path, name: str
):
    pixels = np.random.default_rng(5).integers(0, 17, (40, 64)).astype(np.uint8)
    np.save(tmp_path / "x.npy", pixels.reshape(40, 8, 8))
    ringtrain("predict", "--model", saved_models[name], "--data", tmp_path / "x.npy", "--output", tmp_path / "out.npy")
    expected = np.load(tmp_path / "out.npy")
    model = ring.load_model(saved_models[name])
    for x in (pixels, pixels.reshape(40, 8, 8), pixels.reshape(40, 1, 8, 8)):
        assert np.abs(model.predict_proba(x) - expected).max() < 1e-6
    with pytest.raises(ring.InvalidArgument, match=r"the model needs the shape \(1, 8, 8\)"):
        model.predict(pixels.reshape(40, 4, 16))


def test_columns_of_tables_are_found_by_name(saved_models: dict[str, Path]):
    model = ring.load_model(saved_models["softmax classification"])
    x = make_table()
    by_name = {"other": ["text"] * ROWS} | {name: x[:, NAMES.index(name)] for name in reversed(NAMES)}
    assert (model.predict_proba(by_name) == model.predict_proba(x)).all()
    structured = np.array([tuple(row) for row in x], dtype=[(name, np.float64) for name in NAMES])
    assert (model.predict_proba(structured) == model.predict_proba(x)).all()
    with pytest.raises(ring.InvalidArgument, match="no column width, which the model needs"):
        model.predict({name: x[:, 0] for name in NAMES[1:]})
    assert model.predict(x[:0]).shape == (0,)
    assert model.predict_proba(x[:0]).shape == (0, 3)


def test_texts_and_missing_values_are_encoded_as_by_the_program(tmp_path: Path):
    count = 120
    columns = {
        "size": ["NA" if row % 10 == 0 else row * 7 % 20 for row in range(count)],
        "colour": [["red", "green", "null"][row % 3] for row in range(count)],
        "street": [row % 8 for row in range(count)],
        "price": [3 * (row * 7 % 20) + row % 3 for row in range(count)],
    }
    data = save(tmp_path / "table.csv", columns)
    options = ["--missing", "indicator", "--categorical", "street", "--max-categories", 5, "--model", "mlp:4", "--epochs", 3]
    ringtrain("--data", data, "--target", "price", "--task", "regression", "--save-model", tmp_path / "model", *options)
    new = {name: columns[name] for name in ("street", "colour", "size")}
    new["colour"][1:3] = [" blue ", "Nan"]
    printed = ringtrain("predict", "--model", tmp_path / "model", "--data", save(tmp_path / "new.csv", new))
    expected = np.array(printed.splitlines()[1:], dtype=float)
    model = ring.load_model(tmp_path / "model")
    table = new | {"size": np.array([np.nan if size == "NA" else size for size in new["size"]])}
    assert np.abs(model.predict(table) - expected).max() < 1e-6 * np.abs(expected).max()
    rows = np.array([table["size"], np.array(new["colour"], dtype=object), np.array(new["street"], dtype=object)], dtype=object).T
    assert (model.predict(rows) == model.predict(table)).all()
    # Regression test: before the fix, bytes were converted to texts such as "b'3'", and the mask of a masked array was ignored.
    texts = {name: np.array([str(value).encode() for value in new[name]]) for name in ("street", "colour")}
    assert (model.predict(table | texts) == model.predict(table)).all()
    is_missing = np.isnan(table["size"])
    masked = table | {
        "size": np.ma.array(np.nan_to_num(table["size"]), mask=is_missing),
        "colour": np.ma.array(["red" if row % 2 else colour for row, colour in enumerate(new["colour"])]),
        "street": np.ma.array(new["street"], mask=np.arange(count) == 5),
    }
    masked["colour"][1::2] = np.ma.masked
    holes = table | {
        "colour": [None if row % 2 else colour for row, colour in enumerate(new["colour"])],
        "street": [street if row != 5 else "NA" for row, street in enumerate(new["street"])],
    }
    assert (model.predict(masked) == model.predict(holes)).all()
    assert (model.predict(holes) != model.predict(table)).any()
    rows = np.ma.array(np.array([masked["size"].data, [0] * count, new["street"]], dtype=object).T, mask=False)
    rows[:, 0] = np.ma.array(masked["size"].data, mask=is_missing)
    rows[:, 1] = new["colour"]
    assert (model.predict(rows) == model.predict(table)).all()
    # pandas.NA has this type.
    unknown = type("NAType", (), {})()
    sizes = [unknown if missing else size for size, missing in zip(table["size"], is_missing, strict=True)]
    assert (model.predict(table | {"size": sizes}) == model.predict(table)).all()
    category = {"name": "c", "inputs": {"one-hot": {"categories": ["a\nb"]}}}
    assert encode_column(category, np.array(["a\r\nb", " a\rb", "a b"]), False).tolist() == [[1], [1], [0]]
    with pytest.raises(ring.InvalidArgument, match=r"column `colour` of x holds b'\\xff', which is not UTF-8"):
        model.predict(table | {"colour": np.array([b"\xff"] * count)})
    with pytest.raises(ring.InvalidArgument, match="column `street` of x holds the number 1.5"):
        model.predict(table | {"street": [1.5] * count})


def test_columns_without_names_are_found_by_position_as_by_the_program(tmp_path: Path):
    """Regression test: before the fix, a model of a table without a header looked in a DataFrame for columns with names such as
    "1"."""
    random = np.random.default_rng(4)
    cells = np.round(random.normal(size=(80, 4)), 3)
    cells[:, 0] = 3 * cells[:, 1] + 5 * cells[:, 3]
    np.savetxt(tmp_path / "all.csv", cells, "%.3f", delimiter=",")
    ringtrain(*["--data", tmp_path / "all.csv", "--no-header", "--target", 0, "--drop", 2, "--save-model", tmp_path / "model"])
    printed = ringtrain("predict", "--model", tmp_path / "model", "--no-header", "--data", tmp_path / "all.csv")
    expected = np.array(printed.splitlines()[1:], dtype=float)
    model = ring.load_model(tmp_path / "model")
    for order in ([0, 1, 2, 3], [1, 2, 3], [1, 3]):
        mapping = {number: cells[:, column] for number, column in enumerate(order)}
        assert np.abs(model.predict(mapping) - expected).max() < 1e-5
        frame = Frame([cells[:, column] for column in order])
        assert np.abs(model.predict(frame) - expected).max() < 1e-5
    assert np.abs(model.predict(cells[:, [1, 3]]) - expected).max() < 1e-5
    with pytest.raises(
        ring.InvalidArgument, match="x has 1 column, but the model finds its columns by position and needs the 4 columns"
    ):
        model.predict({1: cells[:, 1]})


class Frame:
    """A stand-in for a pandas.DataFrame whose columns all have the same name."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self.columns = ["same"] * len(arrays)

    @property
    def iloc(self) -> "Frame":
        return self

    def __getitem__(self, key: tuple[slice, int]) -> np.ndarray:
        return self._arrays[key[1]]


def test_small_differences_between_large_numbers_are_kept(tmp_path: Path):
    times = [1_700_000_000 + row for row in range(120)]
    data = save(tmp_path / "table.csv", {"t": times, "y": [row / 2 + 0.1 for row in range(120)]})
    printed = ringtrain("--data", data, "--target", "y", "--save-model", tmp_path / "model")
    assert "column `t` holds large numbers that differ little" in printed
    model = ring.load_model(tmp_path / "model")
    printed = ringtrain("predict", "--model", tmp_path / "model", "--data", data)
    expected = np.array(printed.splitlines()[1:], dtype=float)
    for x in [{"t": times}, np.array(times)[:, None], np.array(times, dtype=object)[:, None]]:
        assert np.abs(model.predict(x) - expected).max() < 1e-6 * expected.max()
    assert np.abs(expected - [row / 2 + 0.1 for row in range(120)]).max() < 0.01


def test_arrays_with_a_wrong_shape_type_or_value_are_refused(saved_models: dict[str, Path]):
    model = ring.load_model(saved_models["linear regression"])
    x = make_table()
    hole = x.copy()
    hole[7, 1] = np.nan
    far = x.copy()
    far[7, 1] = 3e38
    for wrong, message in [
        (x[:, :3], r"shape \(300, 3\); the model needs the shape \(rows, 4\)"),
        (x[0], "the shape"),
        (x.astype(str), "needs numbers"),
        (x.astype(object).tolist()[0:1] + [["a", 1, 1, 1]], "needs numbers"),
        (hole, "row 7, column `length`: nan is not a finite number"),
        (x * 1e40, "is not a finite number"),
        (far, "a prediction is not finite"),
    ]:
        with pytest.raises(ring.InvalidArgument, match=message):
            model.predict(wrong)


def test_damaged_files_and_files_of_other_formats_raise_model_file_error(saved_models: dict[str, Path], tmp_path: Path):
    complete = saved_models["mlp:6,batchnorm,dropout0.1,4 regression"].read_bytes()
    path = tmp_path / "model"
    generator = np.random.default_rng(1)
    damaged = [complete[:length] for length in range(0, len(complete), 7)] + [complete + b"\0"]
    for index in range(0, len(complete), 3):
        changed = bytearray(complete)
        changed[index] ^= 1 << int(generator.integers(8))
        damaged.append(bytes(changed))
    damaged += [complete.replace(b'"version":"1"', b'"version":"%d"' % version) for version in (0, 2)]
    damaged.insert(0, b"width,length\n1,2\n")
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ring.ModelFileError):
            ring.load_model(path)
    with pytest.raises(ring.ModelFileError, match=r"model: the file has version 2 of its format"):
        path.write_bytes(damaged[-1])
        ring.load_model(path)
    ringtrain("--epochs", 1, "--model", "softmax", "--checkpoint", tmp_path)
    with pytest.raises(ring.ModelFileError, match="this is a checkpoint"):
        ring.load_model(tmp_path / "checkpoint.safetensors")
    with pytest.raises(FileNotFoundError):
        ring.load_model(tmp_path / "absent")
