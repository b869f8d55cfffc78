"""Tests of `ringtrain export`: numpy, PyTorch and onnxruntime compute the predictions of `ringtrain predict` from the ONNX file.

`tools/test --full` installs the packages that these tests need, and runs them.
"""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from tables import ringtrain, save

pytestmark = pytest.mark.full
onnx = pytest.importorskip("onnx", reason="onnx is not installed")
reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


class ExportedModel:
    """A model file, its ONNX file, and the predictions of `ringtrain predict` for new rows."""

    def __init__(self, folder: Path, new: Path, *options: object) -> None:
        self.path = folder / "model.onnx"
        self.printed = ringtrain("export", "--model", folder / "model", "--output", self.path, *options)
        onnx.checker.check_model(self.path, full_check=True)
        self.message = onnx.load(self.path)
        lines = ringtrain("predict", "--model", folder / "model", "--data", new).splitlines()
        self.rows = list(csv.reader(lines))[1:]
        self.model = ring.load_model(folder / "model")

    def feeds(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the inputs of the ONNX model: columns of the types that the model declares."""
        feeds = {}
        for value in self.message.graph.input:
            element_type = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            width = value.type.tensor_type.shape.dim[1].dim_value
            if width == 1 and value.name in columns:
                feeds[value.name] = np.asarray(columns[value.name]).astype(element_type)[:, None]
            else:
                feeds[value.name] = np.stack(list(columns.values()), axis=1).astype(element_type)
        return feeds

    def check(self, feeds: dict[str, np.ndarray], parts: tuple[str, ...] = ("numpy", "onnxruntime")) -> None:
        results = {}
        if "numpy" in parts:
            results["numpy"] = reference.ReferenceEvaluator(self.message).run(None, feeds)
        if "onnxruntime" in parts:
            session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
            results["onnxruntime"] = session.run(None, feeds)
        if "torch" in parts:
            results["torch"] = self.run_torch(feeds)
        for name, outputs in results.items():
            self.compare(name, outputs)

    def compare(self, name: str, outputs: list[np.ndarray]) -> None:
        if self.model.task == "regression":
            expected = np.array([float(row[0]) for row in self.rows])
            assert outputs[0].shape == expected.shape and outputs[0].dtype == np.float64, name
            assert np.abs(outputs[0] - expected).max() < 1e-6 * np.abs(expected).max(), name
            return
        expected = np.array([row[1:] for row in self.rows], dtype=float)
        assert outputs[0].tolist() == [row[0] for row in self.rows], name
        assert outputs[1].shape == expected.shape and np.abs(outputs[1] - expected).max() < 2e-6, name

    def run_torch(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Computes the predictions in PyTorch with the constants of the ONNX file. All columns must hold numbers."""
        torch = pytest.importorskip("torch", reason="torch is not installed")
        constant = {
            tensor.name.removeprefix("ringtrain/"): onnx.numpy_helper.to_array(tensor)
            for tensor in self.message.graph.initializer
        }
        tensor = {name: torch.tensor(value) for name, value in constant.items() if value.dtype.kind != "O"}
        layers = []
        for index in range(sum(name.endswith(".weight") for name in tensor)):
            weight = tensor[f"layers.{index}.weight"]
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight, "bias": tensor[f"layers.{index}.bias"]})
            layers += [layer, torch.nn.ReLU()]
        x = torch.tensor(np.concatenate([feeds[value.name] for value in self.message.graph.input], axis=1))
        x = (x - tensor["features.mean"]) * tensor["features.inverse_deviation"]
        outputs = torch.nn.Sequential(*layers[:-1])(x)
        if "classes" not in constant:
            return [(tensor["target.mean"] + tensor["target.deviation"] * outputs[:, 0].double()).detach().numpy()]
        names = constant["classes"].astype(str)
        return [names[outputs.argmax(dim=1).numpy()], outputs.softmax(dim=1).detach().numpy()]


@pytest.mark.parametrize("options", [(), ("--inputs", "matrix")], ids=["columns", "matrix"])
@pytest.mark.parametrize("name", ["diabetes", "wine", "breast_cancer", "iris"])
def test_predictions_for_the_tables_of_scikit_learn_are_equal(tmp_path: Path, name: str, options: tuple[str, ...]):
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    loaded = getattr(datasets, f"load_{name}")()
    columns = dict(zip(loaded.feature_names, loaded.data.T, strict=True))
    texts = [f"class {value}" if name == "iris" else value for value in loaded.target]
    data = save(tmp_path / "table.csv", columns | {"y": texts})
    ringtrain("--data", data, "--target", "y", "--save-model", tmp_path / "model")
    exported = ExportedModel(tmp_path, data, *options)
    assert len(exported.message.graph.input) == (1 if options else len(columns))
    feeds = exported.feeds(columns)
    exported.check(feeds, ("numpy", "torch", "onnxruntime"))
    prediction = exported.model.predict(loaded.data)
    exported.compare(
        "load_model", [prediction, None if exported.model.task == "regression" else exported.model.predict_proba(loaded.data)]
    )


