"""The encoder: pre-norm transformer blocks and a final norm, over one packed sequence.

Block: x += wo(attention(rope(wqkv(norm0 x)))); x += fc1(gelu_tanh(fc0(norm1 x))). Every linear map has a bias.

The submodules are plain torch modules under the checkpoint's names. A layer that is untouched is fused with what
follows it; one with hooks, an adapter or another class is called with its input only (see `fused_linear`).

Test: tests/test_tower.py, tests/test_parity.py, tests/test_compute.py, tests/test_faults_weights.py.
Record: encoder__*.csv.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..config import EncoderOptions, MoonViTConfig
from ..kernels.dispatch import CompiledFunction, is_untouched, is_untouched_throughout
from ..kernels.library import LIBRARIES, kernel_isa
from ..kernels.packed_linear import (
    PACKED_KERNELS,
    RAISED,
    FusedModule,
    PackedKernel,
    are_packed,
    fused_linear,
    packed_unavailable,
    refresh_packed,
    resolve_linear,
)
from ..kernels.precision import HALF, half_pays
from ..kernels.rotation import ROPE_IMPLEMENTATIONS, Rotation, resolve_rotation, rotate_real
from ..kernels.weight_state import WeightState
from .attention import ATTENTION_BACKENDS, PackedAttention, resolve_attention
from .metadata import EncoderMetadata
from .position import POSITION_OPERATORS

SWITCHES: dict[str, tuple[Iterable[str], ...]] = {
    "attention": (("auto",), ATTENTION_BACKENDS),
    "position": (("cached",), POSITION_OPERATORS),
    "rope": (("auto",), ROPE_IMPLEMENTATIONS),
    "linear": (("auto", "plain"), PACKED_KERNELS),
    "compute": (("auto", "weights", "float32"),),
    "weights": (("checked", "announced"),),
}


def check_names(options: EncoderOptions) -> None:
    """ValueError for a name that no device knows. Whether one runs on the tower's device shows at its first forward."""
    for switch, names in SWITCHES.items():
        known = list(chain(*names))  # an implementation of your own may have been added to its table
        if (name := getattr(options, switch)) not in known:
            raise ValueError(f"unknown {switch} {name!r:.200}: one of {', '.join(known)}")


@dataclass(frozen=True)
class ResolvedOptions:
    """`EncoderOptions` as functions, for one device, dtype and grad mode.

    linear: None computes plain products.
    checked: whether packed copies are compared with their weights before each forward, see `WeightState`.
    raised: the same in float32, for layers of half precision that are untouched; None where it is not wanted.
    """

    rotate: Rotation
    attend: PackedAttention
    linear: PackedKernel | None
    compiled: bool = False
    checked: bool = True
    raised: "ResolvedOptions | None" = None

    @classmethod
    def resolve(cls, options: EncoderOptions, device: torch.device, dtype: torch.dtype) -> "ResolvedOptions":
        """ValueError for an option that cannot run here; "auto" never fails."""
        rotate = resolve_rotation(options.rope, device, dtype)
        attend = resolve_attention(options.attention, device, dtype)
        linear = resolve_linear(options.linear, device, dtype)
        if options.compile:
            return cls(rotate_real, attend, None, compiled=True)
        checked = options.weights == "checked"
        raised = cls._raise(options, device, checked) if _wants_float32(options, device, dtype) else None
        return cls(rotate, attend, linear, checked=checked, raised=raised)

    @classmethod
    def _raise(cls, options: EncoderOptions, device: torch.device, checked: bool) -> "ResolvedOptions":
        rotate = resolve_rotation(options.rope, device, torch.float32)
        return cls(rotate, resolve_attention(options.attention, device, torch.float32), RAISED, checked=checked)

    def names(self, dtype: torch.dtype) -> str:
        """The kernels and the dtype that compute in a tower of `dtype`, for people."""
        used = self.raised or self
        attention = next(name for name, one in ATTENTION_BACKENDS.items() if one is used.attend)
        rope = next((name for name, one in ROPE_IMPLEMENTATIONS.items() if one is used.rotate), "compiled")
        linear = next((name for name, one in PACKED_KERNELS.items() if one is used.linear), "plain")
        if used.linear is RAISED:
            dtype, linear = torch.float32, "prepacked"
        instructions = f" ({kernel_isa(attention)})" if attention in LIBRARIES else ""
        what = f"attention {attention}{instructions}, linear {linear}, rope {rope}"
        return f"{str(dtype).removeprefix('torch.')}: {what}" + ", compiled blocks" * used.compiled


