"""Training steps of a real PyTorch model in managed memory, with and without PyTorch's caching allocator.

``python -m nsan.microbench.torch_uvm``, or ``python torch_uvm.py`` where nsan is not installed: this file, with
the other ``torch_*.py`` beside it, needs PyTorch and Python 3.9 or newer, nothing else. ``--allocator raw`` gives every
tensor a cudaMallocManaged of its own (``change_current_allocator``); ``caching`` puts PyTorch's own cache over managed
segments (a ``MemPool``, entered once). Both load ``managed_alloc``, which ``nsan bench build`` compiles.

Like the C++ programs it prints one JSON line, ends with their exit statuses and writes their tables (``--out``). Its
NVTX ranges (step, forward, backward, update) are in the default domain, the only one of torch.cuda.nvtx; by the mark
``nsan clock MICROSECONDS`` nsan aligns the memory snapshot (``--snapshot``) with the trace. A phase ends when the GPU
is done with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import sys
import time
import weakref
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from nsan.microbench import torch_machine as machine
    from nsan.microbench import torch_networks as networks
    from nsan.microbench import torch_record as recording
else:
    # The files alone, or of this nsan: an other one that is installed, too, has other files.
    home = f"{__package__}." if __package__ else ""
    machine = importlib.import_module(f"{home}torch_machine")
    networks = importlib.import_module(f"{home}torch_networks")
    recording = importlib.import_module(f"{home}torch_record")

NAME = "torch_uvm"
PATHS = ("out", "library", "snapshot")
CHOICES = {
    "network": (list(networks.NETWORKS), "what is trained"),
    "allocator": (["raw", "caching"], "cudaMallocManaged for each tensor, or for a cache"),
    "prefetch": (["none", "ahead"], "one module ahead of its use, on a stream of its own"),
    "advice": (["none", *machine.ADVICES], "on parameters and activations from 1 MiB on"),
}
NUMBERS = {
    "batch": 16,
    "width": 64,
    "depth": 4,
    "image": 64,
    "sequence": 128,
    "vocabulary": 8192,
    "iterations": 3,
    "seed": 1,
}
"""Flags that choose, the default first; and sizes with their defaults."""

LEAST_BYTES = 1 << 20
"""Smaller tensors get no hint: a call would cost more than it can save."""

EndedError = machine.EndedError


# Hints: what is prefetched or advised, and when.


def neighbour(order: Sequence[str], name: str, step: int) -> str | None:
    """Name the module that runs ``step`` places after another; -1 is the next of the backward pass.

    Examples
    --------
    >>> neighbour(["a", "b"], "a", 1), neighbour(["a", "b"], "a", -1), neighbour([], "a", 1)
    ('b', None, None)
    """
    at = order.index(name) + step if name in order else -1
    return order[at] if 0 <= at < len(order) else None


def worth_a_hint(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keep the ranges (address, bytes) that are large enough, each once.

    Examples
    --------
    >>> worth_a_hint([(0, 1 << 20), (8, 100), (0, 1 << 20)])
    [(0, 1048576)]
    """
    return list(dict.fromkeys(place for place in places if place[1] >= LEAST_BYTES))


