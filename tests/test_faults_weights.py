"""Weights that change and layers that are touched: never a stale value, never another value than plain PyTorch's.

The reference of each test is a deep copy of the changed model with plain options: it has no cache to be stale.
"""

import copy
import logging
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions, KimiVLEncoder
from kimivl_lab.kernels import weight_state
from kimivl_lab.kernels.packed_linear import packed_copy, packed_unavailable
from kimivl_lab.moonvit.layers import ResolvedOptions
from kimivl_lab.moonvit.model import MoonVitPretrainedModel
from kimivl_lab.syncs.counter import count_host_syncs, on_device
from tests.conftest import pixels_for, relative_error, tiny_encoder, tiny_tower

GRIDS = [(4, 6), (2, 2), (6, 4)]
PIXELS = pixels_for(GRIDS)
PLAIN = EncoderOptions(attention="eager", position="interpolate", rope="complex", linear="plain")
LINEARS = ["encoder.blocks.0.wqkv", "encoder.blocks.0.wo", "encoder.blocks.1.mlp.fc0", "encoder.blocks.1.mlp.fc1"]
WEIGHTS = [f"{name}.weight" for name in [*LINEARS, "patch_embed.proj", "patch_embed.pos_emb"]]
needs_onednn = pytest.mark.skipif(
    packed_unavailable("prepacked", torch.device("cpu"), torch.float32) is not None, reason="needs oneDNN"
)


def small_table_tower(seed: int = 0, options: EncoderOptions | None = None) -> MoonVitPretrainedModel:
    """A tower whose grids use every entry of the position table, so that each edit of it shows."""
    return tiny_tower(seed, options, init_pos_emb_height=8, init_pos_emb_width=8)


@pytest.fixture
def tower():
    tower = small_table_tower(seed=3)
    encode(tower)  # fills every cache
    return tower


@torch.no_grad()
def encode(model: nn.Module, pixels: Tensor = PIXELS) -> Tensor:
    return model(pixels, GRIDS)


def reference(model: MoonVitPretrainedModel) -> Tensor:
    twin = copy.deepcopy(model)
    twin.options = PLAIN
    return encode(twin)


def is_current(model: MoonVitPretrainedModel, before: Tensor) -> bool:
    """Whether the model gives what its weights say now; `before` shows that this is something else than it was."""
    want = reference(model)
    assert relative_error(before, want) > 2e-5, "the change is too small to be seen"
    return relative_error(encode(model), want) < 2e-6


# --- weights that change ---------------------------------------------------------------------------------------------


def whole(weight: Tensor) -> None:
    weight.mul_(-2)


def some_rows(weight: Tensor) -> None:
    weight[7:15] *= 3


def part_of_a_row(weight: Tensor) -> None:
    weight[3].view(-1)[5:9] += 20


