"""Compile functions of tensors once a setting, however many runs use them.

A function is traced to a graph of tensor operations, the key under which its compiled form is found again. Every tensor
is an input of the graph, so another image, label, seed or other weights find the same graph; a model's structure or a
prior's weight is in it. What the compiler made lies on disk for other processes.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from leakscope.contracts.disk import cache_home, private_folder

Function = Callable[..., tuple[Tensor, ...]]
#: How many compiled functions a process keeps; each holds some megabytes of code.
LIMIT = 16
#: Where the compiler keeps its results, and its switch for probing the processor's vector instructions.
DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
PROBE = "TORCHINDUCTOR_VEC_ISA_OK"

REUSED = "compiled before in this process"
FIRST = "a step that this process had not compiled before"
OTHER_INPUTS = "the same step with inputs of another shape, precision or device, or another number of threads"
DROPPED = f"compiled before in this process, but {LIMIT} others since"


class CannotCompile(Exception):
    pass


class Compiled(NamedTuple):
    function: Function
    #: Whether it was compiled for this call, and why.
    fresh: bool
    because: str


class CompiledFunctions:
    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._functions: OrderedDict[tuple[str, str], Callable[..., Any]] = OrderedDict()
        self._met: dict[int, set[int]] = {}  # hashes of graphs, and of the inputs they were compiled for

    def __len__(self) -> int:
        return len(self._functions)

    def get(self, function: Function, inputs: Sequence[Tensor]) -> Compiled:
        with _explained("traced"):
            graph, constants = _trace(function, inputs)
        each = [f"{v.dtype} {v.device} {tuple(v.shape)} {v.stride()}" for v in (*inputs, *constants)]
        described = "; ".join([f"{torch.get_num_threads()} threads", *each])
        key = (graph.code, described)
        because = self._reason(key)
        fresh = because != REUSED
        if fresh:
            with _explained("compiled"):
                self._functions[key] = _compile(graph, (*inputs, *constants))
            while len(self._functions) > self.limit:
                self._functions.popitem(last=False)
        self._functions.move_to_end(key)
        self._met.setdefault(hash(graph.code), set()).add(hash(described))
        code = self._functions[key]

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return tuple(code(*tensors, *constants))

        return Compiled(call, fresh, because)

    def _reason(self, key: tuple[str, str]) -> str:
        if key in self._functions:
            return REUSED
        graph, described = map(hash, key)
        if graph not in self._met:
            return FIRST
        return DROPPED if described in self._met[graph] else OTHER_INPUTS


FUNCTIONS = CompiledFunctions()


def _trace(function: Function, inputs: Sequence[Tensor]) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """The graph of ``function``, and the tensors that it wants after ``inputs``: those it had from elsewhere."""
    module = make_fx(function)(*inputs)
    graph, constants = module.graph, []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        constants.append(getattr(module, node.target).detach())
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant_{len(constants)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return GraphModule({}, graph), tuple(constants)


def _compile(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    # Probing what the processor's flags say already starts three processes.
    options: dict[str, Any] = {} if PROBE in os.environ else {"cpp.vec_isa_ok": True}
    compiled: Callable[..., Any]
    with torch.no_grad(), _directory():
        import torch._inductor as inductor  # two seconds, which a run that compiles nothing need not wait

        if hasattr(inductor, "standalone_compile"):  # torch 2.8 and later: the graph is not traced a second time
            compiled = inductor.standalone_compile(
                graph, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": options}
            )
        else:
            compiled = torch.compile(graph, dynamic=False, options=options)
        compiled(*inputs)
    return compiled


@contextmanager
def _directory() -> Iterator[None]:
    """The compiler's directory: the user's own choice, else one in our cache, else, if that fails, its default."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = os.environ.get(DIRECTORY)
    folder, usable = cache_home() / "compiled", False
    with suppress(OSError):
        usable = os.access(private_folder(folder), os.W_OK)
    # The compiler writes its default into the environment as soon as it is imported: that is nobody's choice.
    if before in (None, os.path.abspath(default_cache_dir())) and usable:
        os.environ[DIRECTORY] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(DIRECTORY, None)
        else:
            os.environ[DIRECTORY] = before


@contextmanager
def _explained(verb: str) -> Iterator[None]:
    try:
        yield
    # A model may do anything while it is traced, and a compiler fail in as many ways as there are machines.
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise CannotCompile(f"it cannot be {verb}: {type(error).__name__}: {first[:200]}") from error
