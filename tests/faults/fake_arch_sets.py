"""Images of one kernel that demand other blocks and clusters: each device has those of its own."""

from __future__ import annotations

import pytest
import torch
from unit import elf_builder

import torch_cubin
from torch_cubin import errors

FLAGS = 0x06000004  # of an ELF header, without the arch
RECORDS = {"required": 0x10, "bound": 0x05, "cluster": 0x3D}


def image(sm: int, **triples: tuple[int, int, int]) -> bytes:
    """A cubin with the kernel `f(float*)` whose binary demands that block or cluster."""
    info = elf_builder.param(0, 0, 8) + elf_builder.value(0x19, 8)
    for name, sizes in triples.items():
        payload = b"".join(size.to_bytes(4, "little") for size in sizes)
        info += elf_builder.attribute(RECORDS[name], payload)
    return elf_builder.Cubin(kernels=[elf_builder.Kernel("f", info)], flags=FLAGS | sm << 8).build()


def launch(driver, images: list[bytes], **shape) -> dict:
    module = torch_cubin.load(images)
    driver.declare(module)
    before = len(driver.launches())
    for _ in range(2):  # the first launch, and one on the fast path
        module["f"](torch.zeros(4), **shape)
    made = driver.launches()[before:]
    assert len(made) == 2
    return made[1]


OTHER = {"required": (128, 1, 1), "bound": (64, 1, 1), "cluster": (2, 1, 1)}


@pytest.mark.parametrize("first", [80, 90])
@pytest.mark.parametrize("kind", OTHER)
def test_requirements_of_another_archs_image_are_ignored(driver, kind, first):
    """The device is 9.0; the order of the images does not count."""
    images = [image(80, **{kind: OTHER[kind]}), image(90)]
    images = images if first == 80 else images[::-1]
    made = launch(driver, images, grid=3, block=256)
    assert (made["grid"], made["block"]) == ([3, 1, 1], [256, 1, 1])


@pytest.mark.parametrize("first", [80, 90])
@pytest.mark.parametrize("kind", OTHER)
def test_launches_against_the_devices_own_images_requirements_are_refused(driver, kind, first):
    images = [image(80), image(90, **{kind: OTHER[kind]})]
    images = images if first == 80 else images[::-1]
    with pytest.raises(errors.LaunchError):
        launch(driver, images, grid=3, block=256)
    launch(driver, images, grid=4, block={"required": 128, "bound": 64, "cluster": 256}[kind])


def test_an_omitted_block(driver):
    """The one that some image demands, as long as no other demands another."""
    for images in (
        [image(80, required=(128, 1, 1)), image(90)],
        [image(80), image(90, required=(128, 1, 1))],
    ):
        assert launch(driver, images, grid=3)["block"] == [128, 1, 1]
    two = [image(80, required=(128, 1, 1)), image(90, required=(64, 1, 1))]
    with pytest.raises(errors.LaunchError, match="needs a block"):
        launch(driver, two, grid=3)
    assert launch(driver, two, grid=3, block=64)["block"] == [64, 1, 1]