def place_of(tensor: Any) -> tuple[int, int]:
    """Give address and bytes of the memory that a tensor is in."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Hooks:
    """Hooks of the modules: is memory managed, prefetch ahead of its use, advice where it is new."""

    def __init__(self, runtime: machine.Runtime, advice: str, stream: int | None) -> None:
        self._runtime, self._advice, self._stream = runtime, advice, stream
        self._order: list[str] = []
        self._own: dict[str | None, list[tuple[int, int]]] = {None: []}
        self._used: dict[str | None, list[Any]] = {None: []}
        self.is_checking = True

    def put_on(self, model: Any) -> None:
        """Add the hooks to every module that has no others inside."""
        for name, module in model.named_modules():
            if not list(module.children()):
                self._put_on(name, module)

    def check(self, name: str, tensors: Iterable[Any]) -> None:
        """End the run if a tensor is not in managed memory."""
        for tensor in tensors:
            at, n_bytes = place_of(tensor)
            if n_bytes and not self._runtime.is_managed(at):
                raise EndedError(
                    machine.FAILED,
                    f"{name} is not in managed memory: PyTorch allocated it past the allocator that it was given",
                )

    def _put_on(self, name: str, module: Any) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        self.check(name, own)
        self._own[name] = worth_a_hint(map(place_of, own))
        self._advise(self._own[name])
        module.register_forward_pre_hook(lambda *_: self._before(name))
        module.register_forward_hook(lambda _, given, made: self._after(name, [*given, made]))
        if self._stream is not None:
            module.register_full_backward_pre_hook(lambda *_: self._before_backward(name))

    def _before(self, name: str) -> None:
        if name not in self._order:
            self._order.append(name)
        self._prefetch(self._own[neighbour(self._order, name, 1)])

    def _after(self, name: str, tensors: list[Any]) -> None:
        if self.is_checking:
            self.check(f"an activation of {name}", tensors)
        # PyTorch holds what the backward pass needs; this must not hold it any longer.
        self._used[name] = [weakref.ref(tensor) for tensor in tensors]
        if self._advice != "read-mostly":  # an activation is written each step
            self._advise(worth_a_hint([place_of(tensors[-1])]))

    def _before_backward(self, name: str) -> None:
        following = neighbour(self._order, name, -1)
        live = [tensor for ref in self._used[following] for tensor in [ref()] if tensor is not None]
        self._prefetch([*self._own[following], *worth_a_hint(map(place_of, live))])

    def _prefetch(self, places: Iterable[tuple[int, int]]) -> None:
        if self._stream is not None:
            for place in places:
                self._runtime.prefetch(place, self._stream)

    def _advise(self, places: Iterable[tuple[int, int]]) -> None:
        if self._advice != "none":
            for place in places:
                self._runtime.advise(place, self._advice)


# The run.


def train(torch: Any, axes: Namespace, record: recording.Record, hooks: Hooks) -> float:
    """Train for some steps; give the last loss."""
    device = torch.device("cuda", axes.device)
    torch.cuda.nvtx.mark(f"nsan clock {time.time_ns() // 1000}")
    with record.phase(torch, "init"):
        torch.manual_seed(axes.seed)
        model = networks.network(torch, axes).to(device)
        given, wanted = (tensor.to(device) for tensor in networks.batch_of(torch, axes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            record.allocated(name, "parameter", place_of(tensor))
        for name, tensor in [("input", given), ("target", wanted)]:
            record.allocated(name, "input", place_of(tensor))
        hooks.put_on(model)
    loss: Any = None
    for iteration in range(axes.iterations):
        torch.cuda.nvtx.range_push("step")
        try:
            with record.phase(torch, "forward", iteration):
                loss = networks.loss_of(torch, model, given, wanted)
            with record.phase(torch, "backward", iteration):
                loss.backward()
            if hooks.is_checking:
                hooks.check("a gradient", (p.grad for p in model.parameters()))
            with record.phase(torch, "update", iteration):
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.nvtx.range_pop()
        if hooks.is_checking:
            for name, parameter in model.named_parameters():
                momentum = optimizer.state[parameter]["momentum_buffer"]
                record.allocated(f"{name}.momentum", "optimizer", place_of(momentum))
        hooks.is_checking = False
    return float(loss.item())


def run(torch: Any, axes: Namespace, record: recording.Record, about: dict[str, Any]) -> None:
    """Check the machine, take the ballast, put PyTorch on managed memory, and train."""
    about["notes"] = machine.check_version(torch.__version__, axes.allocator)
    machine.check_environment(os.environ, axes.allocator)
    runtime = machine.Runtime(axes.device)
    about["device"] = machine.facts_of(runtime)
    about["footprint"] = hold(torch, axes, runtime)
    library = str(axes.library or build_library())
    memory = torch.cuda.memory
    try:
        names = ("nsan_managed_alloc", "nsan_managed_free")
        allocator = memory.CUDAPluggableAllocator(library, *names)
    except (OSError, AttributeError) as error:
        message = f"--library {Path(library).name} cannot be loaded: {error}"
        raise EndedError(machine.USAGE, message) from error
    # Choosing algorithms by trial asks the allocator how much is cached, which a pluggable one cannot tell.
    torch.backends.cudnn.benchmark = False
    with contextlib.ExitStack() as stack:
        # Backward threads of their own would allocate outside of the pool.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if axes.allocator == "raw":
            memory.change_current_allocator(allocator)  # before PyTorch touches the GPU at all
        torch.cuda.set_device(axes.device)
        about["device"]["name"] = torch.cuda.get_device_name(axes.device)
        if axes.allocator == "caching":
            memory._record_memory_history(stacks="python")  # noqa: SLF001 - it has no other name
            pool = torch.cuda.MemPool(allocator.allocator())
            stack.enter_context(torch.cuda.use_mem_pool(pool))
        stream = torch.cuda.Stream() if axes.prefetch == "ahead" else None
        hooks = Hooks(runtime, axes.advice, None if stream is None else stream.cuda_stream)
        about["loss"] = train(torch, axes, record, hooks)
        if axes.allocator == "caching":
            about["peak_reserved_bytes"] = memory.max_memory_reserved()
            snapshot = memory._snapshot()  # noqa: SLF001
            if axes.snapshot is not None:
                recording.write_snapshot(axes.snapshot, snapshot)
            # Instead of the tensors, which are blocks in them.
            segments = recording.segments_of(snapshot, tuple(pool.id), record.start_utc_ns)
            record.allocations = segments
    about["verified"] = math.isfinite(about["loss"])
    if not about["verified"]:
        raise EndedError(machine.FAILED, f"the loss became {about['loss']}: choose another --seed")


def hold(torch: Any, axes: Namespace, runtime: machine.Runtime) -> dict[str, Any]:
    """Plan the footprint, refuse it where it could do harm, and take the ballast."""
    plan = networks.estimate(torch, axes)
    managed, (free, _) = plan["managed_bytes"], runtime.memory()
    ballast = machine.ballast_of(managed, free, axes.oversubscription_factor)
    host = machine.host_available()
    machine.check_footprint(managed, free - ballast, host, is_allowed=axes.allow_oversubscription)
    runtime.take(ballast)
    available, _ = runtime.memory()
    taken = {"free_bytes": free, "ballast_bytes": ballast, "available_bytes": available}
    return {**plan, **taken, "oversubscription_factor": managed / max(available, 1)}


def build_library() -> Path:
    """Find the library beside this file, or let nsan build it."""
    beside = Path(__file__).with_name("libmanaged_alloc.so")
    if beside.exists():
        return beside
    try:
        building = importlib.import_module("nsan.microbench.building")
        problem: type[Exception] = importlib.import_module("nsan.errors").NsanError
    except ImportError as error:
        message = (
            "--library FILE is needed: `nsan bench build managed_alloc` makes libmanaged_alloc.so"
        )
        raise EndedError(machine.USAGE, message) from error
    try:
        path: Path = building.built(["managed_alloc"])["managed_alloc"]
    except problem as error:
        raise EndedError(machine.FAILED, str(error)) from error
    return path


class Parser(ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with the message."""
        raise EndedError(machine.USAGE, f"{message}; see --help")


