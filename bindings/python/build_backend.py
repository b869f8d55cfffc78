"""Builds the wheel: maturin's, with the programs `ringrun`, `ringtrain` and `ringbench` beside the module.

An installed package must include its launcher, because its users may have no Rust toolchain. The programs are separate
executables and not entry points in Python, because `ringrun` starts ranks by executing itself.
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
# Where `tool.maturin.data` says.
SCRIPTS = HERE / "build" / "data" / "scripts"
PROGRAMS = ("ringrun", "ringtrain", "ringbench")


def _collect_programs() -> None:
    """Builds the programs and puts them where maturin looks for scripts."""
    if not (ROOT / "Cargo.toml").is_file():
        raise SystemExit("the package is built from a checkout of ringtrain, of which bindings/python is a part")
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        raise SystemExit("building ringtrain needs Rust's cargo: https://rustup.rs; a wheel built elsewhere needs nothing")
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
    _collect_programs()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _collect_programs()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
