"""Answers, graphs and their values of one vLLM in this process: in_process.py CHECKPOINT PARTS OUT.json

The graphs are those of vLLM's own manager: its budgets, packing, buffers and statistics. On a CPU a capture keeps the
buffers, and a replay runs the captured forward again.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
IMAGES = (), ("china.jpg",), ("china.jpg", "tall_icon.png"), ("tiny_flag.png", "chelsea.png", "tall_icon.png")
BUDGETS, MOST = [40, 96, 200, 400, 600], 5
ARCHITECTURE = "KimiVLLabForConditionalGeneration"


def batch_of(sizes):
    """Pixels and grids of images of so many tokens each, as vLLM hands them on. Above 255 tokens: a multiple of 4."""
    grids = torch.tensor([(2, 2 * tokens) if tokens < 256 else (8, tokens // 2) for tokens in sizes])
    pixels = torch.randn(int(grids.prod(-1).sum()), 3, 14, 14, generator=torch.Generator().manual_seed(len(sizes)))
    return {"pixel_values": pixels, "image_grid_hws": grids}


def random_calls(number):
    """Sizes in merged tokens, multiples of 4, of calls with 1 to 12 images, some of which no budget holds."""
    draw = random.Random(0)
    return [
        [4 * draw.randint(1, draw.choice((10, 100, 175))) for _ in range(draw.randint(1, 12))] for _ in range(number)
    ]


def cpu_manager(config, model):
    """vLLM's manager, and the list where each replay notes its budget and its images' tokens."""
    from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata, EncoderCudaGraphManager

    class CpuManager(EncoderCudaGraphManager):
        computes = True

        def _capture_budget_graph(self, token_budget, path="default", axis_keys=()):
            values = self.model.prepare_encoder_cudagraph_capture_inputs(
                token_budget, self.max_batch_size, self.max_frames_per_batch, self.device, self.dtype, path, axis_keys
            ).values
            output = torch.full_like(self.model.encoder_cudagraph_forward({**values}, path=path), float("nan"))

            class Replay:
                def replay(_):
                    if self.computes:
                        output.copy_(self.model.encoder_cudagraph_forward(whole(values), path=path))

            self._get_graph_set(path)[token_budget] = BudgetGraphMetadata(
                token_budget=token_budget,
                max_batch_size=self.max_batch_size,
                max_frames_per_batch=self.max_frames_per_batch,
                graph=Replay(),
                input_buffers=values,
                output_buffer=output,
                axis_keys=axis_keys,
            )

        def _run_budget_graph(self, mm_kwargs, token_budget, path="default", axis_keys=()):
            replays.append([token_budget, self._get_per_item_out_tokens(mm_kwargs)])
            return super()._run_budget_graph(mm_kwargs, token_budget, path, axis_keys)

    replays = []
    manager = CpuManager(config, torch.device("cpu"), torch.float32, model)
    manager.capture(object())
    return manager, replays


def whole(values):
    """vLLM's own metadata leaves the padding without a segment, which a CPU's attention refuses: here it is one."""
    offsets, rows = values["cu_seqlens"], len(values["pixel_values"])
    if offsets[-1] == rows:
        return {**values}
    return values | {"cu_seqlens": torch.cat([offsets, offsets.new_tensor([rows])]), "max_seqlen": torch.tensor(rows)}


def main(checkpoint, parts, out):
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config

    engine = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 4},
        seed=0,
        hf_overrides={"architectures": [ARCHITECTURE], "kimivl_lab_parts": parts},
        compilation_config={
            "cudagraph_mm_encoder": True,
            "encoder_cudagraph_token_budgets": BUDGETS,
            "encoder_cudagraph_max_vision_items_per_batch": MOST,
        },
    )
    answers = []
    for names in IMAGES:
        content = [{"type": "image_pil", "image_pil": Image.open(ROOT / "data" / "images" / name)} for name in names]
        message = {"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}
        (answer,) = engine.chat([message], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        answers.append({"prompt": len(answer.prompt_token_ids), "ids": list(answer.outputs[0].token_ids)})

    config = engine.llm_engine.vllm_config
    model = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    with set_current_vllm_config(config), torch.inference_mode():
        manager, replays = cpu_manager(config, model)
        graphs = manager.budget_graphs["default"]
        bounds = {budget: int(graph.input_buffers["max_seqlen"]) for budget, graph in graphs.items()}
        rows = {budget: len(graph.output_buffer) for budget, graph in graphs.items()}
        differences = []
        # Each budget full, nearly empty, and after a larger replay has left its values; then one image no budget holds.
        partly = [[budget - 12, 2] for budget in BUDGETS]
        for sizes in [[600], [2, 2], *([budget] for budget in BUDGETS), [8] * 5, *partly, [612, 20, 300]]:
            batch = batch_of(sizes)
            got, want = manager.execute(batch), model.embed_multimodal(**batch)
            differences.append((torch.cat(got) - torch.cat(list(want))).abs().max().item())  # nan stays nan
        checked = sorted({budget for budget, _ in replays})
        manager.computes, packing = False, []
        for sizes in random_calls(200):
            replays.clear()
            manager.model.encoder_eager_forward = lambda batch, path: torch.zeros(
                int(torch.as_tensor(batch["image_grid_hws"]).prod(-1).sum()) // 4, manager.config.out_hidden_size
            )
            manager.execute(batch_of(sizes))
            packing.append({"sizes": sizes, "replays": list(replays)})
    result = {"answers": answers, "bounds": bounds, "rows": rows, "differences": differences, "replayed": checked}
    Path(out).write_text(json.dumps(result | {"packing": packing, "model": type(model.vision_tower).__name__}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would hold the process
