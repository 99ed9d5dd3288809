"""A software model of the UVM driver: traces with known truth, and answers to what-if.

``program`` and ``access`` say what runs, ``workloads`` has programs by name, ``settings`` and ``profiles`` the
machine; ``machine`` runs a program on the ``engine``; ``recording`` writes down what a profiler would have,
``truth`` what really happened, ``nsys_export`` puts a recording into nsys's own format, and ``making`` does all of
it. Everything here is modelled and says so.

What it rests on: migrations of 36 captures are reproduced row for row; fault rows follow 4708 rows of an
older profiler (one row per batch). What it cannot rest on: no public capture has an eviction, a copy
between GPUs or a fault row written by nsys. There it follows the driver's source.

What it leaves out: access counters, ATS and HMM, atomics, several processes, several streams per GPU, the
time that a GPU needs for accesses that do not fault, beyond a rate per thread block.
"""

import importlib.util

from nsan.errors import ExtraMissingError


def check_installed() -> None:
    """See that the model can run.

    Raises
    ------
    ExtraMissingError
        If numba, which compiles it, is not installed.
    """
    if importlib.util.find_spec("numba") is None:
        raise ExtraMissingError("The driver model", "numba", "model")
