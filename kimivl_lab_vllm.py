"""vLLM's entry point of kimivl_lab: adds the architecture `KimiVLLabForConditionalGeneration` to vLLM's tables.

vLLM calls `register` in every process that it starts. This module is not in the package because `import kimivl_lab`
enters Kimi-VL into transformers' Auto classes: a server that does not ask for the architecture must not be changed by
an installation.

Test: tests/test_vllm_plugin.py, tests/engine.
"""

ARCHITECTURE = "KimiVLLabForConditionalGeneration"


def register() -> None:
    """Adds two lines to vLLM's tables. Nothing of kimivl_lab is imported until the architecture is asked for."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    ModelRegistry.register_model(ARCHITECTURE, f"kimivl_lab.engines.vllm.model:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ConfigHook


class ConfigHook:
    """What vLLM calls with the configuration of a server that asks for the architecture, before its first work."""

    @staticmethod
    def verify_and_update_model_config(model_config) -> None:
        """Checks the chosen parts and this vLLM. ValueError, RuntimeError: see `kimivl_lab.engines.vllm.parts`."""
        from kimivl_lab.engines.vllm.parts import Parts, check_engine

        check_engine()
        config = model_config.hf_config
        # An object of this package, not a list: when vLLM's other processes unpickle their configuration, they import
        # the package, and so their transformers knows the tokenizer without code of the checkpoint.
        config.kimivl_lab_parts = Parts.read(config)

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Nothing: vLLM calls it for the whole configuration."""
