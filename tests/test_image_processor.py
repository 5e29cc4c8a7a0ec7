"""The image processor against the reference written out in `image_oracle`, bit for bit."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kimivl_lab.bench.preprocess_reference import reference_preprocess
from kimivl_lab.config import published_config
from kimivl_lab.geometry import image_geometry
from kimivl_lab.images import processor as image_processor
from kimivl_lab.images.loading import load_image
from kimivl_lab.images.patches import normalised_levels, normalising_steps, write_normalised
from kimivl_lab.images.processor import ImageBatch, ImageSettings, KimiVLImageProcessor
from tests.image_oracle import IMAGES, assert_same, noise, oracle, oracle_levels

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PICTURES = sorted(IMAGES.iterdir())
processor = KimiVLImageProcessor()


def test_output_is_packed_contiguous_and_on_the_host():
    batch = processor([noise(40, 30), noise(100, 60, seed=1)])
    assert set(batch) == {"pixel_values", "image_grid_hws"}
    assert (batch.pixel_values.shape, batch.pixel_values.dtype) == ((4 * 4 + 6 * 8, 3, 14, 14), torch.float32)
    assert (batch.image_grid_hws.dtype, batch.image_grid_hws.tolist()) == (torch.int64, [[4, 4], [6, 8]])
    assert batch.pixel_values.is_contiguous() and batch.pixel_values.device.type == "cpu"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_sample_pictures(path):
    with Image.open(path) as image:
        assert_same(processor(path), *oracle([image]))


def test_all_sample_pictures_in_one_batch():
    images = [Image.open(path) for path in PICTURES]
    assert_same(processor([str(path) for path in PICTURES]), *oracle(images))
    pixel_values, grids = reference_preprocess(images)
    assert_same(processor(images), pixel_values, grids.tolist())


@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 150), st.sampled_from(["L", "LA", "RGB", "RGBA"])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 4, 30, 4096]),
    st.booleans(),
    st.sampled_from([((0.5,) * 3, (0.5,) * 3), (CLIP_MEAN, CLIP_STD), ((0.1, 0.2, 0.3), (0.25, 0.3, 4.0))]),
)
@settings(max_examples=60, deadline=None)
def test_random_batches(shapes, limit, pad, mean_std):
    images = [noise(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    mean, std = mean_std
    options = {"in_token_limit": limit, "pad_input": pad, "image_mean": mean, "image_std": std}
    try:
        for image in images:
            image_geometry(*image.size, in_token_limit=limit, pad_input=pad)
    except ValueError:
        with pytest.raises(ValueError, match="image "):
            processor(images, **options)
        return
    wanted, grids = oracle(images, limit, pad, mean, std)
    assert_same(processor(images, **options), wanted, grids)
    plain, _ = reference_preprocess(images, **options)
    assert torch.equal(plain, wanted)


@pytest.mark.parametrize("size", [(1000, 1000), (153, 6733), (1920, 1080)])
def test_pictures_above_the_limit(size):
    image = noise(*size)
    assert_same(processor(image), *oracle([image]))


def test_each_picture_is_the_same_alone_and_in_any_batch():
    images = [noise(30 + 20 * seed, 90 - 7 * seed, seed=seed) for seed in range(5)]
    alone = [processor(image) for image in images]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 3, 0, 3]):
        batch = processor([images[index] for index in order])
        assert torch.equal(batch.pixel_values, torch.cat([alone[index].pixel_values for index in order]))
        assert torch.equal(batch.image_grid_hws, torch.cat([alone[index].image_grid_hws for index in order]))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads):
    pixel_values, grids = reference_preprocess([Image.open(PICTURES[index]) for index in (1, 7, 6, 1, 1)])
    lazy = Image.open(PICTURES[1])  # decoded by whichever thread comes first, and given three times
    batch = processor([lazy, PICTURES[7], Image.open(PICTURES[6]), lazy, lazy], num_threads=threads)
    assert_same(batch, pixel_values, grids.tolist())


def test_a_picture_given_again_is_loaded_once_and_named_by_its_first_place(monkeypatch):
    loaded = []

    def load_and_count(source, *options):
        loaded.append(source)
        return load_image(source, *options)

    monkeypatch.setattr(image_processor, "load_image", load_and_count)
    images = [noise(20, 20), noise(30, 30)]
    processor([images[0], images[1], images[0], images[0]], num_threads=1)
    assert [id(image) for image in loaded] == [id(image) for image in images]
    wide = np.full((9, 9), 300)
    with pytest.raises(ValueError, match="^image 1 "):
        processor([images[0], wide, wide])


@pytest.mark.parametrize(("option", "pictures", "workers"), [(None, 9, 3), (2, 9, 2), (None, 2, 2), (4, 1, 1)])
def test_threads_follow_torch_unless_told(monkeypatch, option, pictures, workers):
    started = []

    def pool(count):
        started.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(image_processor, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    processor([noise(9, 9)] * pictures, num_threads=option)
    assert started == [workers]


def test_uint8_levels_are_the_float_path_before_normalising():
    images = [noise(45, 31), noise(61, 29, "L", seed=1)]
    levels = processor(images, return_uint8=True)
    batch = processor(images)
    assert levels.pixel_values.dtype == torch.uint8
    assert torch.equal(levels.image_grid_hws, batch.image_grid_hws)
    assert torch.equal((levels.pixel_values.float() / 255 - 0.5) / 0.5, batch.pixel_values)
    first = levels.pixel_values[:16].view(4, 4, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(56, 56, 3)
    assert np.array_equal(first.numpy(), oracle_levels(images[0]))


@given(st.floats(-2, 2, width=32), st.floats(0.0078125, 8, width=32))
@settings(max_examples=200, deadline=None)
def test_normalising_steps_are_exact_for_all_levels(mean, std):
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    out = np.empty(levels.shape, dtype=np.float32)
    write_normalised(levels, [normalising_steps(mean, std)] * 3, out)
    assert np.array_equal(out[:, 0, 0, 0], normalised_levels(mean, std))
    wanted = (torch.arange(256).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert np.array_equal(out[:, 2, 0, 0], wanted.numpy())


def test_published_normalisation_needs_two_operations():
    assert len(normalising_steps(0.5, 0.5)) == 2
    assert len(normalising_steps(CLIP_MEAN[0], CLIP_STD[0])) == 3


# Sources


@pytest.mark.parametrize("empty", [[], (), [[], []]])
def test_no_pictures(empty):
    batch = processor(empty)
    assert (batch.pixel_values.shape, batch.pixel_values.dtype) == ((0, 3, 14, 14), torch.float32)
    assert (batch.image_grid_hws.shape, batch.image_grid_hws.dtype) == ((0, 2), torch.int64)
    assert processor(empty, return_uint8=True).pixel_values.dtype == torch.uint8


def test_nested_lists_keep_their_order():
    images = [noise(20 + 30 * seed, 40, seed=seed) for seed in range(4)]
    wanted = processor(images)
    assert_same(processor([[images[0]], [], (images[1], [images[2], images[3]])]), *wanted_of(wanted))


def test_every_source_gives_the_same(tmp_path):
    image = noise(70, 41)
    image.save(tmp_path / "picture.png")
    wanted = wanted_of(processor(image))
    last = np.array(image)
    first = np.ascontiguousarray(last.transpose(2, 0, 1))
    assert_same(processor(tmp_path / "picture.png"), *wanted)
    assert_same(processor(str(tmp_path / "picture.png")), *wanted)
    for form in (np.array, torch.tensor):
        assert_same(processor(form(last), input_data_format="channels_last"), *wanted)
        assert_same(processor(form(first), input_data_format="channels_first"), *wanted)
    assert_same(processor(last[:, ::-1][:, ::-1], input_data_format="channels_last"), *wanted)
    assert_same(processor(first[None], input_data_format="channels_first"), *wanted)
    assert_same(KimiVLImageProcessor(input_data_format="channels_first")(torch.tensor(first)), *wanted)
    tracked = (torch.tensor(first) / 255).requires_grad_()
    assert_same(processor(tracked, input_data_format="channels_first"), *wanted)


def test_a_batch_array_is_a_list_of_pictures():
    arrays = np.stack([np.array(noise(30, 50, seed=seed)) for seed in range(3)])
    batch = processor(arrays, input_data_format="channels_last")
    assert batch.image_grid_hws.tolist() == [[4, 4]] * 3
    assert_same(processor(list(arrays), input_data_format="channels_last"), *wanted_of(batch))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_array_channels(channels, mode):
    image = noise(33, 44, mode)
    array = np.array(image).reshape(44, 33, channels)
    assert_same(processor(array, input_data_format="channels_last"), *wanted_of(processor(image)))


def test_inputs_are_left_as_they_were(tmp_path):
    image, array = noise(50, 40, "RGBA"), np.array(noise(50, 40))
    before = image.copy(), array.copy()
    batch = processor([image, array], input_data_format="channels_last", alpha=(255, 255, 255))
    batch.pixel_values.fill_(7)
    assert image == before[0] and image.mode == "RGBA"
    assert np.array_equal(array, before[1])


@pytest.mark.parametrize("bad", [None, 3, b"bytes", [1, 2], {"image": 1}, [["a.png", None]]])
def test_what_is_no_picture_is_a_type_error(bad):
    with pytest.raises(TypeError, match=r"image \d is a (NoneType|int|bytes|dict)"):
        processor(bad)


# Files that cannot be used


def write_bad_files(folder):
    noise(60, 60).save(folder / "whole.png")
    noise(60, 60).save(folder / "whole.jpg")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:5000])
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:1000])
    (folder / "text.png").write_text("no picture at all")
    (folder / "empty.jpg").touch()
    (folder / "folder.png").mkdir()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cut.png", "truncated|broken|incomplete"),
        ("cut.jpg", "truncated"),
        ("text.png", "not an image"),
        ("empty.jpg", "empty"),
        ("missing.jpg", "no such file"),
        ("folder.png", "directory"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bad_file_is_one_line_with_its_name_and_index(tmp_path, name, reason, threads):
    write_bad_files(tmp_path)
    with pytest.raises(ValueError) as caught:
        processor([tmp_path / "whole.png", tmp_path / name, tmp_path / "whole.jpg"], num_threads=threads)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"image 1 ({tmp_path / name}): ")
    assert any(word in message for word in reason.split("|")), message


def test_arrays_that_cannot_be_used():
    for array, layout, words in [
        (np.zeros((3, 4, 5), np.uint8), "channels_last", r"\(3, 4, 5\) read as channels_last has 5 channels"),
        (np.zeros((5, 4, 3), np.uint8), "channels_first", r"\(5, 4, 3\) read as channels_first has 5 channels"),
        (np.zeros(4, np.uint8), None, "2 or 3 dimensions.*got 1"),
        (np.zeros((2, 2, 2, 2, 2), np.uint8), None, "2 or 3 dimensions.*got 5"),
        (np.zeros((0, 4), np.uint8), None, "height must be a positive integer, got 0"),
        (np.zeros((4, 4), complex), None, "complex128"),
        (np.zeros((4, 4), object), None, "object"),
    ]:
        with pytest.raises(ValueError, match=f"image 1.*{words}"):
            processor([np.zeros((4, 4), np.uint8), array], input_data_format=layout)


# Settings


def test_defaults_are_the_published_file():
    published = published_config("preprocessor_config.json")
    assert processor.to_dict() == published
    assert json.loads(KimiVLImageProcessor(**published).to_json_string()) == published


def test_the_published_file_survives_a_round_trip(tmp_path):
    published = published_config("preprocessor_config.json")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))
    loaded = KimiVLImageProcessor.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "preprocessor_config.json").read_text()) == published


def test_changed_settings_and_foreign_keys_survive_a_round_trip(tmp_path):
    changed = KimiVLImageProcessor(in_token_limit=16384, alpha=(255, 0, 7), return_uint8=True, auto_map={"a": "b"})
    changed.save_pretrained(tmp_path)
    loaded = KimiVLImageProcessor.from_pretrained(tmp_path, pad_input=False)
    saved = {"in_token_limit": 16384, "alpha": [255, 0, 7], "return_uint8": True, "auto_map": {"a": "b"}}
    assert loaded.to_dict() == published_config("preprocessor_config.json") | saved | {"pad_input": False}
    image = noise(30, 30, "RGBA")
    wanted = changed(image, pad_input=False)
    assert wanted.pixel_values.dtype == torch.uint8
    assert torch.equal(loaded(image).pixel_values, wanted.pixel_values)


@pytest.mark.parametrize(
    ("override", "value"),
    [("in_token_limit", 9), ("pad_input", False), ("return_uint8", True), ("image_std", (1, 2, 3)), ("patch_size", 7)],
)
def test_an_override_is_a_setting_for_one_call(override, value):
    image = noise(90, 80)
    before = processor(image)
    overridden = processor(image, **{override: value})
    assert overridden.pixel_values.shape != before.pixel_values.shape or (
        not torch.equal(overridden.pixel_values.float(), before.pixel_values)
    )
    assert_same(KimiVLImageProcessor(**{override: value})(image), *wanted_of(overridden))
    assert_same(processor(image), *wanted_of(before))


@pytest.mark.parametrize(("name", "value"), [("in_token_limit", 9), ("alpha", (9, 8, 7))])
def test_an_attribute_changed_later_counts(name, value):
    changed, image = KimiVLImageProcessor(), noise(90, 80, "RGBA")
    before = changed(image)
    setattr(changed, name, value)
    assert_same(changed(image), *wanted_of(processor(image, **{name: value})))
    assert changed(image).pixel_values.shape != before.pixel_values.shape or (
        not torch.equal(changed(image).pixel_values, before.pixel_values)
    )
    setattr(changed, name, -1)
    with pytest.raises(ValueError, match=name):
        changed(image)


def test_none_means_the_processors_own():
    image = noise(40, 40)
    assert_same(processor(image, in_token_limit=None, alpha=None), *wanted_of(processor(image)))


@pytest.mark.parametrize(
    ("name", "closest"),
    [("in_token_limt", "in_token_limit"), ("return_uint", "return_uint8"), ("alfa", "alpha"), ("do_resize", None)],
)
def test_unknown_keywords_are_refused_with_the_closest(name, closest):
    suggestion = rf" \(did you mean '{closest}'\?\)" if closest else ""
    with pytest.raises(TypeError, match=rf"'{name}'{suggestion}; it accepts alpha, .*return_tensors"):
        processor(noise(20, 20), **{name: 1})
    with pytest.raises(TypeError, match=name):
        processor.get_number_of_image_patches(20, 20, {name: 1})


def test_a_misspelt_setting_is_refused_at_construction(tmp_path):
    with pytest.raises(TypeError, match=r"'in_token_limt' \(did you mean 'in_token_limit'\?\)"):
        KimiVLImageProcessor(in_token_limt=9)
    processor.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"'in_token_limt' \(did you mean 'in_token_limit'\?\)"):
        KimiVLImageProcessor.from_pretrained(tmp_path, in_token_limt=9)


def test_the_names_transformers_reads_are_the_settings():
    assert set(KimiVLImageProcessor.valid_kwargs.__annotations__) == {field.name for field in fields(ImageSettings)}


def test_nothing_is_fetched_or_decoded_ahead_of_the_headers():
    sources = ["https://example.org/a.png", noise(5, 5), [PICTURES[0]]]
    assert processor.fetch_images(sources) is sources
    with pytest.raises(ValueError, match=r"image 0 \(https://example.org/a.png\): no such file .*network"):
        processor(sources)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_token_limit", 0),
        ("in_token_limit", 4096.0),
        ("patch_size", True),
        ("max_image_pixels", -1),
        ("num_threads", 0),
        ("pad_input", "no"),
        ("return_uint8", 1),
        ("merge_kernel_size", (2,)),
        ("merge_kernel_size", (2, 0)),
        ("image_mean", (0.5, 0.5)),
        ("image_mean", 0.5),
        ("image_std", (0.5, 0.0, 0.5)),
        ("alpha", "white"),
        ("alpha", (0, 0, 256)),
        ("alpha", (0, 0)),
        ("alpha", (0.0, 0.0, 0.0)),
        ("input_data_format", "HWC"),
        ("return_tensors", "tf"),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        processor(noise(20, 20), **{name: value})
    if name != "return_tensors":
        with pytest.raises(ValueError, match=name):
            KimiVLImageProcessor(**{name: value})


# The batch


def test_numpy_on_request():
    image = noise(40, 30)
    batch = processor(image, return_tensors="np")
    assert isinstance(batch.pixel_values, np.ndarray) and isinstance(batch.image_grid_hws, np.ndarray)
    assert np.array_equal(batch.pixel_values, processor(image, return_tensors="pt").pixel_values.numpy())


@pytest.mark.parametrize("target", [("meta",), ("meta", torch.bfloat16), (torch.bfloat16,)])
def test_grids_stay_on_the_host_when_the_batch_moves(target):
    batch = processor(noise(40, 30))
    moved = batch.to(*target)
    assert isinstance(moved, ImageBatch) and moved is batch
    assert moved.pixel_values.dtype == (torch.bfloat16 if torch.bfloat16 in target else torch.float32)
    assert moved.pixel_values.device.type == ("meta" if "meta" in target else "cpu")
    assert (moved.image_grid_hws.device.type, moved.image_grid_hws.dtype) == ("cpu", torch.int64)
    assert moved.image_grid_hws.tolist() == [[4, 4]]


def test_a_batch_survives_pickling():
    batch = processor(noise(40, 30))
    again = pickle.loads(pickle.dumps(batch))
    assert isinstance(again, ImageBatch)
    assert_same(again, *wanted_of(batch))


def wanted_of(batch) -> tuple[torch.Tensor, list]:
    return batch.pixel_values.clone(), batch.image_grid_hws.tolist()
