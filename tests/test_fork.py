"""A child that was forked after a forward can prepare images: the processor starts no OpenMP, which a fork breaks."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, os, signal, sys, time
import numpy as np, torch
from kimivl_lab import KimiVLImageProcessor, MoonVitPretrainedModel, MoonViTConfig

torch.set_num_threads(2)
processor = KimiVLImageProcessor(num_threads=2, input_data_format="channels_last")
images = [np.full((200 + 28 * n, 300, 3), 40 * n, dtype=np.uint8) for n in range(5)]
want = processor(images)
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
with torch.no_grad():
    tower(want.pixel_values, want.image_grid_hws)

def child():
    got = processor(images)
    same = np.array_equal(got.pixel_values.numpy(), want.pixel_values.numpy())
    os._exit(0 if same and got.image_grid_hws.tolist() == want.image_grid_hws.tolist() else 1)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
if process.exitcode is None:
    process.kill()
print("hangs" if process.exitcode is None else process.exitcode)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_processor_works_in_a_child_forked_after_a_forward():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["0"], done.stderr