@pytest.mark.parametrize("model", ["linear", "mlp:6,5"])
def test_texts_missing_values_and_large_numbers_are_encoded_as_by_the_program(tmp_path: Path, model: str):
    count = 120
    columns = {
        "size": ["NA" if row % 10 == 0 else row * 7 % 20 for row in range(count)],
        "time": [1_700_000_000 + row for row in range(count)],
        "colour": [["red", "green", "null"][row % 3] for row in range(count)],
        "street": [f"number {row % 8}" for row in range(count)],
        "prediction": [row % 7 for row in range(count)],
        "price": [1e6 + 3 * (row * 7 % 20) + row % 3 for row in range(count)],
    }
    data = save(tmp_path / "table.csv", columns)
    options = ["--missing", "indicator", "--max-categories", 5, "--model", model, "--epochs", 3]
    ringtrain("--data", data, "--target", "price", "--task", "regression", "--save-model", tmp_path / "model", *options)
    columns["colour"][1:3] = ["blue", "nUlL"]
    exported = ExportedModel(tmp_path, save(tmp_path / "new.csv", columns))
    assert exported.printed.splitlines() == [
        "input   size: float (rows, 1)",
        "input   time: double (rows, 1)",
        "input   colour: string (rows, 1)",
        "input   street: int64 (rows, 1)",
        "input   prediction_: float (rows, 1)",
        "output  prediction: double (rows)",
    ]
    documentation = {value.name: value.doc_string for value in exported.message.graph.input}
    assert "hashlib.sha256(text.encode()).digest()[:8]" in documentation["street"]
    buckets = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % 5 for text in columns["street"]]
    feeds = exported.feeds(
        {
            "size": np.array([np.nan if size == "NA" else size for size in columns["size"]]),
            "time": np.array(columns["time"], dtype=np.float64),
            "colour": np.array(columns["colour"], dtype=object),
            "street": np.array(buckets),
            "prediction_": np.array(columns["prediction"]),
        }
    )
    exported.check(feeds)


def test_images_are_rows_of_a_matrix(tmp_path: Path):
    ringtrain("--data", "digits", "--epochs", 2, "--model", "mlp:16", "--save-model", tmp_path / "model")
    pixels = np.random.default_rng(5).integers(0, 17, (40, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", pixels)
    exported = ExportedModel(tmp_path, tmp_path / "x.npy")
    assert exported.printed.startswith("input   x: float (rows, 64)\n")
    exported.check({"x": pixels})


@pytest.mark.parametrize("model", ["mlp:16,batchnorm,8", "cnn:conv3x3,batchnorm,pool2,dropout0.5,dense8,batchnorm"])
def test_batch_normalization_uses_the_running_statistics(tmp_path: Path, model: str):
    options = ["--epochs", 2, "--batch-size", 64, "--model", model, "--save-model", tmp_path / "model"]
    ringtrain("--data", "digits", *options)
    pixels = np.random.default_rng(5).integers(0, 17, (40, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", pixels)
    exported = ExportedModel(tmp_path, tmp_path / "x.npy")
    exported.check({"x": pixels})


def test_a_matrix_without_names_holds_indicators_and_large_numbers(tmp_path: Path):
    random = np.random.default_rng(4)
    cells = np.round(random.normal(size=(90, 4)), 3)
    cells[:, 1] += 1.7e9
    cells[:, 3] = 3 * cells[:, 0] + cells[:, 2]
    cells[::7, 0] = np.nan
    np.savetxt(tmp_path / "table.csv", cells, "%.3f", delimiter=",")
    options = ["--no-header", "--target", 3, "--missing", "indicator", "--save-model", tmp_path / "model"]
    ringtrain("--data", tmp_path / "table.csv", *options)
    np.savetxt(tmp_path / "new.csv", cells[:, :3], "%.3f", delimiter=",", header="a,b,c", comments="")
    exported = ExportedModel(tmp_path, tmp_path / "new.csv")
    assert exported.printed.startswith("input   x: double (rows, 3)\n")
    exported.check({"x": np.round(cells[:, :3], 3)})
