"""The plain function behind each operator of this library: same arguments and values, without torch's dispatcher.

A recorded CPU graph calls these: see `kimivl_lab.graphs.trace_program`.

Test: tests/test_graph_backends.py, tests/test_amx.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .amx.linear import multiply
from .amx.rope import rotate
from .packed_attention import attend_packed

DIRECT_CALLS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.kimivl_lab.packed_attention.default: attend_packed,
    torch.ops.kimivl_lab.packed_linear.default: multiply,
    torch.ops.kimivl_lab.rotate_.default: rotate,
}
