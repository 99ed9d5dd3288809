"""Settings as a snapshot file has them: what makes no sense in it is left out and named, never refused.

Source: ``allocator.md`` 2.1 and 7. A file has most settings under keys of their own, and the text of
``PYTORCH_CUDA_ALLOC_CONF``, which also holds those without such a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from nsan.errors import UsageError
from nsan.torch_alloc.conf import field_of, pairs_of, parse_conf
from nsan.torch_alloc.constants import N_DIVISIONS
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings, tie_break_of

CONF: Final = "PYTORCH_CUDA_ALLOC_CONF"
"""Name of the row that holds the text of the environment variable."""

_MOST_CONF_CHARACTERS: Final = 4096
_FLAGS: Final = {"True": True, "False": False}
_CACHING: Final = {"caching": True, "native": True, "plain": False}
_DIVISIONS: Final = "roundup_power2_divisions"


def settings_of(values: Mapping[str, str]) -> tuple[AllocatorSettings, list[str]]:
    """Read the settings of a snapshot, and name those that make no sense.

    Parameters
    ----------
    values : mapping of str to str
        The table ``allocator_settings``: value by name.

    Returns
    -------
    tuple of (AllocatorSettings, list of str)
        A key of its own counts more than the text of ``PYTORCH_CUDA_ALLOC_CONF``. What neither of them
        names, or only with a value that makes no sense, has PyTorch's default. The list names each
        setting that has such a value, once.

    Examples
    --------
    >>> settings, odd = settings_of({"max_split_size": "inf", CONF: "large_segment_size_mb:40"})
    >>> settings.max_split_bytes, settings.large_segment_bytes >> 20, odd
    (None, 40, ['max_split_size'])
    """
    own, odd = _own(values)
    settings, unread = _of_conf(values.get(CONF) or "")
    odd += [name for name, field in unread.items() if field not in own]
    return replace(settings, **own), list(dict.fromkeys(odd))


def odd_settings(values: Mapping[str, str]) -> list[str]:
    """Name the settings of a snapshot whose values make no sense, so that the default is used.

    Parameters
    ----------
    values : mapping of str to str
        The table ``allocator_settings``: value by name.

    Returns
    -------
    list of str
        Names as in the file, or as in ``PYTORCH_CUDA_ALLOC_CONF`` if the value stands there; this name
        itself for a part of the text that is no setting nsan knows.

    Examples
    --------
    >>> odd_settings({"garbage_collection_threshold": "nan", CONF: "large_segment_size_mb:0,x:1"})
    ['garbage_collection_threshold', 'large_segment_size_mb', 'PYTORCH_CUDA_ALLOC_CONF']
    """
    return settings_of(values)[1]


def _own(values: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings that have a key of their own: value by field, and the names of odd ones."""
    found: dict[str, Any] = {}
    odd: list[str] = []
    for name, (field, read) in _READERS.items():
        text = values.get(name)
        if text is None:
            continue
        try:
            value = read(text)
            replace(DEFAULT_SETTINGS, **{field: value})
        except (ValueError, UsageError):
            odd.append(name)
        else:
            found[field] = value
    if any(f"{_DIVISIONS}.{1 << i}" in values for i in range(N_DIVISIONS)):
        found[_DIVISIONS] = tuple(_division(values, 1 << i, odd) for i in range(N_DIVISIONS))
    return found, odd


def _of_conf(text: str) -> tuple[AllocatorSettings, dict[str, str]]:
    """Read the text of the variable pair by pair; give the field by name of what cannot be read."""
    settings = DEFAULT_SETTINGS
    unread: dict[str, str] = {}
    try:
        if len(text) > _MOST_CONF_CHARACTERS:
            return settings, {CONF: ""}
        pairs = pairs_of(text)
    except UsageError:
        return settings, {CONF: ""}
    for pair in pairs:
        try:
            settings = parse_conf(pair, settings)
        except UsageError:
            key = pair.partition(":")[0].strip()
            field = field_of(key)
            unread[CONF if field is None else key] = field or ""
    return settings, unread


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _split_limit(text: str) -> int | None:
    size = _whole(text)
    return None if size == -1 else size


def _known(text: str, meanings: Mapping[str, bool]) -> bool:
    if text not in meanings:
        raise ValueError(text)
    return meanings[text]


def _tie_break(text: str) -> str:
    found = re.match(r"([0-9]{1,3})\.([0-9]{1,3})(?![0-9])", text)
    if found is None:
        raise ValueError(text)
    return tie_break_of((int(found[1]), int(found[2])))


def _division(values: Mapping[str, str], size: int, odd: list[str]) -> int:
    """Read the steps of one size; what is no power of two is none, and named."""
    name = f"{_DIVISIONS}.{size}"
    text = values.get(name)
    try:
        steps = 0 if text is None else _whole(text)
    except ValueError:
        steps = -1
    if steps < 0 or steps & (steps - 1):
        odd.append(name)
        return 0
    return steps


_READERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "max_split_size": ("max_split_bytes", _split_limit),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "expandable_segments": ("expandable_segments", lambda text: _known(text, _FLAGS)),
    "torch_version": ("tie_break", _tie_break),
    "allocator": ("is_caching", lambda text: _known(text, _CACHING)),
}
"""Field of the settings and reader of its text, by name in the file."""
