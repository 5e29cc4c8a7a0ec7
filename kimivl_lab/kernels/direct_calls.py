"""The plain functions behind our operators of torch.library: same arguments and values, without the dispatch."""

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