def whole(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def factor(text: str) -> float:
    """Read an oversubscription factor."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"{text!r} is not a factor above 0, as 1.25")


def is_empty(folder: Path) -> bool:
    """Tell whether a path is an empty folder."""
    return folder.is_dir() and not any(folder.iterdir())


def parse(arguments: Sequence[str]) -> Namespace:
    """Read the flags."""
    parser = Parser(prog=NAME, description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    for name, (choices, about) in CHOICES.items():
        add(f"--{name}", choices=choices, default=choices[0], help=f"{about}; default {choices[0]}")
    for name, value in NUMBERS.items():
        add(f"--{name}", type=whole, default=value, metavar="N", help=f"default {value}")
    add("--oversubscription-factor", type=factor, metavar="F", help="take GPU memory: footprint/F")
    add("--allow-oversubscription", action="store_true", help="some drivers can hang evicting")
    add("--device", type=int, default=0, metavar="N", help="CUDA ordinal; default 0")
    add("--library", type=Path, metavar="FILE", help="libmanaged_alloc.so of `nsan bench build`")
    add("--out", type=Path, metavar="FOLDER", help="new folder for the truth tables")
    add("--snapshot", type=Path, metavar="FILE", help="memory snapshot (caching only)")
    axes = parser.parse_args(arguments)
    head = networks.HEAD_WIDTH
    if axes.network == "transformer" and axes.width > head and axes.width % head:
        parser.error(f"--width {axes.width}: a transformer takes a multiple of {head}, or less")
    if axes.snapshot is not None and axes.allocator == "raw":
        parser.error("--snapshot: without a cache there is nothing to show (--allocator caching)")
    if axes.out is not None and axes.out.exists() and not is_empty(axes.out):
        parser.error(f"--out {axes.out} is there and holds something: name a new folder")
    return axes


def described(axes: Namespace, record: recording.Record, about: Mapping[str, Any], end: str) -> Any:
    """Make run.json: no path, no name of a host or user."""
    return {
        "nsan_microbench": 1,
        "program": NAME,
        "status": "ok",
        "reason": re.sub(r"/\S*/", "", end) or None,
        "pid": os.getpid(),
        "start_utc_ns": record.start_utc_ns,
        "profiled": machine.is_profiled(),
        "axes": {name: value for name, value in vars(axes).items() if name not in PATHS},
        "driver": machine.driver_facts(),
        "phases": [
            {"name": name, "iteration": i, "ns": None if stop is None else stop - start}
            for name, i, start, stop in record.phases
        ],
        **about,
    }


def ended(axes: Namespace, record: recording.Record, about: dict[str, Any]) -> tuple[int, str]:
    """Run to the end, whatever it is; give exit status and reason."""
    try:
        try:
            torch = importlib.import_module("torch")
        except ImportError as error:
            message = f"PyTorch cannot be imported ({error}): install it, as with pip install torch"
            raise EndedError(machine.SKIPPED, message) from error
        about["torch"] = torch.__version__
        run(torch, axes, record, about)
    except EndedError as error:
        return error.status, str(error)
    except KeyboardInterrupt:
        return machine.INTERRUPTED, "interrupted"
    except (RuntimeError, OSError) as error:  # what PyTorch and the machine say
        return machine.FAILED, str(error)
    return machine.DONE, ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print one JSON line, or one line that says what stands against it."""
    record = recording.Record()
    about: dict[str, Any] = {"device": None, "footprint": None, "verified": False, "torch": None}
    try:
        axes = parse(sys.argv[1:] if arguments is None else arguments)
        status, reason = ended(axes, record, about)
        about |= {"status": machine.STATUSES[status], "network": axes.network}
        document = described(axes, record, about, reason)
        if axes.out is not None:
            recording.write_tables(axes.out, record, document)
    except (EndedError, OSError) as error:
        status, reason = getattr(error, "status", machine.FAILED), str(error)
    if status != machine.DONE:
        sys.stderr.write(f"{NAME}: {' '.join(reason.split())}\n")
        return status
    sys.stdout.write(json.dumps(document) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