def _wants_float32(options: EncoderOptions, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a tower of `dtype` computes in float32; ValueError if that is asked for and cannot be."""
    if options.compute == "weights" or dtype not in HALF or torch.is_grad_enabled():
        return False
    reason = packed_unavailable("prepacked", device, torch.float32)
    if options.linear not in ("auto", "prepacked"):
        reason = f"linear={options.linear!r} does not raise weights"
    if options.compute == "float32" and reason:
        raise ValueError(f"compute='float32': {reason}")
    if options.compute == "float32":
        return True
    ours = resolve_linear(options.linear, device, dtype) is PACKED_KERNELS["amx"]
    return not (reason or ours or "amx" in (options.attention, options.rope) or half_pays(dtype))


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), also in float32 with a weight of half precision."""
    if x.dtype == torch.float32 and isinstance(norm, nn.LayerNorm) and norm.weight.dtype in HALF:
        return F.layer_norm(x, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
    return norm(x)


class MLP2(nn.Module):
    """fc1(gelu_tanh(fc0 x)), plus a residual if there is one."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(dim, hidden_dim)
        self.fc1 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, kernel: PackedKernel | None = None) -> Tensor:
        """(L, D) -> (L, D)."""
        return fused_linear(self.fc1, fused_linear(self.fc0, x, kernel, gelu=True), kernel, residual=residual)


class MoonVitEncoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = MLP2(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, metadata: EncoderMetadata, options: ResolvedOptions) -> Tensor:
        """(L, D) -> (L, D)."""
        kernel = options.linear
        qkv = fused_linear(self.wqkv, _normed(self.norm0, x), kernel)
        if not options.compiled and not is_untouched_throughout(self.wqkv):
            qkv = qkv.clone()  # a hook may have kept it, and the rotation may write into it
        qkv = qkv.view(qkv.shape[0], 3, self.num_heads, qkv.shape[1] // (3 * self.num_heads))
        q, k = options.rotate(qkv.narrow(1, 0, 2), metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
        mixed = options.attend(q, k, qkv.select(1, 2), metadata).flatten(1)  # (L, D)
        x = fused_linear(self.wo, mixed, kernel, residual=x)
        if kernel is not None and is_untouched(self.mlp, MLP2):
            return self.mlp(_normed(self.norm1, x), residual=x, kernel=kernel)
        return x + self.mlp(self.norm1(x))


compiled_block = CompiledFunction(MoonVitEncoderLayer.forward, "the encoder's block")


class MoonVitEncoder(nn.Module):
    """All blocks and the final norm.

    transformers' `activation_checkpointing_enable` sets `gradient_checkpointing` and the function: each block then
    keeps only its input for the backward pass, which computes the block again.
    """

    _gradient_checkpointing_func: Callable[..., Tensor]

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, metadata: EncoderMetadata, options: ResolvedOptions) -> Tensor:
        """(L, D) -> (L, D)."""
        options, dtype = self.settle(options), x.dtype
        if options.linear is not None:
            refresh_packed(self._linears(), options.linear, options.checked)
        if options.linear is RAISED:
            x = x.float()
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            # Compiled code is not called again for hooks that came after it was compiled: such a block runs plain.
            run = partial(compiled_block, block) if options.compiled and is_untouched_throughout(block) else block
            x = self._gradient_checkpointing_func(run, x, metadata, options) if again else run(x, metadata, options)
        return _normed(self.final_layernorm, x).to(dtype)

    def settle(self, options: ResolvedOptions) -> ResolvedOptions:
        """`options.raised` if all layers can compute so now, otherwise the rest of `options`.

        They cannot if a layer is touched, replaced or cut over ranks: it sees and gives what its class says, in the
        weights' dtype. Ranks with parts of one layer must choose the same dtype, which a measurement does not promise.
        """
        if options.raised is None:
            return options
        kinds = nn.ModuleList, MoonVitEncoderLayer, MLP2, nn.LayerNorm, nn.Linear
        raised = all(type(part) in kinds and is_untouched(part, type(part)) for part in list(self.modules())[1:])
        checked, kernel = options.raised.checked, options.raised.linear
        raised = raised and all(WeightState.is_traceable(weight, checked) for weight in self.parameters())
        if raised and get_proxy_mode() is not None:  # a trace packs nothing
            raised = kernel is not None and are_packed(self._linears(), kernel)
        return options.raised if raised else replace(options, raised=None)

    def _linears(self) -> Iterator[nn.Module]:
        """The layers at the places of wqkv, wo, fc0 and fc1 of all blocks, whatever was put there."""
        for part in self.modules():
            if isinstance(part, MoonVitEncoderLayer):
                pair = part.wqkv, part.wo
            elif isinstance(part, MLP2):
                pair = part.fc0, part.fc1
            else:
                continue
            for layer in pair:
                yield layer.get_submodule("local") if isinstance(layer, FusedModule) else layer
