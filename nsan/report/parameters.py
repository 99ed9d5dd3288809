"""The parameters of a notebook: which it has, of what type, and values for them from the command line.

papermill only logs an unknown parameter, and only warns when a notebook has none; here both are errors
before anything runs.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nsan.errors import NsanError, UsageError
from nsan.text import safe, shortened

TAG: Final = "parameters"
_INJECTED: Final = "injected-parameters"
_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a notebook.

    Attributes
    ----------
    name : str
        What is assigned to.
    type : str
        "bool", "int", "float", "str", "list", or "" where neither annotation nor default say.
    default : Any
        The value in the notebook; None where it is no plain value.
    help : str
        The comment behind it.
    """

    name: str
    type: str
    default: Any = None
    help: str = ""


class NoParametersError(NsanError):
    """A notebook has no cell of parameters."""

    def __init__(self, notebook: str) -> None:
        self.notebook = notebook
        super().__init__(
            f"{safe(notebook)} has no cell tagged `{TAG}`, so nothing can be set in it. In JupyterLab choose "
            "the cell that assigns TRACE, and add the tag under Property Inspector > Cell Tags."
        )


class UnknownParameterError(UsageError):
    """A notebook has no such parameter."""

    def __init__(self, notebook: str, name: str, known: Iterable[Parameter]) -> None:
        self.notebook, self.name = notebook, name
        listed = "\n".join(f"  {_described(each)}" for each in known)
        super().__init__(
            f"{safe(notebook)} has no parameter {shortened(name)!r}. It has:\n{listed or '  none'}"
        )


class BadParameterError(UsageError):
    """A text is no value of a parameter."""

    def __init__(self, text: str, expected: str) -> None:
        self.text, self.expected = text, expected
        super().__init__(f"-p {shortened(text)}: {expected}.")


def _described(parameter: Parameter) -> str:
    kind = f": {parameter.type}" if parameter.type else ""
    default = "" if parameter.default is None else f" = {shortened(repr(parameter.default), 60)}"
    comment = f"  ({shortened(parameter.help)})" if parameter.help else ""
    return safe(f"{parameter.name}{kind}{default}{comment}")


def parameters_of(notebook: Mapping[str, Any], name: str) -> dict[str, Parameter]:
    """Find the parameters of a notebook.

    Parameters
    ----------
    notebook : mapping
        The notebook, of nbformat 4.
    name : str
        Its name, for messages.

    Returns
    -------
    dict of str to Parameter
        By name, in the order of the cell.

    Raises
    ------
    NoParametersError
        If no code cell has the tag.
    NsanError
        If the cell is no Python.
    """
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and TAG in cell["metadata"].get("tags", ()):
            source = cell["source"]
            return _assigned(source if isinstance(source, str) else "".join(source), name)
    raise NoParametersError(name)


def _assigned(source: str, notebook: str) -> dict[str, Parameter]:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        msg = f"{safe(notebook)}: its cell of parameters is no Python ({error.msg}, line {error.lineno})."
        raise NsanError(msg) from error
    comments = _comments(source)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            target: ast.expr = node.target
            annotation = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, annotation = node.targets[0], ""
        else:
            continue
        if isinstance(target, ast.Name):
            default = _value(node.value)
            kind = _type(annotation, default)
            comment = comments.get(node.end_lineno or node.lineno, "")
            found[target.id] = Parameter(target.id, kind, default, comment)
    return found


def _comments(source: str) -> dict[int, str]:
    """Give the comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _value(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None  # computed; only the notebook knows


def _type(annotation: str, default: Any) -> str:
    plain = annotation.strip("'\"").partition("[")[0].strip().lower()
    known = ("bool", "int", "float", "str", "list")
    if plain in known:
        return plain
    return type(default).__name__ if type(default).__name__ in known else ""


def parse_parameters(
    known: Mapping[str, Parameter], texts: Iterable[str], notebook: str
) -> dict[str, Any]:
    """Read values written as ``NAME=VALUE``.

    Parameters
    ----------
    known : mapping of str to Parameter
        Parameters of the notebook.
    texts : iterable of str
        One per value; a name that comes twice keeps the last.
    notebook : str
        Name of the notebook, for messages.

    Returns
    -------
    dict
        Values by name, of the type that the notebook says.

    Raises
    ------
    UsageError
        If a text is not of this form, names no parameter, or its value is not of the type.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise BadParameterError(text, "write NAME=VALUE")
        if name not in known:
            raise UnknownParameterError(notebook, name, known.values())
        found[name] = _parsed(known[name], value)
    return found


def _parsed(parameter: Parameter, text: str) -> Any:
    expected = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "list": "a list, as 0,1 or ['a', 'b']",
    }
    try:
        match parameter.type:
            case "bool":
                return _BOOLEANS[text.strip().lower()]
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "list":
                return _list(text)
            case "str":
                return text
            case _:
                return _guessed(text)
    except (ValueError, KeyError, SyntaxError) as error:
        said = f"{parameter.name} is {expected[parameter.type]}"
        raise BadParameterError(f"{parameter.name}={text}", said) from error


def _list(text: str) -> list[Any]:
    if text.strip().startswith("["):
        value = ast.literal_eval(text.strip())
        if not isinstance(value, list):
            raise ValueError(text)
        return value
    return [_guessed(part.strip()) for part in text.split(",") if part.strip()]


def _guessed(text: str) -> Any:
    """Read a value whose type nobody says: what Python would read, else the text itself."""
    if text.strip().lower() in {"true", "false"}:
        return text.strip().lower() == "true"
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def checked(
    known: Mapping[str, Parameter], values: Mapping[str, Any], notebook: str
) -> dict[str, Any]:
    """Refuse values for parameters that a notebook does not have.

    Parameters
    ----------
    known : mapping of str to Parameter
        Parameters of the notebook.
    values : mapping
        Values by name.
    notebook : str
        Name of the notebook, for messages.

    Returns
    -------
    dict
        The values.

    Raises
    ------
    UnknownParameterError
        If one is not there.
    """
    for name in values:
        if name not in known:
            raise UnknownParameterError(notebook, name, known.values())
    return dict(values)


def hide_paths(notebook: Any, shown: Mapping[str, Any]) -> None:
    """Put names in the place of paths that were handed to a notebook, where it says what it was given.

    Parameters
    ----------
    notebook : NotebookNode
        What papermill ran; changed in place.
    shown : mapping
        By parameter: what is to stand there instead of its value.
    """
    about = notebook["metadata"].pop("papermill", {})
    kept = {
        key: about[key] for key in ("duration", "version", "start_time", "end_time") if key in about
    }
    notebook["metadata"]["papermill"] = kept
    for cell in notebook["cells"]:
        if _INJECTED in cell["metadata"].get("tags", ()):
            cell["source"] = "\n".join(_renamed(line, shown) for line in cell["source"].split("\n"))


def _renamed(line: str, shown: Mapping[str, Any]) -> str:
    name = line.partition("=")[0].strip()
    return f"{name} = {shown[name]!r}" if name in shown else line
