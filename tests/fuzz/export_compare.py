"""A summary of an export beside what plain SQL says of it."""

from __future__ import annotations

from fuzz import export_oracle


def differences(export, document, manifest):
    """Say where a summary and its manifest differ from the rows of an export.

    Parameters
    ----------
    export : fuzz.export_oracle.Export
        The rows.
    document, manifest : dict
        What ``nsan summary --json`` printed, and the manifest of its store.

    Returns
    -------
    list of str
        One text for each figure that is wrong.
    """
    if export.views:
        return [f"a view was read as a table: {export.views}"]
    expected = export_oracle.figures(export)
    groups = expected.pop("migration groups", None)
    found = [
        f"{name}: {got!r}, and plain SQL says {right!r}"
        for name, right in expected.items()
        if not _is_right(got := _figure(name, document, manifest), right)
    ]
    if groups is not None and document["migrations"]["groups"] is not None:
        found += _group_differences(groups, document["migrations"]["groups"])
    losses, counted = export.losses(), manifest["info"]["losses"]
    known = {table: columns for table, columns in counted.items() if table in export_oracle.TABLES}
    if losses != known:
        found.append(f"losses: {known}, and plain SQL says {losses}")
    return found


def _is_right(got, right):
    return got in right if isinstance(right, tuple) else got == right


def _figure(name, document, manifest):
    first, _, rest = name.partition(".")
    if first == "counts":
        return manifest["totals"]["counts"][rest]
    if not rest:
        return document[first]
    value = document[first][rest]
    if rest == "by_access" and value is not None:
        return {access: each["n_rows"] for access, each in value.items()}
    return value


def _group_differences(expected, rows):
    got = {
        tuple(row[key] for key in ("direction", "cause", "device_id", "pid")): row for row in rows
    }
    if set(got) != set(expected) or len(got) != len(rows):
        return [f"groups: {sorted(map(str, got))}, and plain SQL says {sorted(map(str, expected))}"]
    return [
        f"group {key} {name}: {got[key][name]!r}, and plain SQL says {right!r}"
        for key, figures in expected.items()
        for name, right in figures.items()
        if got[key][name] != right
        and not (name.endswith("_va") and _same_address(got[key][name], right))
    ]


def _same_address(got, right):
    return got is not None and right is not None and int(got, 16) == int(right, 16)
