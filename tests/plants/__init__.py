"""Programs with one planted problem each, and the same programs with the remedy; and clean ones.

Each module of this package has ``PLANTS`` and ``CLEAN``, tuples of what :mod:`planting` knows.
"""

from importlib import import_module
from pkgutil import iter_modules

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
PLANTS = {each.name: each for module in _MODULES for each in getattr(module, "PLANTS", ())}
CLEAN = {each.name: each for module in _MODULES for each in getattr(module, "CLEAN", ())}
