"""MoonViT written plainly, from the published mathematics alone: loops, no library code, any dtype.

`stages` returns every intermediate that the parity tests compare, so that a fault is found where it is made.
"""

import math

import torch

STAGES = ("patch_embed", "position", "q", "k", "block0", "final_norm", "merged")


def cubic_weight(distance: float, a: float = -0.75) -> float:
    """Keys' cubic convolution kernel."""
    d = abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    if d < 2:
        return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return 0.0


def axis_matrix(out_size: int, in_size: int) -> torch.Tensor:
    """(out, in) float64 weights of bicubic resampling along one axis, half-pixel centres, clamped borders."""
    matrix = torch.zeros(out_size, in_size, dtype=torch.float64)
    for out in range(out_size):
        centre = (out + 0.5) * in_size / out_size - 0.5
        base = math.floor(centre)
        for tap in range(base - 1, base + 3):
            matrix[out, min(max(tap, 0), in_size - 1)] += cubic_weight(centre - tap)
    return matrix


def position(table: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """(h*w, D) of a (H, W, D) table."""
    if (h, w) == tuple(table.shape[:2]):
        return table.reshape(h * w, -1)
    rows, columns = axis_matrix(h, table.shape[0]), axis_matrix(w, table.shape[1])
    return torch.einsum("yi,xj,ijd->yxd", rows, columns, table.double()).reshape(h * w, -1).to(table.dtype)


def rotate(x: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """RoPE-2D of one image's (h*w, heads, d) queries or keys."""
    d = x.shape[-1]
    out = x.clone()
    for y in range(h):
        for column in range(w):
            row = y * w + column
            for slot in range(d // 2):
                theta = 10000.0 ** (-4 * (slot // 2) / d)
                angle = (column if slot % 2 == 0 else y) * theta
                cos, sin = math.cos(angle), math.sin(angle)
                re, im = x[row, :, 2 * slot], x[row, :, 2 * slot + 1]
                out[row, :, 2 * slot] = re * cos - im * sin
                out[row, :, 2 * slot + 1] = re * sin + im * cos
    return out


def layer_norm(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def stages(weights: dict, config, pixels: torch.Tensor, grids: list) -> dict:
    """`weights`: the tower's state dict in the dtype to compute in. Returns {stage: tensor}, packed over images."""
    heads = config.num_attention_heads
    results: dict[str, list] = {name: [] for name in STAGES}
    start = 0
    for h, w in grids:
        patches = pixels[start : start + h * w].reshape(h * w, -1)
        start += h * w
        kernel = weights["patch_embed.proj.weight"].reshape(config.hidden_size, -1)
        x = patches @ kernel.T + weights["patch_embed.proj.bias"]
        results["patch_embed"].append(x)
        x = x + position(weights["patch_embed.pos_emb.weight"], h, w)
        results["position"].append(x)
        for layer in range(config.num_hidden_layers):

            def linear(x, name, layer=layer):
                prefix = f"encoder.blocks.{layer}.{name}"
                return x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"]

            def norm(x, name, layer=layer):
                prefix = f"encoder.blocks.{layer}.{name}"
                return layer_norm(x, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

            q, k, v = (part.reshape(h * w, heads, -1) for part in linear(norm(x, "norm0"), "wqkv").chunk(3, dim=-1))
            q, k = rotate(q, h, w), rotate(k, h, w)
            if layer == 0:
                results["q"].append(q)
                results["k"].append(k)
            mixed = torch.empty_like(q)
            for head in range(heads):
                scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])
                mixed[:, head] = torch.softmax(scores, dim=-1) @ v[:, head]
            x = x + linear(mixed.reshape(h * w, -1), "wo")
            x = x + linear(gelu_tanh(linear(norm(x, "norm1"), "mlp.fc0")), "mlp.fc1")
            if layer == 0:
                results["block0"].append(x)
        x = layer_norm(x, weights["encoder.final_layernorm.weight"], weights["encoder.final_layernorm.bias"])
        results["final_norm"].append(x)
        windows = [(a, c) for a in range(h // 2) for c in range(w // 2)]
        order = [(a * 2 + r) * w + c * 2 + s for a, c in windows for r in range(2) for s in range(2)]
        results["merged"].append(x[order].reshape(h * w // 4, 4, -1))
    return {name: torch.cat(parts) for name, parts in results.items()}


def project(weights: dict, merged: torch.Tensor) -> torch.Tensor:
    """The projector; `weights`: its state dict."""
    x = layer_norm(merged, weights["pre_norm.weight"], weights["pre_norm.bias"]).reshape(merged.shape[0], -1)
    x = gelu_erf(x @ weights["linear_1.weight"].T + weights["linear_1.bias"])
    return x @ weights["linear_2.weight"].T + weights["linear_2.bias"]
