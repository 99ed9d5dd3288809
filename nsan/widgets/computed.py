"""Traits that are checked by a function, or computed when they are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, ClassVar

import traitlets

from nsan.errors import UsageError, listed
from nsan.text import shortened


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


class Sealed:
    """Refuses public attributes that a view does not have, once it is made: a typo sets nothing.

    Attributes
    ----------
    settable : tuple of str
        What the message offers.
    """

    settable: ClassVar[tuple[str, ...]] = ()
    _is_made = False

    def __setattr__(self, name: str, value: Any) -> None:
        known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if self._is_made and not known:
            close = difflib.get_close_matches(name, self.settable, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            what = f"The view has no {shortened(name)!r}.{meant}"
            raise UsageError(f"{what} What can be set: {listed(self.settable)}.")
        super().__setattr__(name, value)
