"""The whole model: equal to transformers' own parts put together by hand, in every way it is called."""

import pytest
import torch
from transformers import DeepseekV3ForCausalLM
from transformers.models.kimi_k25 import modeling_kimi_k25 as k25

from kimivl_lab import KimiVLForConditionalGeneration
from kimivl_lab.bench.peers import grid_thw, kimi_k25_tower
from tests.conftest import pixels_for
from tests.test_checkpoint import write_checkpoint
from tests.tiny_kimi_vl import PAD, PLACEHOLDER, tiny_json, write_tiny

GRIDS = [(4, 6), (2, 12), (8, 2), (6, 6)]  # 6, 6, 4 and 9 tokens: no square among the first three


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder, tensors) of a small whole model in the published layout, two shards."""
    folder = tmp_path_factory.mktemp("kimi_vl")
    return folder, write_tiny(folder, seed=1)


@pytest.fixture(scope="module")
def model(checkpoint):
    return KimiVLForConditionalGeneration.from_pretrained(checkpoint[0])


@pytest.fixture(scope="module")
def language(checkpoint, tmp_path_factory):
    """transformers' own language model, loaded by transformers from the same tensors."""
    folder = tmp_path_factory.mktemp("deepseek")
    prefix = "language_model."
    parts = {name.removeprefix(prefix): value for name, value in checkpoint[1].items() if name.startswith(prefix)}
    write_checkpoint(folder, parts, tiny_json()["text_config"])
    return DeepseekV3ForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def peer_features(model):
    """The K2.5 tower and projector of transformers with this model's weights: (pixels, grids) -> (T, hidden)."""
    tower, ours = kimi_k25_tower(model.vision_tower), model.multi_modal_projector.state_dict()
    config = k25.Kimi_K25Config(
        vision_config=tower.config,
        text_config=model.config.text_config.to_dict(),
        projection_hidden_size=model.config.vision_config.hidden_size,
    )
    projector = k25.Kimi_K25MultimodalProjection(config)
    names = {"pre_norm": "pre_norm", "linear_1": "in_proj", "linear_2": "out_proj"}
    projector.load_state_dict({f"{names[k.split('.')[0]]}.{k.split('.')[1]}": v for k, v in ours.items()})

    def features(pixels, grids):
        with torch.no_grad():
            return projector(tower(pixels, grid_thw=grid_thw(grids)).pooler_output).squeeze(1)

    return features


def prompts(images_of_prompt, grids=GRIDS, seed=0):
    """Left-padded ids and mask of one prompt for each entry, which is its number of images; then pixels and grids."""
    generator = torch.Generator().manual_seed(seed)
    rows, used = [], iter(grids)
    for images in images_of_prompt:
        row = torch.randint(0, PLACEHOLDER, (2,), generator=generator).tolist()
        for h, w in (next(used) for _ in range(images)):
            row += [PLACEHOLDER] * (h * w // 4) + torch.randint(0, PLACEHOLDER, (3,), generator=generator).tolist()
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    grids = list(grids[: sum(images_of_prompt)])
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"pixel_values": pixels_for(grids, seed), "image_grid_hws": torch.tensor(grids)} if grids else {})


def composed_inputs(inputs, language, peer_features):
    """The same prompts as embeddings, put together in a loop."""
    embeds = language.get_input_embeddings()(inputs["input_ids"]).detach().clone()
    if "pixel_values" in inputs:
        features = iter(peer_features(inputs["pixel_values"], inputs["image_grid_hws"].tolist()))
        for row, column in (inputs["input_ids"] == PLACEHOLDER).nonzero().tolist():
            embeds[row, column] = next(features)
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("images", [(1,), (0, 1, 3), (2, 2), (0,)], ids=str)
def test_logits_and_greedy_ids_equal_the_composition(images, model, language, peer_features):
    inputs = prompts(images)
    composed = composed_inputs(inputs, language, peer_features)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = model(**inputs).logits[real], language(**composed).logits[real]
        assert theirs.std() > 0.5  # logits that differ from each other, so that the tolerance means something
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
        new = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
        assert torch.equal(new, language.generate(**composed, **settings))
