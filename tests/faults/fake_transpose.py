"""TF32 products of operands that are not contiguous along K, and float32 products of operands that
are: which are copied, and the parameters."""

from __future__ import annotations

import pytest
from c_layouts import MATMUL, structure
from faults import launch_params, products

PARAMS = structure(f"{MATMUL}/transpose_params.h", "TransposeParams")


def launches_of(driver, a, b, batch_invariant: bool = False, tf32: bool = True) -> list:
    first, second, _, records = products.launched(driver, a, b, "", batch_invariant, tf32)
    return [first, second, records]


def jobs_of(record: dict) -> list[dict[str, int]]:
    assert record["kernel"] == "transpose_matmul_4_bytes"
    params = launch_params.read(record, PARAMS)
    assert 0 < params.first_blocks <= record["grid"][0]
    return [launch_params.numbers(job) for job in params.jobs if job.rows]


def test_b_is_copied_where_n_is_contiguous_and_rows_begin_anywhere(driver, catalog) -> None:
    m, n, k = 4096, 2048, 1000
    _, address, records = launches_of(driver, ((m, k), (k, 1)), ((k, n), (n + 1, 1)))
    assert records[1]["kernel"].startswith("sm90_matmul_tf32_nt_")
    (job,) = jobs_of(records[0])
    to = job.pop("to")
    assert to % 256 == 0
    assert job == {
        "from": address, "row_stride": n + 1, "batch_stride": 0, "to_row_stride": 1024,
        "to_batch_stride": n * 1024, "rows": k, "columns": n, "tiles_rows": 16,
        "tiles_columns": 32, "vectors": 0,
    }  # fmt: skip
    assert records[0]["grid"] == [16 * 32, 1, 1]


def test_both_operands_and_batches_are_copied_in_one_launch(driver, catalog) -> None:
    m, n, k = 4096, 2056, 2052
    a = ((3, m, k), (m * k + 1, 1, m))
    b = ((3, k, n), (0, n + 1, 1))
    *addresses, records = launches_of(driver, a, b)
    first, second = jobs_of(records[0])
    assert [first["from"], second["from"]] == addresses
    assert (first["vectors"], second["vectors"]) == (0, 0)
    assert (first["batch_stride"], second["batch_stride"]) == (m * k + 1, 0)
    assert first["to_row_stride"] == second["to_row_stride"] == 2080
    assert first["to_batch_stride"] == m * 2080
    blocks = [3 * 33 * 64, 33 * 33]
    assert records[0]["grid"] == [sum(blocks), 1, 1]
    assert launch_params.read(records[0], PARAMS).first_blocks == blocks[0]


@pytest.mark.parametrize(("n", "k", "share"), [(1024, 128, 1), (1024, 1024, 2), (4096, 2052, 8)])
def test_a_multiprocessor_has_no_more_blocks_of_a_copy_than_its_share(
    driver, catalog, n: int, k: int, share: int
) -> None:
    """However few are free when they start, beside the last blocks of the kernel before."""
    *_, records = launches_of(driver, ((n, k), (1, n)), ((k, n), (n + 1, 1)))
    blocks = records[0]["grid"][0]
    memory, block = 228 << 10, 64 * 65 * 4 + 1024 + records[0]["shared"]
    assert min(-(-blocks // 132), 8) == share  # eight fit without any more memory
    assert share == 8 or memory // block == share
    assert bool(records[0]["shared"]) == (share < 8)


@pytest.mark.parametrize(("m", "n", "copied"), [(8192, 512, 1), (512, 8192, 0)])
def test_the_smaller_of_two_is_copied(driver, catalog, m: int, n: int, copied: int) -> None:
    k = 2048
    *addresses, records = launches_of(driver, ((m, k), (1, m)), ((k, n), (n, 1)))
    (job,) = jobs_of(records[0])
    assert (job["from"], job["vectors"]) == (addresses[copied], 1)
    assert records[1]["kernel"].startswith("sm90_matmul_tf32_tt_")


def test_other_products_are_not_copied(driver, catalog) -> None:
    n = 2048
    rows, columns = ((n, n), (n, 1)), ((n, n), (1, n))
    for a, b, mode in (
        (rows, columns, False),  # nothing to copy
        (rows, rows, False),  # a kernel takes one that is not contiguous along K
        (columns, columns, False),
        (rows, rows, True),  # batch-invariant
        (((64, 64), (64, 1)), ((64, 64), (64, 1)), False),  # too small
    ):
        *_, records = launches_of(driver, a, b, mode)
        assert not any(r["kernel"].startswith("transpose") for r in records)


def test_float32_operands_are_copied_so_that_neither_is_contiguous_along_k(driver, catalog) -> None:
    m, n, k = 4096, 4090, 4104
    a, b = ((m, k), (k, 1)), ((k, n), (1, k + 1))
    *addresses, records = launches_of(driver, a, b, tf32=False)
    first, second = jobs_of(records[0])
    assert [first["from"], second["from"]] == addresses
    assert (first["vectors"], second["vectors"]) == (1, 0)
    assert (first["rows"], first["columns"], second["rows"], second["columns"]) == (m, k, n, k)
    assert (first["row_stride"], second["row_stride"]) == (k, k + 1)
    assert (first["to_row_stride"], second["to_row_stride"]) == (4096, 4096)
    params = launch_params.read(records[0], PARAMS)
    assert params.first_blocks == 64 * 65
    assert records[0]["grid"] == [64 * 65 + 64 * 65, 1, 1]
    assert not params.rounds
    assert records[1]["kernel"].startswith("simt_matmul_f32_tn_")


@pytest.mark.parametrize("mode", [True, False])
def test_copies_are_rounded_for_tf32_alone(driver, catalog, mode: bool) -> None:
    n = 4096
    a = ((n, n), (n, 1))
    b = ((n, n), (n + 1, 1)) if mode else ((n, n), (1, n))
    *_, records = launches_of(driver, a, b, tf32=mode)
    assert bool(launch_params.read(records[0], PARAMS).rounds) == mode


def test_other_float32_products_are_not_copied(driver, catalog) -> None:
    for n, layout in ((4096, "tn"), (512, "nt")):
        a, b = (((n, n), (n, 1) if letter == "n" else (1, n)) for letter in layout)
        *_, records = launches_of(driver, a, b, tf32=False)
        assert not any(r["kernel"].startswith("transpose") for r in records)
