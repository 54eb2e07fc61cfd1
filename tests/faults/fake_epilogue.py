"""Epilogues on the stand-in driver: which kernels are launched for them, with which parameters."""

from __future__ import annotations

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.fake_sm90_launch import FINISH, GENERAL, Params
from faults.forked import launches_of

import torch_cubin

ADD_VECTOR, ACTIVATION, OUT_FLOAT = 1024, 12, 1 << 8
ACTIVATE, SUMS, ACCUMULATE = 1 << 17, 1 << 24, 1 << 25
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
Finish = structure(f"{MATMUL}/finish_params.h", "FinishParams")
Product = structure(f"{MATMUL}/matmul_params.h", "MatmulParams")


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch):
    """Makes a catalog of the matmul kernels that are not of these kinds."""

    def make(*without: str) -> None:
        kernels = catalogs.kernels_of("matmul", lambda k: k["kind"] not in without)
        catalogs.install(driver, tmp_path, monkeypatch, kernels)

    return make


def transposed(rows: int, columns: int, dtype) -> torch.Tensor:
    """[rows, columns] whose columns are contiguous."""
    return tensors.strided((rows, columns), (1, rows), dtype)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "none"])
def test_hopper_s_kernels_apply_activations_themselves(driver, catalog, name: str) -> None:
    catalog()

    def call() -> None:
        x, weight = (tensors.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
        bias = tensors.empty(4096, dtype=torch.bfloat16)
        torch.ops.cubin._linear_activation(x, weight, bias, name)

    (launch,) = launches_of(driver, call)
    assert launch["kernel"].startswith("sm90_matmul_bf16_nt_")
    params = launch_params.read(launch, Params)
    assert params.flags & FINISH
    assert not params.flags & GENERAL
    assert params.flags >> ACTIVATION & 7 == ACTIVATIONS[name]
    assert params.bias != 0
    assert (params.alpha, params.beta) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "strides", "vectors", "in_registers"),
    [
        ((4096, 2048), (2048, 1), True, True),
        ((4096, 2048), (1, 4096), False, False),
        ((4096, 2048), (2050, 1), False, True),
        ((4096, 2048), (2051, 1), False, False),
        ((4096, 1), (1, 1), False, False),
        ((2048,), (2,), False, False),
        ((2048,), (1,), True, True),
        ((1,), (1,), False, False),
    ],
    ids=str,
)
def test_hopper_s_kernels_add_what_broadcasts(
    driver, catalog, shape, strides, vectors, in_registers
) -> None:
    catalog()

    def call() -> None:
        addend = tensors.strided(shape, strides, torch.float16)
        a = tensors.empty(4096, 4096, dtype=torch.float16)
        b = transposed(4096, 2048, torch.float16)
        torch.ops.cubin._addmm(addend, a, b, beta=0.5, alpha=-3)

    (launch,) = launches_of(driver, call)
    assert launch["kernel"].startswith("sm90_matmul_f16_nt_")
    params = launch_params.read(launch, Params)
    assert (params.alpha, params.beta) == (-3, 0.5)
    assert params.bias == 0
    assert params.addend != 0
    assert bool(params.flags & ADD_VECTOR) == vectors
    assert bool(params.flags & FINISH) == in_registers
    assert bool(params.flags & GENERAL) != in_registers
    expected = [s if n != 1 else 0 for n, s in zip(shape, strides, strict=True)]
    expected = [0] * (2 - len(expected)) + expected
    assert [params.addend_stride_m, params.addend_stride_n] == expected


def test_an_addend_of_one_unscaled_row_is_a_bias(driver, catalog) -> None:
    catalog()

    def call() -> None:
        a = tensors.empty(4096, 4096, dtype=torch.float16)
        b = transposed(4096, 2048, torch.float16)
        for row in (tensors.empty(2048, dtype=torch.float16),
                    tensors.strided((4096, 2048), (0, 1), torch.float16)):  # fmt: skip
            torch.ops.cubin._addmm(row, a, b)

    for launch in launches_of(driver, call):
        params = launch_params.read(launch, Params)
        assert not params.flags & GENERAL
        assert params.bias != 0
        assert params.addend == 0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_other_kernels_leave_their_sums_to_a_second_one(driver, catalog, dtype) -> None:
    catalog("sm90", "sm90_ping_pong", "sm90_skinny")
    half = dtype.itemsize == 2

    def call() -> None:
        for m, n, k in ((512, 512, 512), (4, 4096, 4096), (2048, 3, 64), (16, 128, 16384)):
            a, b = tensors.empty(m, k, dtype=dtype), transposed(k, n, dtype)
            addend = tensors.empty(m, n, dtype=dtype)
            torch.ops.cubin._addmm(addend, a, b, beta=2, alpha=3)

    records = launches_of(driver, call)
    finishes = [i for i, x in enumerate(records) if x["kernel"].startswith("finish_matmul_")]
    assert len(finishes) == 4
    begin = 0
    for i, (m, n) in zip(finishes, ((512, 512), (4, 4096), (2048, 3), (16, 128)), strict=True):
        params = launch_params.read(records[i], Finish)
        assert (params.rows, params.m, params.n) == (m, m, n)
        assert (params.alpha, params.beta, params.activation) == (3, 2, 0)
        assert (params.addend_stride_m, params.addend_stride_n) == (n, 1)
        assert params.vectors == (n % 4 == 0)
        assert params.splits == 1
        assert params.addend != 0
        assert params.bias == 0
        last = records[i - 1]["kernel"]
        product = launch_params.read(records[i - 1], Product)
        assert product.c == params.sums != params.out
        if last.startswith("reduce"):
            assert last.endswith("_f64" if dtype == torch.float64 else "_f32")
            assert product.partial not in (0, product.c)
        elif half:  # the sums themselves, unrounded
            assert product.partial == product.c
        assert i - begin in (1, 2)
        begin = i + 1


