"""Builds the wheel with maturin, and adds the programs `ringrun`, `ringtrain` and `ringbench` to it.

The wheel must include the launcher `ringrun`, because users of the package may have no Rust toolchain. The programs are
executables and not Python entry points: `ringrun` starts each rank by executing its own file, which must be a binary.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import get_requires_for_build_editable, get_requires_for_build_wheel  # noqa: F401  (pip looks for them here)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The directory that `tool.maturin.data` in pyproject.toml names.
SCRIPTS = HERE / "build" / "data" / "scripts"
PROGRAMS = ("ringrun", "ringtrain", "ringbench")


def _build_and_copy_programs() -> None:
    """Builds the programs and copies them to the directory in which maturin looks for scripts."""
    if not (ROOT / "Cargo.toml").is_file():
        raise SystemExit("building the package needs a checkout of the whole repository ringtrain, not only bindings/python")
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        raise SystemExit("building ringtrain needs Rust's cargo (https://rustup.rs); installing a wheel does not")
    subprocess.run([cargo, "build", "--release", "--locked", "--bins"], cwd=ROOT, check=True)
    metadata = subprocess.run(
        [cargo, "metadata", "--locked", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    built = Path(json.loads(metadata.stdout)["target_directory"]) / "release"
    shutil.rmtree(SCRIPTS, ignore_errors=True)
    SCRIPTS.mkdir(parents=True)
    for program in PROGRAMS:
        shutil.copy2(built / program, SCRIPTS / program)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _build_and_copy_programs()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _build_and_copy_programs()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
