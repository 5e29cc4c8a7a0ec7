"""Records a forward as a flat list of operators at fixed addresses: what the "trace" backend replays.

`record` runs the forward under make_fx and writes its graph as straight-line Python, one line an operator:

    t = aten_t(_param_constant0())
    aten_addmm_out(_param_constant1(), view, t, out=addmm)
    native_layer_norm = aten_native_layer_norm(add, [288], _param_constant2(), _param_constant3(), 1e-05)
    aten_mul__Tensor(view_as_complex_1, view_3)

Inputs, and results that lie in a `MemoryPool`, are constants of that code, and so are all views of them. Parameters are
held by weak reference, so that the program keeps no weight alive that the module has replaced. Operators that cannot
write to a given address make a fresh result, which is freed after its last use.

Test: tests/test_graph_backends.py.
"""

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..kernels.direct_calls import DIRECT_CALLS
from ..private_api import direct_operator, operator_schema

_ALIGNMENT = 64  # bytes of a block of the pool

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default)
_OUT_VARIANTS = {
    _aten.addmm.default: _aten.addmm.out,
    _aten.add.Tensor: _aten.add.out,
    _aten.mul.Tensor: _aten.mul.out,
    _aten.gelu.default: _aten.gelu.out,
    _aten.cat.default: _aten.cat.out,
    _aten.index_select.default: _aten.index_select.out,
}
# The same kernels by a shorter way: torch's own bindings read arguments faster than an OpOverload does.
_BINDINGS = {
    _aten.addmm.out: torch.addmm,
    _aten.add.out: torch.add,
    _aten.mul.out: torch.mul,
    _aten.gelu.out: torch.nn.functional.gelu,
    _aten.index_select.out: torch.index_select,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.t.default: Tensor.t,
    _aten.view.default: Tensor.view,
    _aten.select.int: torch.select,
    _aten.unbind.int: torch.unbind,
    _aten.view_as_complex.default: torch.view_as_complex,
    _aten.mul_.Tensor: Tensor.mul_,
    **DIRECT_CALLS,
}


class HasCurrentTensor(Protocol):
    """An object whose `current` tensor may be another one at the next replay: a packed copy of a weight."""

    current: Tensor | None


