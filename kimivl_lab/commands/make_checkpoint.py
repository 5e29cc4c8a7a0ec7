"""`kimivl-lab make-checkpoint`: a small Kimi-VL with random weights, in the published layout.

Test: tests/test_chat_command.py.
"""

import argparse

import torch
from transformers.utils import logging

from ..kimi_vl.random_checkpoint import write_random_checkpoint
from .output import CommandError, show


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and says what is in it."""
    folder = arguments.folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not arguments.force:
            raise CommandError(f"{folder} is there already and not empty; --force writes into it")
        logging.disable_progress_bar()
        write_random_checkpoint(
            folder,
            seed=arguments.seed,
            dtype=getattr(torch, arguments.dtype),
            vocab_size=arguments.vocab_size,
            shards=arguments.shards,
            vision={"num_hidden_layers": arguments.vision_layers},
            text={"num_hidden_layers": arguments.text_layers, "n_routed_experts": arguments.experts},
        )
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    mib = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    show(
        f"{folder}: a Kimi-VL with random weights, {mib:.0f} MiB: its answers have no meaning",
        f'next: kimivl-lab chat --checkpoint "{folder}" IMAGE "What is this?"',
    )
    return 0
