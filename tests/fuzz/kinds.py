"""The kinds of input, by name."""

from __future__ import annotations

from fuzz import (
    kind_export,
    kind_folder,
    kind_nvprof_database,
    kind_nvprof_text,
    kind_snapshot,
    kind_truth,
)

KINDS = {
    "export": kind_export,
    "folder": kind_folder,
    "snapshot": kind_snapshot,
    "nvprof-text": kind_nvprof_text,
    "nvprof-database": kind_nvprof_database,
    "truth": kind_truth,
}
"""By name: a module that makes, checks and looks closer at inputs."""

WEIGHTS = {
    "export": 6,
    "folder": 2,
    "snapshot": 2,
    "nvprof-text": 2,
    "nvprof-database": 2,
    "truth": 2,
}
"""Of so many turns each kind has so many."""
