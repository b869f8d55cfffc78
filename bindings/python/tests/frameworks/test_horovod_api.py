"""Compares the names and parameters of Horovod, which `horovod_api.txt` lists, with those of our packages and with the tables in
the documents. Reads the sources without importing the frameworks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2]
SOURCES = PYTHON / "python"
API = Path(__file__).parent / "horovod_api.txt"

# Horovod's module, our module and its page.
MODULES = [
    ("horovod.torch", "ringtrain.torch", "horovod"),
    ("horovod.tensorflow", "ringtrain.tensorflow", "tensorflow"),
    ("horovod.tensorflow.keras", "ringtrain.keras", "keras"),
    ("horovod.tensorflow.keras.callbacks", "ringtrain.tensorflow.keras.callbacks", "keras"),
    ("horovod.keras", "ringtrain.keras", "keras"),
    ("horovod.keras.callbacks", "ringtrain.keras.callbacks", "keras"),
]
# The two modules of Horovod for Keras differ in these functions. Ours has the parameters of horovod.tensorflow.keras, whose order
# and defaults a script for horovod.keras cannot rely on.
OTHER_ORDER = {("horovod.keras", "DistributedOptimizer"), ("horovod.keras.callbacks", "BestModelCheckpoint")}
OTHER_DEFAULT = {("horovod.keras", "allreduce", "average")}

Parameters = dict[str, str | None]


def parameters_of(arguments: ast.arguments) -> Parameters:
    """Returns the parameters with their defaults, first those that can be passed by position."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(node) for node in arguments.defaults]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = {node.arg: default for node, default in zip(positional, defaults, strict=True)}
    return found | {node.arg: None if default is None else ast.unparse(default) for node, default in named}


def names_of_horovod(module: str) -> Iterator[tuple[str, Parameters | None]]:
    section = API.read_text().split(f"[{module}]\n")[1].split("\n\n")[0]
    for line in section.splitlines():
        function = ast.parse(f"def {line}: pass").body[0] if "(" in line else None
        yield line.partition("(")[0], None if function is None else parameters_of(function.args)


@functools.lru_cache
def parse(module: str) -> ast.Module:
    path = SOURCES / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def our_parameters(module: str, name: str) -> Parameters | None:
    """Returns the parameters of a function or class that a module defines or imports, and None for other objects. Raises KeyError
    if the module does not have the name."""
    for node in parse(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return parameters_of(node.args)
        if isinstance(node, ast.ClassDef) and node.name == name:
            init = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            return {key: value for key, value in parameters_of(init[0].args).items() if key != "self"} if init else None
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ringtrain"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    is_module = (SOURCES / node.module.replace(".", "/") / f"{alias.name}.py").exists()
                    is_compiled = node.module == "ringtrain._core"
                    return None if is_module or is_compiled else our_parameters(node.module, alias.name)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in {found.id for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)}:
                return None
    raise KeyError(name)


def not_implemented() -> set[str]:
    return set(re.findall(r'^    "(\w+)": ', (SOURCES / "ringtrain/_horovod/missing.py").read_text(), re.MULTILINE))


def table_of(page: str) -> dict[str, str]:
    """Returns the names that the table of a page lists in its first column, with the second column."""
    text = (PYTHON / "docs" / f"{page}.md").read_text()
    rows = [line.split("|") for line in text.split("| Horovod |")[1].split("\n\n")[0].splitlines() if line.startswith("| `")]
    return {name: row[2] for row in rows for name in re.findall(r"`(?:callbacks\.)?(\w+)", row[1])}


@pytest.mark.parametrize(("horovod", "ours", "page"), MODULES)
def test_horovods_names_and_parameters(horovod: str, ours: str, page: str) -> None:
    errors, table = [], table_of(page)
    for name, expected in names_of_horovod(horovod):
        if name not in table:
            errors.append(f"{name} is not in the table of {page}.md")
        try:
            found = our_parameters(ours, name)
        except KeyError:
            if name not in not_implemented() or "NotImplementedError" not in table.get(name, ""):
                errors.append(f"{name} does not exist, and missing.py or the table does not say so")
            continue
        if not expected or found is None:
            continue
        if missing := expected.keys() - found.keys():
            errors.append(f"{name} has no parameter {', '.join(sorted(missing))}")
        elif list(found)[: len(expected)] != list(expected) and (horovod, name) not in OTHER_ORDER:
            errors.append(f"{name} has the parameters {list(found)} instead of {list(expected)}")
        for key in expected.keys() & found.keys():
            default = re.sub(r"\w+\.(?=Average)", "", found[key]) if found[key] else found[key]
            if default != expected[key] and (horovod, name, key) not in OTHER_DEFAULT:
                errors.append(f"{name}({key}) has the default {default} instead of {expected[key]}")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(("ours", "page"), dict.fromkeys((ours, page) for _, ours, page in MODULES[:3]))
def test_every_exported_name_is_in_the_table(ours: str, page: str) -> None:
    exported = next(
        {item.value for item in node.value.elts}
        for node in parse(ours).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    exported -= {"RingProcessGroup", "hooks"}  # the page torch.md has these
    table = table_of(page).keys()
    assert len(exported) > 30 and exported <= table, exported - table
    sources = "".join(path.read_text() for path in (SOURCES / "ringtrain").rglob("*.py"))
    unknown = {name for name in table - exported - not_implemented() if not re.search(rf"(def|class) {name}\b", sources)}
    assert all(name.startswith("HOROVOD_") for name in unknown), unknown
