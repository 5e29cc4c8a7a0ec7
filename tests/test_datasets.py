"""What lies in data/: every image opens, every workload reads, and the counts are those of its sources."""

import pytest
from PIL import Image

from kimivl_lab.datasets import WORKLOADS, data_path, load_sizes, repository_root, sample_images

IMAGES_OF_WORKLOAD = {
    "coco_val2017": 5000,
    "cameras": 88,
    "clipart": 8121,
    "pew_charts": 7724,
    "receipts": 626,
    "document_photos": 66,
    "device_screens": 115,
}


def test_every_sample_image_opens_under_its_name():
    images = sample_images()
    assert {"china", "coffee", "chelsea", "moon_phases_panorama", "tall_icon", "tiny_flag"} <= images.keys()
    assert list(images) == sorted(images)
    for name, path in images.items():
        with Image.open(path) as image:
            image.verify()
        assert path.stem == name


def test_every_workload_file_has_a_title_and_every_title_a_file():
    assert {path.stem for path in data_path("workloads").glob("*.csv")} >= WORKLOADS.keys()
    assert len(set(WORKLOADS.values())) == len(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_holds_the_images_of_its_source(workload):
    sizes = load_sizes(workload)
    assert sum(count for _, _, count in sizes) == IMAGES_OF_WORKLOAD[workload]
    assert all(width > 0 and height > 0 and count > 0 for width, height, count in sizes)
    assert len({(width, height) for width, height, _ in sizes}) == len(sizes), "a size is listed twice"


def test_an_unknown_workload_or_file_is_named():
    with pytest.raises(ValueError, match="unknown workload 'coco'.*coco_val2017"):
        load_sizes("coco")
    with pytest.raises(FileNotFoundError, match="data/images/missing.png"):
        data_path("images", "missing.png")


def test_the_checkout_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (repository_root() / "pyproject.toml").is_file()
