"""The tables of an nsys export, as the versions of its schema declare them.

Columns and types are facts of real exports (``data/nsys_schemas.json``); the statements are our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from nsan.errors import UnknownNameError

SCHEMAS: Final[tuple[str, ...]] = ("2.9.1", "3.0.0", "3.7.2", "3.17.2", "3.25.0")
"""Export schemas that can be written, oldest first."""

_KEYED: Final = ("StringIds", "ENUM_")
"""Tables whose ``id`` is their primary key."""


@dataclass(frozen=True)
class Layout:
    """How one version declares one table.

    Attributes
    ----------
    table : str
        Name of the table.
    columns : dict
        Type of each column, in order.
    required : tuple of str
        Columns that are never null.
    assumed : bool
        No real export of this version that we know has the table: its columns are those of the
        nearest version that has it.
    """

    table: str
    columns: Mapping[str, str]
    required: tuple[str, ...]
    assumed: bool

    def create_statement(self) -> str:
        """Write the ``CREATE TABLE`` of the table."""
        lines = [f'    "{name}" {self._declared(name)}' for name in self.columns]
        return f'CREATE TABLE "{self.table}" (\n' + ",\n".join(lines) + "\n)"

    def _declared(self, column: str) -> str:
        words = [self.columns[column]]
        if column in self.required:
            words.append("NOT NULL")
        if column == "id" and self.table.startswith(_KEYED):
            words.append("PRIMARY KEY")
        return " ".join(words)


def schema_version(asked: str) -> str:
    """Return the schema that a version, or the beginning of one, means.

    Parameters
    ----------
    asked : str
        Such as ``3.7.2`` or ``3.17``.

    Raises
    ------
    UnknownNameError
        If it is none of :data:`SCHEMAS`, or several of them.

    Examples
    --------
    >>> schema_version("3.25")
    '3.25.0'
    """
    found = [version for version in SCHEMAS if f"{version}.".startswith(f"{asked}.")]
    if len(found) != 1:
        raise UnknownNameError("export schema", asked, SCHEMAS)
    return found[0]


@cache
def layouts(version: str) -> Mapping[str, Layout]:
    """Return the tables that a version has, by name.

    Parameters
    ----------
    version : str
        One of :data:`SCHEMAS`.
    """
    text = resources.files("nsan.model").joinpath("data/nsys_schemas.json").read_text("utf-8")
    found = {}
    for table, variants in json.loads(text)["tables"].items():
        for variant in variants:
            if version in (*variant["seen"], *variant["assumed"]):
                found[table] = _layout(
                    table, variant["columns"], assumed=version in variant["assumed"]
                )
    return found


def _layout(table: str, columns: str, *, assumed: bool) -> Layout:
    words = dict(column.split(" ") for column in columns.split(", "))
    required = tuple(name for name, kind in words.items() if kind.endswith("!"))
    types = {name: kind.removesuffix("!") for name, kind in words.items()}
    return Layout(table, types, required, assumed)