def test_batches_of_an_addend(driver, catalog) -> None:
    catalog("sm90", "sm90_ping_pong", "sm90_skinny")

    def call() -> None:
        a = tensors.empty(3, 2, 64, 64, dtype=torch.float32)
        b = tensors.empty(3, 2, 64, 32, dtype=torch.float32)
        for strides in ((4096, 2048, 32, 1), (2048, 0, 32, 1), (0, 2048, 0, 1)):
            addend = tensors.strided((3, 2, 64, 32), strides, torch.float32)
            torch.ops.cubin._addmm(addend, a, b, alpha=2)
        # Batches of A that share B become more rows, unless there is an addend that prevents it.
        shared, few = (tensors.empty(*n, dtype=torch.float32) for n in ((64, 32), (3, 64, 64)))
        torch.ops.cubin._addmm(tensors.strided((3, 64, 32), (0, 32, 1), torch.float32), few, shared)

    found = [
        launch_params.read(launch, Finish)
        for launch in launches_of(driver, call)
        if launch["kernel"].startswith("finish")
    ]
    dims = [(list(x.batch_size), list(x.addend_batch_stride)) for x in found]
    assert dims == [
        ([6, 1, 1, 1], [2048, 0, 0, 0]),
        ([2, 3, 1, 1], [0, 2048, 0, 0]),
        ([2, 3, 1, 1], [2048, 0, 0, 0]),
        ([3, 1, 1, 1], [0, 0, 0, 0]),
    ]
    assert [(x.rows, x.m) for x in found] == [(384, 64)] * 3 + [(192, 64)]


def test_batch_invariant_epilogues_do_not_split_k(driver, catalog) -> None:
    catalog("sm90", "sm90_ping_pong", "sm90_parts", "sm90_skinny")

    def call() -> None:
        x, weight = (tensors.empty(n, 16384, dtype=torch.bfloat16) for n in (16, 128))
        with torch_cubin.batch_invariant():
            torch.ops.cubin._linear_activation(x, weight, None, "silu")

    names = [launch["kernel"] for launch in launches_of(driver, call)]
    assert [name.split("_")[0] for name in names] == ["mma", "finish"]


@pytest.mark.parametrize(("n", "fused"), [(2048, True), (2050, False), (2049, False)], ids=str)
def test_products_are_added_to_float32_in_place(driver, catalog, n: int, fused: bool) -> None:
    """As a gradient is: by one kernel, where C has rows of 16-byte vectors, else by two."""
    catalog()

    def call() -> None:
        grad, x = (
            transposed(4096, 8192, torch.bfloat16),
            tensors.empty(8192, n, dtype=torch.bfloat16),
        )
        torch.ops.cubin._addmm_into(tensors.empty(4096, n, dtype=torch.float32), grad, x)

    launches = launches_of(driver, call)
    if not fused:
        assert launches[-1]["kernel"] == "finish_matmul_f32"
        params = launch_params.read(launches[-1], Finish)
        assert params.out == params.addend
        assert (params.alpha, params.beta) == (1, 1)
        return
    names = [launch["kernel"].rpartition("_")[0] for launch in launches]
    assert [name.rstrip("_0123456789") for name in names] == ["sm90_matmul_bf16_tn"]
    params = launch_params.read(launches[-1], Params)
    assert params.flags & (SUMS | ACCUMULATE) == SUMS | ACCUMULATE
    assert not params.flags & (GENERAL | FINISH | ACTIVATE | OUT_FLOAT)


def test_a_product_into_float32_reads_what_it_adds_as_float32(driver, catalog) -> None:
    catalog()

    def call() -> None:
        a = tensors.empty(4096, 4096, dtype=torch.float16)
        b = transposed(4096, 2048, torch.float16)
        for addend in (
            tensors.empty(4096, 2048, dtype=torch.float32),
            tensors.empty(2048, dtype=torch.float32),
            tensors.strided((4096, 2048), (2052, 1), torch.float32),
        ):
            torch.ops.cubin._addmm_dtype(addend, a, b, torch.float32, beta=0.5, alpha=-3)

    launches = launches_of(driver, call)
    assert [x["kernel"].split("_")[0] for x in launches] == ["sm90", "finish"] * 3
    for launch, stride in zip(launches[1::2], (2048, 0, 2052), strict=True):
        params = launch_params.read(launch, Finish)
        assert params.addend not in (0, params.out)
        assert (params.bias, params.alpha, params.beta) == (0, -3, 0.5)
        assert (params.addend_stride_m, params.addend_stride_n) == (stride, 1)


def test_other_kernels_leave_a_product_into_float32_to_a_second_one(driver, catalog) -> None:
    catalog("sm90", "sm90_ping_pong", "sm90_skinny")

    def call() -> None:
        for m, n, k in ((512, 512, 512), (4, 4096, 4096), (2048, 3, 64), (16, 128, 16384)):
            a, b = tensors.empty(m, k, dtype=torch.float16), transposed(k, n, torch.float16)
            torch.ops.cubin._addmm_into(tensors.empty(m, n, dtype=torch.float32), a, b, beta=2)

    finishes = [x for x in launches_of(driver, call) if x["kernel"].startswith("finish_matmul_")]
    assert [x["kernel"] for x in finishes] == ["finish_matmul_f32"] * 4
    for launch in finishes:
        params = launch_params.read(launch, Finish)
        assert params.out == params.addend
        assert (params.alpha, params.beta) == (1, 2)
