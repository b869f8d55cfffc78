"""Runs the programs of examples/python with small sizes, and checks their output and the files that they write."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from ranks import FinishedProgram, Launcher

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "python"
FASHION = Path("/usr/share/datasets/fashion-mnist")
# Importing torch in 4 processes takes 5 s on 2 idle cores, and much longer on busy cores.
PATIENCE_S = 240.0
pytestmark = pytest.mark.timeout(PATIENCE_S + 20)

SIZES = [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 4]


def is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # Python finds a test directory of this name as a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


with_torch = pytest.mark.skipif(not is_installed("torch"), reason="NOT TESTED: examples with PyTorch, which cannot be imported")
with_fashion = pytest.mark.skipif(
    not FASHION.is_dir(), reason=f"NOT TESTED: Fashion-MNIST, which is not in {FASHION}: apt-get install dataset-fashion-mnist"
)


def final_line(done: FinishedProgram, n: int, rank: int = 0) -> str:
    """Returns the last line that a rank printed. This line must begin with "final: ranks" and the number of ranks."""
    lines = done.lines(rank)
    assert lines and lines[-1].startswith(f"final: ranks {n}, "), done
    return lines[-1]


def find_number(pattern: str, text: str) -> float:
    """Finds `pattern` in `text`, where `#` in `pattern` stands for any number. Returns this number."""
    found = re.search(pattern.replace("#", r"(-?[0-9.]+(?:e[-+][0-9]+)?)"), text)
    assert found, f"no {pattern!r} in {text!r}"
    return float(found[1])


@pytest.mark.parametrize("n", SIZES)
def test_linear_regression(ringrun: Launcher, n: int) -> None:
    done = ringrun(n, EXAMPLES / "linear_regression.py", "--rows", 2001)
    assert "same on all of them: True" in final_line(done, n)
    lines = {line.split(":")[0]: line for line in done.lines(0)}
    for way, off in [("averaged models", 0.02), ("averaged gradients", 1e-9)]:
        assert find_number("error of a weight #,", lines[way]) < 0.1, done
        assert find_number("fit of all data #", lines[way]) < off, done


@pytest.mark.parametrize("n", SIZES)
def test_local_sgd(ringrun: Launcher, n: int) -> None:
    done = ringrun(n, EXAMPLES / "local_sgd.py")
    text = final_line(done, n)
    assert text.endswith("the same model on all of them: True"), done
    assert find_number("accuracy on all data #,", text) > 0.95, done
    apart = find_number("without averaging: accuracy on all data #,", done.stdout)
    assert apart < 0.7 if n > 1 else apart > 0.95, done
    steps = [int(count) for count in done.lines(0)[0].removeprefix("steps of each rank: ").split()]
    assert len(steps) == n and min(steps) >= 400 and max(steps) <= 800, done


@pytest.mark.full
def test_local_sgd_without_additional_steps_is_deterministic(ringrun: Launcher) -> None:
    first, second = (ringrun(3, EXAMPLES / "local_sgd.py", "--rounds", 5, "--ahead", 0) for _ in range(2))
    assert first.lines(0) == second.lines(0)


@pytest.mark.parametrize("n", SIZES)
def test_mpi_average(ringrun: Launcher, n: int) -> None:
    done = ringrun(n, EXAMPLES / "mpi_average.py", flags=["--mpi4py"])
    text = final_line(done, n)
    assert find_number("rows #,", text) == 4001, done
    assert find_number("error of a weight #,", text) < 0.1, done
    assert find_number("differ by #", text) < 1e-12, done


# In the gate, the README's program for DistributedDataParallel covers the same functions.
@pytest.mark.full
@with_torch
@with_fashion
def test_ddp_fashion_mnist(ringrun: Launcher, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    done = ringrun(
        2, EXAMPLES / "ddp_fashion_mnist.py", "--limit", 2000, "--epochs", 3, "--batch", 64, "--save", model, timeout=PATIENCE_S
    )
    losses = [float(loss) for loss in re.findall(r"train loss ([0-9.]+)", "\n".join(done.lines(0)))]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0], done
    assert find_number("test accuracy # of 2000 images", final_line(done, 2)) > 0.7, done
    import torch

    state = torch.load(model, weights_only=True)
    assert sum(tensor.numel() for tensor in state.values()) == 20490
    assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.full
@with_torch
@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_ddp_fashion_mnist_reports_missing_or_invalid_data(ringrun: Launcher, tmp_path: Path, fault: str) -> None:
    if fault == "truncated":
        if not FASHION.is_dir():
            pytest.skip("NOT TESTED: a truncated Fashion-MNIST file, because Fashion-MNIST is not installed")
        for path in FASHION.glob("*.gz"):
            shutil.copy(path, tmp_path)
        images = tmp_path / "train-images-idx3-ubyte.gz"
        images.write_bytes(images.read_bytes()[:100_000])
    done = ringrun(1, EXAMPLES / "ddp_fashion_mnist.py", "--data", tmp_path, code=2, timeout=PATIENCE_S)
    (line,) = done.errors(0)
    assert str(tmp_path / "train-images-idx3-ubyte.gz") in line
    assert ("apt-get install dataset-fashion-mnist" in line) == (fault == "missing"), line


def losses_of_steps(done: FinishedProgram) -> list[float]:
    return [float(loss) for loss in next(line for line in done.lines(0) if line.startswith("losses: ")).split()[1:]]


# In the gate, the tests of the folder `frameworks` cover the same functions.
@pytest.mark.full
@with_fashion
@pytest.mark.parametrize(
    ("backend", "script"), [("jax", "keras"), ("torch", "keras"), ("tensorflow", "keras"), ("tensorflow", "tensorflow")]
)
def test_horovod_scripts_train_as_one_process(ringrun: Launcher, tmp_path: Path, backend: str, script: str) -> None:
    missing = [name for name in ("keras", backend) if not is_installed(name)]
    if missing:
        pytest.skip(f"NOT TESTED: examples for {' and '.join(missing)}, which cannot be imported")
    options = ["--limit", 1600, "--batch", 32, "--epochs", 1, "--steps"]
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    losses = {}
    for n in (1, 2, 4):
        saved = ["--save", tmp_path / "model.keras"] if script == "keras" else ["--checkpoint", tmp_path]
        done = ringrun(n, EXAMPLES / f"{script}_fashion_mnist.py", *options, *saved, env=env, timeout=PATIENCE_S)
        assert find_number("test accuracy #", final_line(done, n)) > 0.6, done
        losses[n] = losses_of_steps(done)
        assert len(losses[n]) == 50 and losses[n][-1] < losses[n][0]
        assert max(abs(mine - one) for mine, one in zip(losses[n], losses[1], strict=True)) < 1e-4, losses


# In the gate, `test_horovod` of the folder `torch` covers the same optimizer.
@pytest.mark.full
@with_torch
def test_distributed_optimizer(ringrun: Launcher) -> None:
    script = EXAMPLES / "distributed_optimizer.py"
    done = ringrun(2, script, "--points", 2048, "--epochs", 6, "--compression", "bf16", timeout=PATIENCE_S)
    text = final_line(done, 2)
    assert text.endswith("the same parameters on all of them: True"), done
    assert find_number("accuracy #,", text) > 0.95, done
    assert find_number("loss #,", text) < find_number("epoch 1/6: loss #,", done.lines(0)[0]), done


# In the gate, the tests of the folder `jax` cover the same functions.
@pytest.mark.full
@pytest.mark.skipif(
    not (is_installed("jax") and is_installed("optax")), reason="NOT TESTED: jax_mlp.py, because JAX or optax cannot be imported"
)
def test_jax_mlp_has_the_same_losses_for_all_numbers_of_ranks(ringrun: Launcher) -> None:
    def losses(n: int) -> list[float]:
        done = ringrun(n, EXAMPLES / "jax_mlp.py", "--steps", 51, env={"JAX_PLATFORMS": "cpu"}, timeout=PATIENCE_S)
        assert find_number("test accuracy #", final_line(done, n)) > 0.3, done
        return [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", "\n".join(done.lines(0)))]

    alone = losses(1)
    assert len(alone) == 6 and alone[-1] < 0.8 * alone[0]
    for n in (2, 4):
        assert max(abs(a - b) for a, b in zip(losses(n), alone, strict=True)) < 1e-4


@pytest.mark.full
@with_torch
def test_pipeline(ringrun: Launcher) -> None:
    done = ringrun(2, EXAMPLES / "pipeline.py", timeout=PATIENCE_S)
    text = final_line(done, 2, rank=1)
    assert find_number("loss #,", text) < 0.1 * find_number("step 0: loss #", done.lines(1)[0]), done
    assert find_number("difference from one process #", text) < 1e-3, done


@pytest.mark.full
@with_torch
def test_pipeline_needs_an_even_number_of_ranks(ringrun: Launcher) -> None:
    done = ringrun(1, EXAMPLES / "pipeline.py", code=2, timeout=PATIENCE_S)
    assert done.errors(0) == ["two stages need an even number of ranks, and there are 1"]


@pytest.mark.full
@with_torch
@with_fashion
def test_ddp_fashion_mnist_under_torchrun(ringrun: Launcher, tmp_path: Path) -> None:
    # ringrun starts torchrun, so that the test finds processes that torchrun leaves behind. torchrun's processes must not see the
    # variables of ringrun.
    torchrun = ["env", "-u", "RING_RANK", "-u", "RING_WORLD_SIZE", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2"]
    done = ringrun(1, EXAMPLES / "ddp_fashion_mnist.py", "--limit", 500, "--epochs", 1, command=command, timeout=PATIENCE_S)
    assert "final: ranks 2, test accuracy" in done.stdout, done
