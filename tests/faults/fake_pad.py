"""Operands whose rows begin anywhere: which of them are copied, and the copy's parameters."""

from __future__ import annotations

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import launch_params, products
from faults.forked import forked
from faults.launch_params import read_map

from torch_cubin._native import library
from torch_cubin._tuning import measure

PARAMS = structure(f"{MATMUL}/pad_params.h", "PadParams")
SM90_PARAMS = structure(f"{MATMUL}/sm90_params.h", "Sm90MatmulParams")
TRANSPOSED = 1 << 23  # of an sm90 kernel's flags: its operands are B^T and A^T


def launches_of(driver, a, b) -> list:
    first, second, _, records = products.launched(driver, a, b, tf32=True)
    return [first, second, records]


def jobs_of(record: dict) -> list[dict[str, int]]:
    params = launch_params.read(record, PARAMS)
    jobs = [launch_params.numbers(job) for job in params.jobs]
    blocks = [-(-job["total"] // 1024) for job in jobs]
    assert params.first_blocks == blocks[0]
    assert record["grid"] == [sum(blocks), 1, 1]
    return [job for job in jobs if job["total"]]


def check(job: dict[str, int], address: int, batch: int, rows: int, columns: int, pitch: int, size):
    """`pitch`: elements from a row of the operand to the next."""
    chunks = -(-columns * size // 16)
    step = -(-columns * size // 128) * 8  # rows of the copy begin at lines of the cache
    assert (job["rows"], job["columns"], job["chunks"]) == (rows, columns, chunks)
    assert job["total"] == batch * rows * chunks
    assert (job["from"], job["row_stride"]) == (address, pitch)
    assert (job["to_row_stride"], job["to_batch_stride"]) == (step, rows * step)
    assert job["to"] % 16 == 0
    assert job["low"] == address
    last = (batch - 1) * job["batch_stride"] + (rows - 1) * pitch + columns
    assert job["high"] == address + last * size


def test_both_operands_are_copied_at_once(driver, catalog) -> None:
    n = 4097
    a = ((n, n), (n, 1), torch.bfloat16)
    b = ((n, n), (1, n), torch.bfloat16)
    *addresses, records = launches_of(driver, a, b)
    assert records[0]["kernel"] == "pad_matmul_2_bytes"
    assert len(records) >= 2
    jobs = jobs_of(records[0])
    assert len(jobs) == 2
    for job, address in zip(jobs, addresses, strict=True):
        check(job, address, 1, n, n, n, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_operand_is_copied_where_the_other_is_aligned(driver, catalog, dtype) -> None:
    size = dtype.itemsize
    m, n, k = 2048, 3000, 4095
    a = ((m, k), (k + 1, 1), dtype)
    b = ((k, n), (1, k), dtype)  # rows of K elements
    *addresses, records = launches_of(driver, a, b)
    assert records[0]["kernel"] == f"pad_matmul_{size}_bytes"
    (job,) = jobs_of(records[0])
    check(job, addresses[1], 1, n, k, k, size)


def test_rows_along_n_are_copied_too(driver, catalog) -> None:
    m, n, k = 2048, 3001, 4096
    a = ((m, k), (k, 1), torch.bfloat16)
    b = ((k, n), (n, 1), torch.bfloat16)
    *addresses, records = launches_of(driver, a, b)
    (job,) = jobs_of(records[0])
    check(job, addresses[1], 1, k, n, n, 2)


def test_rows_of_copies_are_read_to_the_ends_of_their_lines(driver, catalog) -> None:
    """The TMA would take longer to fill a part of a box with zeros. Of K nothing else may be
    read."""
    m, n, k = 210, 330, 1001

    def maps_of(a, b) -> list[list[int]]:
        def run() -> list[dict]:
            x, y = (tensors.strided(*each, torch.bfloat16) for each in (a, b))
            with measure.watching():
                library.force_config("pad ab")
                torch.ops.cubin._matmul(x, y)
            return driver.launches()

        (record,) = [x for x in forked(run) if x["kernel"].startswith("sm90_matmul_bf16_")]
        params = launch_params.read(record, SM90_PARAMS)
        maps = [read_map(map_)["dims"] for map_ in (params.a, params.b)]
        return maps[::-1] if params.flags & TRANSPOSED else maps

    along_m, along_n = ((m, k), (1, m)), ((k, n), (n, 1))
    assert maps_of(along_m, along_n) == [[256, k], [384, k]]
    along_k = ((m, k), (k, 1)), ((k, n), (1, k))
    assert maps_of(*along_k) == [[k, m], [k, n]]


def test_an_offset_and_a_gap_are_followed(driver, catalog) -> None:
    m, n, k = 2048, 2048, 2048
    a = ((m, k), (k + 8, 1), torch.bfloat16, 0, 3)  # begins 6 bytes past a boundary
    b = ((k, n), (1, k), torch.bfloat16)
    *addresses, records = launches_of(driver, a, b)
    (job,) = jobs_of(records[0])
    assert addresses[0] % 16 == 6
    check(job, addresses[0], 1, m, k, k + 8, 2)


def test_batches_are_copied_whole_and_broadcasts_once(driver, catalog) -> None:
    m, n, k = 4096, 4096, 1023
    a = ((3, m, k), (m * k + 5, k, 1), torch.bfloat16)
    b = ((3, k, n), (0, 1, k), torch.bfloat16)
    *addresses, records = launches_of(driver, a, b)
    first, second = jobs_of(records[0])
    check(first, addresses[0], 3, m, k, k, 2)
    assert first["batch_stride"] == m * k + 5
    check(second, addresses[1], 1, n, k, k, 2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (((2048, 2048), (2048, 1)), ((2048, 2048), (1, 2048))),  # aligned
        (((2048, 2048), (4096, 2)), ((2048, 2048), (1, 2048))),  # elements apart in both dims
        (((8, 9), (9, 1)), ((9, 8), (8, 1))),  # so small that a second launch costs more
        # Rows of one element take eight times their memory, and more chunks than 32 bits count.
        (((2**29, 1, 1), (1, 1, 1)), ((2**29, 1, 1), (1, 1, 1))),
    ],
)
def test_operands_are_not_copied_without_a_benefit(driver, catalog, a, b) -> None:
    *_, records = launches_of(driver, (*a, torch.bfloat16), (*b, torch.bfloat16))
    assert not any(record["kernel"].startswith("pad_") for record in records)


def test_a_forced_config_names_what_each_copy_is_followed_by(driver, catalog) -> None:
    """Rows of 473 float32 elements along N and M: aligned, then transposed."""
    n, k = 473, 1001

    def run() -> list[str]:
        torch.backends.cuda.matmul.allow_tf32 = True
        x = tensors.strided((n, k), (1, n), torch.float32)
        y = tensors.strided((k, n), (n, 1), torch.float32)
        with measure.watching():
            library.force_config("pad ab/transpose ab/sm90 128x128 share_a")
            torch.ops.cubin._matmul(x, y)
        return [launch["kernel"] for launch in driver.launches()]

    pad, transpose, product = forked(run)
    assert pad.startswith("pad_")
    assert transpose.startswith("transpose_")
    assert product == "sm90_matmul_tf32_nt_128x128"


def test_small_tf32_products_of_rows_that_begin_anywhere_have_small_tiles(driver, catalog) -> None:
    """300 x 300 x 50 take 2.5 us, and 3.5 by tiles of 64 x 64 (H200)."""
    x, y = ((300, 35), (35, 1), torch.float32), ((35, 300), (1, 35), torch.float32)
    *_, (launch,) = launches_of(driver, x, y)
    assert launch["kernel"] == "unaligned_matmul_tf32_nt_32x64"
