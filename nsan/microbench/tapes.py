"""Training steps of a network as a tape: the text that ``dl_bench`` plays on a GPU.

The layer tables stay in :mod:`nsan.model.networks`; a tape is a tensor program written out. It is UTF-8 text, one
operation a line, fields separated by tabs, lines ended by LF; a name is always the last field, so that it may hold
blanks. Lines in this order::

    nsan-tape 1                       what this is, and the version of the format
    network NAME
    fact    KEY  VALUE                for the record: parameter_count, peak_bytes, batch ...; any number of them
    c       ID BYTES ROLE NAME        the memory of a tensor is allocated; ids count up from 0
    d       ID                        it is freed
    h       ID                        the CPU writes all of it
    k       FLOPS R READ.. W WRITE.. NAME     a kernel: R reads, then W writes
    s       NUMBER                    a training step begins; steps count up from 1
    p       forward|backward|update   a phase of the step begins, in this order
    end     N                         the last line: how many operations (c d h k s p) there were

READ and WRITE are ids; a tensor that is changed in place is in both. It is used whole, but for lookups, where READ is
``ID:BYTES``, the first bytes of the tensor, or ``ID:BYTES/ROW``, that many bytes in rows of ROW byte that lie anywhere
in it. A tape without its last line was cut short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

from nsan.errors import ProgramError
from nsan.model.networks.layers import INT64_BYTES
from nsan.model.networks.tensors import (
    Compute,
    Create,
    Drop,
    HostWrite,
    Operation,
    Phase,
    Step,
    Tensor,
    TensorProgram,
    check,
)

FORMAT_VERSION: Final = 1
"""Of the text; ``dl_bench`` refuses others."""

LOAD_BYTES: Final = 16
"""A thread of ``dl_bench`` loads that many bytes at once, so parts of a tensor are multiples of it."""


def tape_text(program: TensorProgram) -> str:
    """Write a tensor program as a tape.

    Parameters
    ----------
    program : TensorProgram
        Of :meth:`nsan.model.networks.Trainable.build`, or any that :func:`nsan.model.networks.tensors.check` finds
        right.

    Returns
    -------
    str
        The tape: see the module for the format.

    Raises
    ------
    ProgramError
        If the program is not right, or a name cannot be written on one line.
    """
    problems = check(program)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ProgramError(
            f"{program.name} is no right tensor program: {problems[0]}{more}", "Repair the program"
        )
    lines = [_line(f"nsan-tape {FORMAT_VERSION}"), _line("network", program.name)]
    lines += [_line("fact", key, value) for key, value in _plain_facts(program.facts)]
    writer = _Writer(_sparse_reads(program))
    lines += [writer.line(operation) for operation in program.operations]
    lines.append(_line("end", len(program.operations)))
    return "".join(lines)


def _line(*fields: object) -> str:
    texts = [str(each) for each in fields]
    for text in texts:
        if not text or not text.isprintable():
            problem = f"{text!r} cannot be written on a tape"
            raise ProgramError(problem, "Choose a name without tabs and line ends")
    return "\t".join(texts) + "\n"


def _plain_facts(facts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the facts that are one number or one word."""
    for key, value in facts.items():
        if isinstance(value, (int, float, str)):
            yield key, value


def _sparse_reads(program: TensorProgram) -> Mapping[str, int]:
    return cast("Mapping[str, int]", program.facts.get("sparse_reads", {}))


class _Writer:
    """Numbers tensors in the order of their creation, and writes operations."""

    def __init__(self, sparse_reads: Mapping[str, int]) -> None:
        self._sparse_reads = sparse_reads
        self._ids: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def line(self, operation: Operation) -> str:
        """Write one operation."""
        match operation:
            case Create(tensor):
                number = self._ids[tensor.name] = len(self._ids)
                self._tensors[tensor.name] = tensor
                return _line("c", number, tensor.n_bytes, tensor.role, tensor.name)
            case Drop(name):
                return _line("d", self._ids[name])
            case HostWrite(name):
                return _line("h", self._ids[name])
            case Step(number):
                return _line("s", number)
            case Phase(name):
                return _line("p", name)
            case Compute():
                return self._kernel(operation)

    def _kernel(self, kernel: Compute) -> str:
        reads = [str(self._ids[name]) for name in kernel.reads]
        if kernel.name in self._sparse_reads:
            table = max(kernel.reads, key=lambda name: self._tensors[name].n_bytes)
            part = self._part(kernel, table, self._sparse_reads[kernel.name])
            reads[kernel.reads.index(table)] += part
        writes = [str(self._ids[name]) for name in kernel.writes]
        # A count of FLOPs beyond 2**53 would not be exact, and does not matter.
        flops = round(kernel.flops)
        return _line("k", flops, len(reads), *reads, len(writes), *writes, kernel.name)

    def _part(self, kernel: Compute, table: str, n_bytes: int) -> str:
        """Say which part of its table a lookup reads.

        Rows lie anywhere if they are chosen by what came with the batch: words of a text. Positions count up, so
        that the rows at the front are read, and of a mask its front.
        """
        if n_bytes >= self._tensors[table].n_bytes:
            return ""
        chosen_by = [name for name in kernel.reads if name != table]
        part = f":{n_bytes}"
        row_bytes = LOAD_BYTES
        if chosen_by and self._tensors[chosen_by[0]].role == "input":
            n_rows = max(self._tensors[chosen_by[0]].n_bytes // INT64_BYTES, 1)
            row_bytes = self._tensors[kernel.writes[0]].n_bytes // n_rows
            part += f"/{row_bytes}"
        if n_bytes % LOAD_BYTES or row_bytes % LOAD_BYTES:
            problem = f"{kernel.name} reads {n_bytes} B in rows of {row_bytes} B"
            raise ProgramError(problem, f"Both must be multiples of {LOAD_BYTES}")
        return part