class MemoryPool:
    """Blocks of host memory, (n,) uint8 each, that stay where they are and are never released.

    All programs of one backend share a pool, because only one of them runs at a time. Running one overwrites the
    results of the others. Record the largest first: the smaller ones then reuse its blocks.
    """

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def reuse(self) -> None:
        """Marks every block as free, before another program is recorded."""
        self._free = list(self.blocks)

    def take(self, nbytes: int) -> Tensor:
        """The smallest free block of at least `nbytes`, or a new one."""
        fitting = [index for index, block in enumerate(self._free) if block.nbytes >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        block = torch.zeros(max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT, dtype=torch.uint8, device="cpu")
        self.blocks.append(block)
        return block

    def give_back(self, block: Tensor) -> None:
        self._free.append(block)

    def poison(self) -> None:
        """Fills all blocks with NaN."""
        for block in self.blocks:
            block.view(torch.float32).fill_(float("nan"))


@dataclass(frozen=True)
class FlatProgram:
    """Attributes:
    source: the code, for reading.
    output: the result; the next run of any program of the same pool overwrites it.
    operators: how many are called.
    run: runs them, without gradients: results are written in place.
    """

    source: str
    output: Tensor
    operators: int
    run: Callable[[], None]


def record(
    forward: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    pool: MemoryPool,
    packed_copies: Mapping[int, HasCurrentTensor],
) -> FlatProgram:
    """Records `forward(*inputs.values())`.

    Args:
        inputs: by name; the program reads them where they lie now.
        pool: for results.
        packed_copies: by the id of a constant tensor, the object whose `current` is read at every run instead.
    """
    traced = make_fx(forward, tracing_mode="real")(*inputs.values())
    pool.reuse()
    return _Writer(traced, inputs, pool, packed_copies).write()


class _Writer:
    """Runs a traced graph once more and writes the code of a replay.

    A node's value is fixed (its name is a constant of the code) or fresh (its name is a variable). Nodes that share
    memory have one root. The root's block or variables are free after the last use of any of these nodes.
    """

    def __init__(
        self,
        traced: GraphModule,
        inputs: Mapping[str, Tensor],
        pool: MemoryPool,
        packed_copies: Mapping[int, HasCurrentTensor],
    ) -> None:
        self.traced, self.pool, self.packed_copies = traced, pool, packed_copies
        self.inputs = iter(inputs.items())
        self.roots = _roots(traced.graph)
        self.values: dict[Node, Any] = {}
        self.names: dict[Node, str] = {}
        self.fresh: dict[Node, list[Node]] = {}  # by root
        self.blocks: dict[Node, Tensor] = {}  # by root
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.operators = 0

    def write(self) -> FlatProgram:
        *nodes, result = self.traced.graph.nodes
        last_uses = _last_uses(self.traced.graph, self.roots)
        for node in nodes:
            self._visit(node)
            self._free(last_uses.get(node, ()))
        output = self._output(_node(result.args[0]))
        body = "".join(f"\n    {line}" for line in self.lines)
        exec(compile(f"def run():{body}", "<flat program>", "exec"), self.constants)
        run = torch.no_grad()(self.constants["run"])
        return FlatProgram("\n".join(self.lines), output, self.operators, run)

    def _visit(self, node: Node) -> None:
        target: Any = node.target
        if node.op == "placeholder":
            self._fix(node, *next(self.inputs))
        elif node.op == "get_attr":
            self._constant(node, getattr(self.traced, target))
        elif target is not operator.getitem and operator_schema(target).is_mutable:
            self._call(node, target)
            written = _node(node.args[0])
            self.values[node], self.names[node] = self.values[written], self.names[written]
        elif node.users:
            self._compute(node, target)

    def _constant(self, node: Node, value: Tensor) -> None:
        self._fix(node, node.name, value)
        if id(value) in self.packed_copies:
            self.constants[node.name] = self.packed_copies[id(value)]
            self.names[node] += ".current"
        elif isinstance(value, nn.Parameter):
            self.constants[node.name] = weakref.ref(value)
            self.names[node] += "()"
            self.fresh[node] = []  # its views are made at every run: a fixed view would keep the weight's memory

    def _compute(self, node: Node, target: Any) -> None:
        value = self._run(node, target)
        if self.roots[node] is not node:
            if self.roots[node] in self.fresh:
                self._make(node, target, value)
            else:
                self._fix(node, node.name, value)
        elif (target in _EMPTY or target in _OUT_VARIANTS) and value.is_contiguous():
            self._fix(node, node.name, self._in_pool(node, value))
            if target in _OUT_VARIANTS:
                self._call(node, _OUT_VARIANTS[target], out=node.name)
        else:
            self._make(node, target, value)

    def _run(self, node: Node, target: Any) -> Any:
        return target(*map_arg(node.args, self.values.__getitem__), **map_arg(node.kwargs, self.values.__getitem__))

    def _fix(self, node: Node, name: str, value: Any) -> None:
        """A value that is the same object at every run: a constant of the code."""
        self.names[node] = name
        self.values[node] = self.constants[name] = value

    def _make(self, node: Node, target: Any, value: Any) -> None:
        """A result that is new at every run: a variable of the code."""
        self.values[node], self.names[node] = value, node.name
        self.fresh.setdefault(self.roots[node], []).append(node)
        if target is operator.getitem:
            self.lines.append(f"{node.name} = {self.names[_node(node.args[0])]}[{node.args[1]}]")
        else:
            self._call(node, target, result=node.name)

    def _call(self, node: Node, target: Any, result: str | None = None, **more: str) -> None:
        """Writes the line `result = target(arguments of node, **more)`."""
        name = str(target).removesuffix(".default").replace(".", "_")
        self.constants[name] = _BINDINGS.get(target) or direct_operator(target)
        arguments = [self._text(argument) for argument in node.args]
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        arguments += [f"{key}={value}" for key, value in more.items()]
        self.lines.append(f"{result} = " * (result is not None) + f"{name}({', '.join(arguments)})")
        self.operators += 1

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Node):
            return self.names[argument]
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(self._text, argument))}]"
        if isinstance(argument, int | str | None) or (isinstance(argument, float) and math.isfinite(argument)):
            return repr(argument)
        name = f"{type(argument).__name__}_{len(self.constants)}"
        self.constants[name] = argument
        return name

    def _in_pool(self, root: Node, like: Tensor) -> Tensor:
        self.blocks[root] = block = self.pool.take(like.nbytes)
        return block[: like.nbytes].view(like.dtype).view(like.shape).copy_(like)

    def _free(self, roots: Iterable[Node]) -> None:
        for root in roots:
            if root in self.blocks:
                self.pool.give_back(self.blocks.pop(root))
            if gone := self.fresh.pop(root, ()):
                self.lines.append(f"del {', '.join(self.names[node] for node in gone)}")
                for node in gone:
                    del self.values[node]

    def _output(self, node: Node) -> Tensor:
        """The result in the pool, copied there unless it is written there."""
        value = self.values[node]
        if self.roots[node] in self.blocks:
            return value
        self.constants["output"] = output = self._in_pool(node, value)
        self.lines.append(f"output.copy_({self.names[node]})")
        return output


def _roots(graph: Graph) -> dict[Node, Node]:
    """By node, the one whose memory it shares: itself, or its first argument's root for views and updates in place."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        target = node.target
        shares = node.op == "call_function" and (target is operator.getitem or _aliases(target))
        roots[node] = roots[_node(node.args[0])] if shares else node
    return roots


def _last_uses(graph: Graph, roots: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """By node, the roots that no later node uses."""
    last = {roots[used]: node for node in graph.nodes for used in node.all_input_nodes}
    ending: dict[Node, list[Node]] = {}
    for root, node in last.items():
        ending.setdefault(node, []).append(root)
    return ending


def _aliases(target: Any) -> bool:
    return any(result.alias_info is not None for result in operator_schema(target).returns)


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node), f"expected a tensor first, got {argument!r}"
    return argument
