"""`kimivl-lab chat`: a question about images, answered by a checkpoint while it is generated.

Without a question, on a terminal, questions are read line by line; the images are encoded once for all of them.

Test: tests/test_chat_command.py.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from ..config import EncoderOptions
from ..kimi_vl.model import KimiVLForConditionalGeneration
from ..kimi_vl.processor import KimiVLProcessor
from .checkpoints import device_of, loading
from .output import CommandError, progress_bar, show, tell


def run(arguments: argparse.Namespace) -> int:
    """Loads the checkpoint, encodes the images, streams an answer to each question."""
    images, question = _images_and_question(arguments.words)
    device = device_of(arguments.device)
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    with loading(arguments.checkpoint, progress=on_terminal):
        settings = {"in_token_limit": arguments.in_token_limit} if arguments.in_token_limit else {}
        processor = KimiVLProcessor.from_pretrained(arguments.checkpoint, **settings)
        dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        options = EncoderOptions(attention=arguments.attention)
        model: Any = KimiVLForConditionalGeneration.from_pretrained(arguments.checkpoint, dtype=dtype, options=options)
        model = model.to(device).eval()
    if getattr(model.config, "random_weights", False):
        tell("note", "the weights of this checkpoint are random: the answer has no meaning")
    try:
        model.vision_tower.resolve_options()  # an attention that does not run here is refused before any work
        conversation = _Conversation(processor, model, images, arguments)
        for text in _questions() if question is None else [question]:
            conversation.ask(text)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0


def _images_and_question(words: list[str]) -> tuple[list[Path], str | None]:
    """The words that are files, and the last word if it is none."""
    question = None if not words or os.path.isfile(words[-1]) else words[-1]
    images = [Path(word) for word in (words if question is None else words[:-1])]
    if missing := [str(path) for path in images if not os.path.isfile(path)]:
        raise CommandError(
            f"no such file: {', '.join(missing)} (the question is one word at the end: put it in quotes)"
        )
    if question is None and not sys.stdin.isatty():
        raise CommandError("no question: give it behind the images, in quotes")
    return images, question


def _questions() -> Iterator[str]:
    """Lines from the terminal, until one is empty or the input ends."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


class _Conversation:
    """The messages so far, and the images of the first one as vectors for the language model."""

    def __init__(self, processor: Any, model: Any, images: list[Path], arguments: argparse.Namespace) -> None:
        self.processor, self.model, self.images, self.arguments = processor, model, images, arguments
        self.messages: list[dict[str, Any]] = []
        if arguments.system:
            self.messages.append({"role": "system", "content": arguments.system})
        self.image_embeds = None
        torch.manual_seed(arguments.seed)

    @torch.inference_mode()
    def ask(self, question: str) -> None:
        """Answers on stdout, and adds question and answer to the messages."""
        first = not any(message["role"] == "user" for message in self.messages)
        content: list[dict[str, Any]] = [{"type": "image"} for _ in self.images] if first else []
        self.messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        prompt = self.processor.apply_chat_template(self.messages, add_generation_prompt=True)
        started = time.perf_counter()
        with progress_bar() as progress:
            progress.add_task("reading the prompt and its images", total=None)
            batch = self.processor(images=self.images or None, text=prompt, return_tensors="pt").to(self.model.device)
            self._require_room(batch["input_ids"].shape[1])
            if self.images and self.image_embeds is None:
                pixels = batch["pixel_values"].to(self.model.dtype)
                self.image_embeds = self.model.get_image_features(pixels, batch["image_grid_hws"])
            streamer = _Printer(self.processor.tokenizer, progress)
            ids = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                image_embeds=self.image_embeds,
                streamer=streamer,
                **self._generation(),
            )
        show("", plain=True)
        seconds = time.perf_counter() - started
        new = ids[0, batch["input_ids"].shape[1] :]
        self.messages.append({"role": "assistant", "content": self.processor.decode(new, skip_special_tokens=True)})
        image_tokens = 0 if self.image_embeds is None else len(self.image_embeds)
        tell(
            "note",
            f"{batch['input_ids'].shape[1]} tokens of prompt, {image_tokens} of them images; {len(new)} new tokens in "
            f"{seconds:.1f} s, the first after {(streamer.first or time.perf_counter()) - started:.1f} s",
        )

    def _require_room(self, prompt: int) -> None:
        most = self.model.config.text_config.max_position_embeddings
        if prompt + self.arguments.max_new_tokens > most:
            raise CommandError(
                f"{prompt} tokens of prompt and {self.arguments.max_new_tokens} new ones are more than this model's "
                f"{most}: fewer or smaller images, --in-token-limit, or --max-new-tokens"
            )

    def _generation(self) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": self.arguments.max_new_tokens, "do_sample": False}
        if self.arguments.temperature > 0:
            options |= {"do_sample": True, "temperature": self.arguments.temperature}
        return options


class _Printer(TextStreamer):
    """Prints each word when it is complete, and notes when the first one came."""

    def __init__(self, tokenizer: Any, progress: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.progress = progress
        self.first: float | None = None

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt and self.first is None:
            self.first = time.perf_counter()
            self.progress.stop()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        show(text, plain=True, end="")
