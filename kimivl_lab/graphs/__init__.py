"""The encoder by captured graphs, on CUDA and on a CPU.

Read in this order: `runner` (capture, copy in, replay, copy out), `inputs` (what a graph reads), then one backend:
`cuda`, or `trace` with `trace_program`. Beside them: `packing` (which images share a replay), `guards` (what a capture
refuses), `weights` (weights that moved) and `stats` (what was counted).
"""
