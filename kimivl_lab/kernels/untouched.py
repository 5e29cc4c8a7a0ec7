"""Whether calling a module does only what its class says.

Fast paths compute a layer's result from its weights and do not call the layer. That is right only for a layer of the
exact class, without hooks, adapters or parametrisations: any other layer is called, with its input and nothing else.

Test: tests/test_faults_weights.py.
"""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` is exactly a `kind`, without hooks (its own or global ones) and without a replaced `forward`.

    A subclass is touched, and so is a parametrised module, because its class is generated.
    """
    own = vars(module)
    return (
        type(module) is kind
        and not any(own[hooks] for hooks in _HOOKS)
        and "forward" not in own
        and module._compiled_call_impl is None
        and not _has_any_global_hook()
    )


def is_untouched_throughout(module: nn.Module) -> bool:
    """Whether `module` and every submodule do only what their classes say."""
    return all(is_untouched(part, type(part)) for part in module.modules())
