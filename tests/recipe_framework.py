"""Stands for the vendor's recipe framework where nsys is not installed: its interface, in two releases.

Written from what recipes of other people call; nothing of the vendor's is here. What a release of the
real one does is tested in ``integration/test_recipe_nsys.py``.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import os
import shutil
import sys
import types
from contextlib import contextmanager
from pathlib import Path

from nsan.cli.recipe_shells import RECIPE_FOLDER


class NoDataError(Exception):
    """As the framework raises it."""


class Plain:
    """A context that maps in this process; as some releases do, it takes no keyword arguments."""

    def __init__(self):
        self.mapped = []

    def map(self, function, *iterables):
        self.mapped.append(function)
        return [function(*each) for each in zip(*iterables, strict=True)]

    def wait(self, waitable):
        return waitable


class Recipe:
    def __init__(self, parsed_args):
        self._parsed_args = parsed_args
        self._output_files = {}
        self._analysis_dict = {}
        self.folder = Path(parsed_args.output)

    def add_output_file(self, filename, filetype=None):
        self.folder.mkdir(exist_ok=True)
        if filetype:
            self._output_files[filename] = filetype
        return str(self.folder / filename)

    def create_notebook(self, notebook_name):
        home = Path(sys.modules[type(self).__module__].__file__).parent
        shutil.copy(home / notebook_name, self.add_output_file(notebook_name, "Notebook"))

    def create_analysis_file(self):
        text = json.dumps(self._analysis_dict)
        Path(self.add_output_file(f"{self.folder.name}.nsys-analysis")).write_text(text)

    def run(self, context):  # noqa: ARG002
        self._analysis_dict = {"RecipeName": "stand-in"}

    @classmethod
    def get_argument_parser(cls):
        return _Parser()


class _Parser(argparse.ArgumentParser):
    def add_recipe_argument(self, option, *args, **kwargs):
        if isinstance(option, str):
            self.add_argument(option, *args, **kwargs)
            return
        flags = {"nargs": "+"} if option.name == "INPUT" else {}
        numbers = {"BINS": 30, "ROWS": -1, "START": None, "END": None}
        if option.name in numbers:
            flags = {"type": int, "default": numbers[option.name]}
        if option.name in {"CSV", "FORCE_OVERWRITE"}:
            flags = {"action": "store_true"}
        self.add_argument(f"--{option.name.lower().replace('_', '-')}", **flags, **kwargs)


OLD = ("INPUT", "OUTPUT", "FORCE_OVERWRITE", "CSV", "START", "END", "NVTX", "ROWS", "BINS")
NEW = ("INPUT", "CSV", "START", "END")
"""Options of a release; the new one declares the output by itself, for every recipe."""


@contextmanager
def framework(options=OLD):
    """Put the framework where recipes import it from."""
    members = enum.Enum("Option", list(options))
    names = {
        "nsys_recipe": {},
        "nsys_recipe.lib": {},
        "nsys_recipe.lib.recipe": {"Recipe": Recipe},
        "nsys_recipe.lib.args": {"Option": members},
        "nsys_recipe.lib.exceptions": {"NoDataError": NoDataError},
    }
    for name, content in names.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(content)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def recipe_class(name):
    """Import a recipe as the framework does, and find its class."""
    path = RECIPE_FOLDER / name / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    about = json.loads((path.parent / "metadata.json").read_text())
    return getattr(module, about["class_name"])


def run(name, inputs, output, *arguments, options=OLD, context=None):
    """Run a recipe; return the folder that it wrote."""
    with framework(options):
        found = recipe_class(name)
        parser = found.get_argument_parser()
        if options == NEW:
            parser.add_argument("--output")
        words = ["--input", *map(os.fspath, inputs), "--output", str(output), *arguments]
        found(parser.parse_args(words)).run(context or Plain())
    return Path(output)
