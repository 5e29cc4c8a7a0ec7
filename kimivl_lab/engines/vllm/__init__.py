"""A plugin for vLLM: Kimi-VL with this library's processor, metadata or whole tower, part by part.

    vllm serve MODEL --hf-overrides '{"architectures": ["KimiVLLabForConditionalGeneration"]}'

    parts         the parts of a server and the check of the vLLM release; imports no vLLM before it is asked
    graph_inputs  what vLLM's encoder graphs read
    model         the model class; only vLLM imports it

vLLM finds the plugin by the entry point `kimivl_lab_vllm`. A server that does not name the architecture is unchanged.

Test: tests/test_vllm_plugin.py, tests/engine.
"""
