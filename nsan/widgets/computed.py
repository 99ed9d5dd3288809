"""Traits that are checked by a function, or computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traitlets

from nsan.errors import UsageError


class Change(traitlets.Bunch):
    """A change whose new value is computed when an observer reads it."""

    def __getitem__(self, key: str) -> Any:
        if key == "new":
            return getattr(self["owner"], self["name"])
        return super().__getitem__(key)

    def __getattr__(self, key: str) -> Any:
        return self[key] if key in self or key == "new" else super().__getattr__(key)


class Checked(traitlets.TraitType[Any, Any]):
    """A trait whose every value, None too, is checked by a function of its object and the value.

    Parameters
    ----------
    check : callable
        Returns the value as it is kept, or raises.
    default : object
        The value before one is set; it is not checked.
    """

    def __init__(self, check: Callable[[Any, Any], Any], default: Any = None) -> None:
        super().__init__(default_value=default)
        self._check = check

    def validate(self, obj: traitlets.HasTraits, value: Any) -> Any:
        """Check a value, as traitlets asks for it."""
        return self._check(obj, value)


class Computed(traitlets.TraitType[Any, Any]):
    """A trait that cannot be set.

    Parameters
    ----------
    compute : callable
        Computes the value from the object that has the trait.
    advice : str
        What to set instead.
    """

    info_text = "computed when read"

    def __init__(self, compute: Callable[[Any], Any], advice: str) -> None:
        super().__init__()
        self._compute, self._advice = compute, advice

    def get(self, obj: traitlets.HasTraits, cls: Any = None) -> Any:  # noqa: ARG002  its signature
        """Compute the value, as traitlets asks for it."""
        return self._compute(obj)

    def set(self, obj: traitlets.HasTraits, value: Any) -> None:  # noqa: ARG002  its signature
        """Refuse a value."""
        raise UsageError(f"{self.name} is computed: {self._advice}")