def one_element(weight: Tensor) -> None:
    weight.view(-1)[weight.numel() // 2 + 1] += 50


def two_swapped(weight: Tensor) -> None:
    weight[[2, 5]] = weight[[5, 2]]


def signs(weight: Tensor) -> None:
    weight.view(weight.shape[0], -1)[::2, 3::4] *= -1


EDITS = [whole, some_rows, part_of_a_row, one_element, two_swapped, signs]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("edit", EDITS, ids=lambda f: f.__name__)
def test_a_write_to_data_is_seen_at_the_next_forward(tower, name, edit):
    before = encode(tower)
    edit(tower.get_parameter(name).data)
    assert is_current(tower, before)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_write_from_numpy_is_seen_at_the_next_forward(tower, name):
    before = encode(tower)
    array = tower.get_parameter(name).detach().numpy()
    array.reshape(len(array), -1)[3, ::7] += 5
    assert is_current(tower, before)


@needs_onednn
@pytest.mark.parametrize("edit", EDITS, ids=lambda f: f.__name__)
def test_a_write_to_bfloat16_data_is_seen(edit):
    tower = small_table_tower(seed=3).to(torch.bfloat16)
    encode(tower)
    for name in WEIGHTS:
        edit(tower.get_parameter(name).data)
        fresh = copy.deepcopy(tower)  # same kernels, empty caches: the same bits
        assert torch.equal(encode(tower), encode(fresh)), name


@pytest.mark.parametrize("name", ["linear_1", "linear_2", "pre_norm"])
def test_the_projector_follows_its_weights(name):
    encoder = tiny_encoder()
    before = encode(encoder)
    one_element(encoder.multi_modal_projector.get_parameter(f"{name}.weight").data.view(-1, 1))
    assert torch.equal(encode(encoder), encode(copy.deepcopy(encoder)))
    assert not torch.equal(encode(encoder), before)


def test_a_transposed_weight_is_compared_too(tower):
    layer = tower.encoder.blocks[0].wo
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert not layer.weight.is_contiguous()
    before = encode(tower)
    some_rows(layer.weight.data)
    assert is_current(tower, before)


@pytest.mark.parametrize("name", WEIGHTS)
def test_graphs_replay_with_weights_written_through_data(tower, name):
    runner = EncoderCudaGraphRunner(tower, [16], max_images=4)
    before = runner(PIXELS, GRIDS)
    one_element(tower.get_parameter(name).data)
    want = reference(tower)
    assert relative_error(runner(PIXELS, GRIDS), want) < 2e-6 < 2e-5 < relative_error(before, want)
    assert runner.stats.graphs[16].calls == 2 and not runner.stats.eager


@needs_onednn
def test_weights_changed_announces_what_is_not_compared(tower):
    tower.set_options(weights="announced")
    runner = EncoderCudaGraphRunner(tower, [16], max_images=4)
    before = encode(tower), runner(PIXELS, GRIDS)
    for name in WEIGHTS:
        one_element(tower.get_parameter(name).data)
    tower.weights_changed()
    want = reference(tower)
    for after, old in zip((encode(tower), runner(PIXELS, GRIDS)), before, strict=True):
        assert relative_error(after, want) < 2e-6 < 2e-5 < relative_error(old, want)


def test_the_call_moves_every_state_that_compares_no_values():
    """As on a GPU, where a look at the values would be a wait."""
    encoder = tiny_encoder()
    states = {name: weight_state.WeightState(p, checked=False) for name, p in encoder.named_parameters()}
    for parameter in encoder.parameters():
        whole(parameter.data)
    assert all(states[name].still_holds(p) for name, p in encoder.named_parameters()), "torch counts no such write"
    encoder.weights_changed()
    assert not any(states[name].still_holds(p) for name, p in encoder.named_parameters())


def test_on_a_pretended_device_the_call_empties_the_position_cache():
    tower = on_device(small_table_tower(seed=3), pretended=True)
    pos_emb, results = tower.patch_embed.pos_emb, []

    @torch.no_grad()
    def edit_and_announce():
        results.append(pos_emb(GRIDS, None, "cached"))
        for edit in (some_rows, part_of_a_row, one_element):
            edit(pos_emb.weight.data)
            tower.weights_changed()
            results.extend(pos_emb(GRIDS, None, kind) for kind in ("adaptive", "cached"))

    count_host_syncs(edit_and_announce)
    before, *pairs = [result.as_subclass(Tensor) for result in results]
    for want, cached in zip(pairs[::2], pairs[1::2], strict=True):
        assert torch.equal(cached, want) and not torch.equal(cached, before)


@pytest.mark.gpu
@pytest.mark.parametrize("edit", EDITS, ids=lambda f: f.__name__)
def test_on_a_gpu_the_call_announces_a_write_to_data(edit):
    tower = small_table_tower(seed=3).to("cuda", torch.bfloat16)
    runner = EncoderCudaGraphRunner(tower, [16], max_images=4)
    before = encode(tower), runner(PIXELS, GRIDS)
    for name in WEIGHTS:
        edit(tower.get_parameter(name).data)
    tower.weights_changed()
    want = encode(copy.deepcopy(tower))
    assert torch.equal(encode(tower), want) and not torch.equal(before[0], want)
    assert relative_error(runner(PIXELS, GRIDS), want) < 0.02 < relative_error(before[1], want)


# --- weights that a hook or a parametrisation computes ---------------------------------------------------------------


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", amount=0.3)


def weight_normed(module: nn.Module) -> None:
    parametrizations.weight_norm(module)


def weight_normed_by_a_hook(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


def spectral_normed(module: nn.Module) -> None:
    parametrizations.spectral_norm(module)


@pytest.mark.parametrize("name", [*LINEARS, "patch_embed.proj", "patch_embed.pos_emb"])
@pytest.mark.parametrize(
    "wrap", [pruned, weight_normed, weight_normed_by_a_hook, spectral_normed], ids=lambda f: f.__name__
)
def test_a_computed_weight_is_right_at_the_same_forward(tower, name, wrap):
    module = tower.get_submodule(name)
    torch.manual_seed(0)  # spectral_norm starts from random vectors
    wrap(module)
    module.eval()
    encode(tower)
    source = next(p for part, p in module.named_parameters() if part != "bias" and p.ndim > 1)
    for edit in (whole, some_rows, one_element):
        before = encode(tower)
        edit(source.data)
        source.data[0].view(-1)[::7] += 0.5  # a norm hides a scale, and the next one a shift of all channels
        assert is_current(tower, before), edit.__name__


@pytest.mark.parametrize("name", [*LINEARS, "patch_embed.proj", "patch_embed.pos_emb"])
def test_pruning_made_permanent_is_a_plain_weight_again(tower, name):
    before = encode(tower)
    module = tower.get_submodule(name)
    pruned(module)
    encode(tower)
    prune.remove(module, "weight")
    assert is_current(tower, before)
    if isinstance(module, nn.Linear):
        assert packed_copy(module) is not None


# --- layers that are touched -----------------------------------------------------------------------------------------

PUBLISHED = [
    *("patch_embed", "patch_embed.proj", "encoder", "encoder.blocks.1", "encoder.final_layernorm"),
    *(f"encoder.blocks.0.{name}" for name in ("norm0", "wqkv", "wo", "norm1", "mlp", "mlp.fc0", "mlp.fc1")),
]


def seen_by_hooks(model: nn.Module, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Each module's first input and its output, by forward hooks that keep the tensors, not copies of them."""
    seen, handles = {}, []
    for name in names:
        hook = lambda module, args, output, name=name: seen.update({name: (args[0], output)})  # noqa: E731
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    encode(model)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_hooks_see_each_layers_own_input_and_output(dtype):
    tower = small_table_tower(seed=3).to(dtype)
    want = encode(tower)
    seen = seen_by_hooks(tower, PUBLISHED)
    assert set(seen) == set(PUBLISHED)
    for name in PUBLISHED:
        module, (given, output) = tower.get_submodule(name), seen[name]
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d) or name.endswith("mlp"):
            with torch.no_grad():
                assert torch.equal(module(given), output), name
    hidden = seen["encoder.blocks.0.mlp.fc0"][1]
    assert torch.equal(nn.functional.gelu(hidden, approximate="tanh"), seen["encoder.blocks.0.mlp.fc1"][0])
    assert torch.equal(encode(tower), want), "without hooks the fused path runs again"


def test_hooks_on_the_position_table_and_the_projector_see_their_outputs():
    encoder = tiny_encoder()
    names = [f"multi_modal_projector{part}" for part in ("", ".pre_norm", ".linear_1", ".linear_2")]
    seen = seen_by_hooks(encoder, [*names, "vision_tower", "vision_tower.patch_embed.pos_emb"])
    assert torch.equal(seen["multi_modal_projector.linear_2"][1], encode(encoder))
    grids, embeds = seen["vision_tower.patch_embed.pos_emb"]
    assert list(grids) == GRIDS
    assert relative_error(embeds, encoder.vision_tower.patch_embed.pos_emb.get_pos_embeds(GRIDS)) < 4e-6


@pytest.mark.parametrize("name", [*LINEARS, "patch_embed.proj", "encoder.blocks.0.mlp", "encoder.blocks.1"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_a_hook_that_replaces_the_output_is_obeyed(name, compiled):
    tower = small_table_tower(seed=3)
    changed = lambda module, args, output: output * 1.5  # noqa: E731
    twin = copy.deepcopy(tower)
    twin.options = PLAIN
    twin.get_submodule(name).register_forward_hook(changed)
    if compiled:
        tower.set_options(compile=True)
    encode(tower)
    handle = tower.get_submodule(name).register_forward_hook(changed)
    assert relative_error(encode(tower), encode(twin)) < 2e-6
    handle.remove()
    assert relative_error(encode(tower), reference(tower)) < 2e-6


def test_pre_hooks_backward_hooks_and_global_hooks_run(tower):
    calls = []
    layer = tower.encoder.blocks[0].mlp.fc1
    layer.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    encode(tower)
    assert calls == ["pre"]
    layer.register_full_backward_hook(lambda module, given, got: calls.append("backward"))
    tower(PIXELS, GRIDS).sum().backward()
    assert calls == ["pre", "pre", "backward"]
    names = {module: name for name, module in tower.named_modules()}
    reached = set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: reached.add(names.get(m)))
    encode(tower)
    handle.remove()
    assert set(LINEARS) | {"patch_embed.proj", "patch_embed.pos_emb", "encoder.blocks.1.mlp"} <= reached


class Doubled(nn.Linear):
    """A subclass that changes what a call does."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Adapter(nn.Module):
    """As adapters are written: whatever the caller gives goes to the base, and the update is added after it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.update = nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        return self.base_layer(x, *args, **kwargs) + self.update(x)


def subclass(layer: nn.Linear) -> nn.Module:
    new = Doubled(layer.in_features, layer.out_features)
    new.load_state_dict(layer.state_dict())
    return new


def plain_linear(layer: nn.Linear) -> nn.Module:
    return nn.Linear(layer.in_features, layer.out_features)


def replaced_forward(layer: nn.Linear) -> nn.Module:
    original = layer.forward
    layer.forward = lambda x: 2 * original(x)  # ty: ignore[invalid-assignment]
    return layer


def sequence(layer: nn.Linear) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh())


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize(
    "change", [subclass, Adapter, plain_linear, replaced_forward, sequence], ids=lambda change: change.__name__
)
def test_a_replaced_layer_is_called_as_in_plain_pytorch(tower, name, change):
    parent = tower.get_submodule(name.rpartition(".")[0])
    given = {}
    new = change(tower.get_submodule(name))
    setattr(parent, name.rpartition(".")[2], new)
    got = encode(tower)
    twin = small_table_tower(seed=3, options=PLAIN)
    function: Callable[[Tensor], Tensor] = new

    def instead(module, args, output):
        given["inputs"] = len(args)
        return function(args[0])

    twin.get_submodule(name).register_forward_hook(instead)
    assert relative_error(got, encode(twin)) < 2e-6 and given["inputs"] == 1
    assert relative_error(got, encode(small_table_tower(seed=3))) > 1e-3


# --- adapters of peft ------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, targets: list[str]):
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros at first: an adapter that does nothing
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


TARGETS = [*("wqkv", "wo", "fc0", "fc1", "proj", "linear_1", "linear_2")]


@pytest.mark.parametrize("targets", [*([one] for one in TARGETS), TARGETS], ids="-".join)
@pytest.mark.parametrize("pixels", ["floats", "uint8"])
def test_lora_gives_what_its_merge_gives(targets, pixels):
    encoder = tiny_encoder(seed=3)
    raw = torch.randint(0, 256, PIXELS.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = PIXELS if pixels == "floats" else raw
    before = encode(encoder, images)
    adapted = with_lora(encoder, targets)
    unmerged = encode(adapted.get_base_model(), images)
    assert relative_error(unmerged, before) > 1e-3
    adapted.merge_adapter()
    assert relative_error(encode(adapted.get_base_model(), images), unmerged) < 5e-6
    adapted.unmerge_adapter()
    assert relative_error(encode(adapted.get_base_model(), images), unmerged) < 5e-6
    with adapted.disable_adapter():
        assert relative_error(encode(adapted.get_base_model(), images), before) < 5e-6
    merged = adapted.merge_and_unload()
    assert isinstance(merged, KimiVLEncoder)
    assert relative_error(encode(merged, images), unmerged) < 5e-6


def test_lora_trains(tower):
    adapted = with_lora(tower, ["wqkv", "wo", "fc0", "fc1", "proj"])
    adapted(PIXELS, GRIDS).square().sum().backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name}


# --- quantisation ----------------------------------------------------------------------------------------------------


def quantised(model: nn.Module, layers) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = copy.deepcopy(model)
        return torch.ao.quantization.quantize_dynamic(twin, layers, dtype=torch.qint8)  # ty: ignore[deprecated]


@pytest.mark.parametrize("layers", [{nn.Linear}, {"encoder.blocks.0.mlp.fc0"}, {"encoder.blocks.1.wqkv"}], ids=str)
def test_dynamic_quantisation_quantises(tower, layers):
    plain = small_table_tower(seed=3, options=PLAIN)
    if layers != {nn.Linear}:
        layers = {name: torch.ao.quantization.default_dynamic_qconfig for name in layers}
    got, want = encode(quantised(tower, layers)), encode(quantised(plain, layers))
    assert relative_error(got, want) < 1e-3
    assert 1e-4 < relative_error(got, encode(plain)) < 0.2
    swapped = [name for name in LINEARS if not isinstance(quantised(tower, layers).get_submodule(name), nn.Linear)]
    assert swapped == (LINEARS if layers == {nn.Linear} else [name for name in LINEARS if name in layers])


# --- what is kept, and for how long ----------------------------------------------------------------------------------


def packed_layers(tower: nn.Module) -> list[str]:
    return [name for name, layer in tower.named_modules() if packed_copy(layer) is not None]


@needs_onednn
@pytest.mark.parametrize("change", [{"linear": "plain"}, {"compile": True}], ids=str)
def test_packed_copies_go_when_the_options_leave_them(tower, change):
    assert len(packed_layers(tower)) == 8
    tower.set_options(**change)
    assert not packed_layers(tower)
    tower.set_options(linear="auto", compile=False)
    encode(tower)
    assert len(packed_layers(tower)) == 8


@pytest.mark.parametrize(
    "move", [lambda tower: tower.double(), lambda tower: tower.to(torch.bfloat16)], ids=["64", "16"]
)
def test_what_is_cached_of_a_tower_goes_when_it_is_cast(tower, move):
    cache = tower.patch_embed.pos_emb.cache
    tower.to(torch.float32)  # no change
    assert cache.stats.bytes > 0
    move(tower)
    assert not packed_layers(tower) and cache.stats.bytes == 0


@needs_onednn
def test_the_copy_of_a_layer_goes_when_an_adapter_wraps_it(tower):
    with_lora(tower, ["wqkv"])
    encode(tower)
    assert packed_layers(tower) == [
        f"encoder.blocks.{block}.{name}" for block in (0, 1) for name in ("wo", "mlp.fc0", "mlp.fc1")
    ]


@pytest.mark.parametrize("position", ["interpolate", "gather", "adaptive"])
def test_the_position_cache_empties_when_the_options_leave_it(tower, position):
    cache = tower.patch_embed.pos_emb.cache
    assert cache.stats.bytes > 0
    tower.set_options(position=position)
    assert cache.stats.bytes == 0 == len(cache)


@pytest.mark.parametrize(
    "switches", [{"linear": "plain", "position": "adaptive"}, {}], ids=["plain", "cached and packed"]
)
def test_a_forward_without_values_leaves_nothing_behind(switches):
    """Under FakeTensorMode results have shapes only: kept in a cache they would fail or spoil every later forward."""
    pixels, grids = pixels_for([(4, 6)]), [(4, 6)]
    tower, never = (tiny_tower(seed=5, options=EncoderOptions(**switches)) for _ in range(2))
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert tower(pixels, grids).shape == (6, 4, 288)
        assert torch.equal(tower(pixels, grids), never(pixels, grids))


def test_a_tower_made_in_inference_mode_is_cached_and_never_stale():
    with torch.inference_mode():
        tower = small_table_tower(seed=3)
    before = encode(tower)
    assert tower.patch_embed.pos_emb.cache.stats.entries == len(GRIDS)
    for name in WEIGHTS:
        with torch.inference_mode():
            one_element(tower.get_parameter(name).data)
        assert is_current(tower, before), name
    tower.weights_changed()


def test_inference_weights_that_cannot_be_compared_are_said_once(caplog):
    weight_state._log_inference_weights.cache_clear()
    with torch.inference_mode():
        tower = small_table_tower(seed=3, options=EncoderOptions(weights="announced"))
    with caplog.at_level(logging.WARNING, logger="kimivl_lab"):
        first, second = encode(tower), encode(tower)
    assert torch.equal(first, second)
    said = [record for record in caplog.records if record.name == weight_state.__name__]
    assert len(said) == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda tower: pickle.loads(pickle.dumps(tower))], ids=["copy", "pickle"]
)
def test_a_warm_tower_can_be_copied_and_pickled(tower, copied):
    assert torch.equal(encode(copied(tower)), encode(tower))


def test_options_are_resolved_once_for_each_way_to_run(tower, monkeypatch):
    counted = []
    resolve = ResolvedOptions.resolve

    def count(*arguments):
        counted.append(arguments)
        return resolve(*arguments)

    monkeypatch.setattr(ResolvedOptions, "resolve", count)
    for _ in range(3):
        encode(tower)
    assert not counted
    tower(PIXELS, GRIDS)  # gradients
    tower(PIXELS, GRIDS)
    assert len(counted) == 1
    tower.set_options(rope="complex")
    encode(tower)
    tower.double()
    encode(tower.set_options(linear="plain") or tower)
    assert len(counted) == 3
