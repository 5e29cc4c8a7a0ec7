"""Private functions of torch and transformers are used in one module, which also works for a release without them."""

import ast
import importlib.util
import sys
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.nn.modules import module as nn_module

from kimivl_lab import private_api
from kimivl_lab.kernels import dispatch, packed_linear, weight_state
from kimivl_lab.parallel import groups
from kimivl_lab.syncs import rules
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower
from tests.test_rings import sources

# name -> why it stays where it is
ALLOWED = {
    # nn.Module's own registers: torch pickles them by these names, and no public method tells what is in them
    **dict.fromkeys(("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"), "any module"),
    "_attn_implementation": "bench.peers",  # the field behind transformers' attn_implementation
    # overrides of transformers' methods call what they override
    "_load_pretrained_model": "kimi_vl.model",
    "_expand_inputs_for_generation": "kimi_vl.model",
}
REPLACES = "syncs.pretend"  # puts its own functions in the place of torch's, private ones among them


def private_names(text, own):
    """(line, name) of private names that a module takes from elsewhere, other than from `self`, `cls` and `sys`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            root = ast.unparse(node.value).partition("(")[0].partition(".")[0]
            names = [] if root in ("self", "cls", "super", "sys") else [node.attr]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.startswith("_") and not name.endswith("__")]
    return [(line, name) for line, name in found if name not in own]


def names_of_ours(texts):
    """Private names that the package defines, and those of named tuples."""
    own = {"_replace", "_asdict", "_fields"}
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    return own - ALLOWED.keys() - {"_version", "_schema", "_op", "_cdata"}


def test_no_other_module_uses_a_private_name_of_a_library():
    texts = sources()
    own = names_of_ours(texts)
    found = {
        f"{module}:{line} {name}"
        for module, text in texts.items()
        if module not in ("private_api", REPLACES)
        for line, name in private_names(text, own)
        if ALLOWED.get(name) not in ("any module", module)
    }
    assert not found


def test_the_search_sees_imports_attributes_and_calls():
    text = (
        "from torch._dynamo import exc\nfrom torch.x import _hidden\nimport torch._C\n"
        "a = torch.ops.mkldnn._pack(w)\nb = f(x)._cdata\nself._own\n"
    )
    assert {name for _, name in private_names(text, set())} == {"_dynamo", "_hidden", "_C", "_pack", "_cdata"}


def without(monkeypatch, *removed):
    """A second copy of the module, of a torch that has none of `removed`: pairs of an object and a name."""
    for owner, name in removed:
        monkeypatch.delattr(owner, name)
    spec = importlib.util.spec_from_file_location("private_api_of_another_torch", private_api.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same_features(change):
    """Whether a tower that is made after `change` gives what one before it gave."""
    pixels = pixels_for(MIXED_GRIDS, seed=2)
    with torch.inference_mode():
        want = tiny_tower(seed=1)(pixels, MIXED_GRIDS)
        change()
        return relative_error(tiny_tower(seed=1)(pixels, MIXED_GRIDS), want) <= 1e-5


def test_without_the_tests_of_profiler_and_hooks_kernels_are_operators_and_layers_are_called(monkeypatch):
    other = without(monkeypatch, (torch.autograd, "_profiler_enabled"), (nn_module, "_has_any_global_hook"))
    monkeypatch.undo()
    assert other.is_profiled() and other.may_have_global_hooks()

    def change():
        monkeypatch.setattr(dispatch, "is_profiled", other.is_profiled)
        monkeypatch.setattr(dispatch, "may_have_global_hooks", other.may_have_global_hooks)

    assert same_features(change)
    assert not dispatch.is_untouched(torch.nn.Linear(2, 2), torch.nn.Linear)


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"])
def test_without_onednns_functions_layers_are_plain(name, monkeypatch):
    class Others:
        def __getattr__(self, other):
            if other == name:
                raise AttributeError(other)
            return getattr(torch.ops._others, other)

    monkeypatch.setattr(torch.ops, "_others", torch.ops.mkldnn, raising=False)

    def change():
        monkeypatch.setattr(torch.ops, "mkldnn", Others())

    assert same_features(change)
    reason = packed_linear.packed_unavailable("prepacked", torch.device("cpu"), torch.float32)
    assert reason is not None and name in reason


def test_without_versions_weights_on_a_cpu_are_compared_and_others_are_not_cached(monkeypatch):
    monkeypatch.setattr(weight_state, "weight_version", lambda weight: None)
    monkeypatch.setattr(weight_state, "counts_versions", lambda: False)
    weight = torch.ones(4)
    assert weight_state.WeightState.is_traceable(weight)
    assert not weight_state.WeightState.is_traceable(weight, checked=False)
    state = weight_state.WeightState(weight)
    assert state.still_holds(weight)
    weight.add_(1)
    assert not state.still_holds(weight)


def test_without_a_processors_tests_its_kernels_are_off(monkeypatch):
    names = [name for name in dir(torch.cpu) if name.startswith("_is_") or name == "_init_amx"]
    other = without(monkeypatch, *((torch.cpu, name) for name in names))
    assert not other.cpu_supports("avx2") and not other.cpu_supports("amx_tile", "avx512_bf16") and not other.init_amx()


def test_a_group_without_a_timeout_has_the_default():
    group: Any = object()
    assert private_api.group_timeout_s(group) is None
    assert groups.group_timeout_s(group) == groups.DEFAULT_TIMEOUT_S


def test_without_torchs_table_of_operators_those_of_torch_ops_are_known(monkeypatch):
    known = rules.known()
    other = without(monkeypatch, (torch._C, "_dispatch_get_all_op_names"))
    monkeypatch.setattr(rules, "operator_names", other.operator_names)
    assert {"add", "gelu"} <= rules.known().keys() <= known.keys()
    add = torch.ops.aten.add.Tensor
    assert private_api.overload_name(add) == "Tensor" and private_api.composite_form(add) is None
    assert private_api.direct_operator(len) is len
    with pytest.raises(RuntimeError, match=torch.__version__.replace("+", r"\+")):
        private_api.operator_schema(len)


def test_without_torchs_modules_trees_are_walked_and_modes_are_refused(monkeypatch):
    for name in ("torch.utils._pytree", "torch.utils._python_dispatch"):
        monkeypatch.setitem(sys.modules, name, None)
    other = without(monkeypatch)
    pair = namedtuple("pair", "a b")
    tree = {"x": [1, (2, "3")], "y": pair(4, None)}
    assert other.tree_leaves(tree) == private_api.tree_leaves(tree) == [1, 2, "3", 4, None]
    assert other.tree_map(str, tree) == private_api.tree_map(str, tree)
    assert other.tree_map_only(int, float, tree) == private_api.tree_map_only(int, float, tree)
    assert other.is_in_torch_dispatch_mode()
    with pytest.raises(RuntimeError, match="TorchDispatchMode"):
        other.TorchDispatchMode()


def test_without_the_switch_of_modes_operators_run_within_them(monkeypatch):
    from torch.utils import _python_dispatch

    seen = []

    class Watch(private_api.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def product():
        seen.clear()
        with Watch(), private_api.outside_modes():
            torch.ones(2) @ torch.ones(2)
        return len(seen)

    assert product() == 0
    monkeypatch.delattr(_python_dispatch, "_disable_current_modes")
    assert product() > 0
