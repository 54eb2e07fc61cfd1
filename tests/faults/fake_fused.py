"""What the kernels of several weights and outputs are launched with, on the stand-in driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from c_layouts import MATMUL, structure
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.forked import launches_of
from faults.launch_params import read_map

import torch_cubin

PARAMS = structure(f"{MATMUL}/sm90_fused_params.h", "Sm90FusedParams")
AUX, PAIR, SERPENTINE = 8, 16, 32
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
ops = torch.ops.cubin


@pytest.fixture
def catalog(driver, tmp_path, monkeypatch) -> dict[str, dict]:
    """A catalog of all kernels of products; the fused ones by name."""
    fused = catalogs.kernels_of("fused")
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("matmul") + fused)
    return {kernel["symbol"]: kernel for kernel in fused}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return tensors.empty(*shape, dtype=dtype)


def check_grid(launch: dict, kernel: dict, params, rows: int) -> None:
    """Whole clusters, no more than tiles; boxes of a stage hold a tile."""
    pair = 2 if params.flags & PAIR else 1
    assert params.tiles_m == -(-rows // (kernel["tile"][0] * pair))
    clusters = params.tiles_m * params.tiles_n
    assert launch["grid"][0] == pair * min(clusters, 132 // pair)
    boxes = [read_map(map_)["box"] for map_ in (params.a, params.b[0])]
    assert boxes == [[64, kernel["tile"][0]], [64, kernel["tile"][1] // 2]]


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_layer_is_one_launch(driver, catalog, dtype, activation, aux) -> None:
    m, k, n = 3000, 1000, 4104

    def call() -> None:
        args = (empty(m, k, dtype=dtype), *(empty(n, k, dtype=dtype) for _ in range(2)))
        (ops._linear_glu_aux if aux else ops._linear_glu)(*args, activation)

    (launch,) = launches_of(driver, call)
    kernel = catalog[launch["kernel"]]
    assert kernel["gated"]
    assert kernel["dtype"] == str(dtype).removeprefix("torch.")
    params = launch_params.read(launch, PARAMS)
    check_grid(launch, kernel, params, m)
    assert params.tiles_n == -(-n // (kernel["tile"][1] // 2))
    assert params.flags & 7 == ACTIVATIONS[activation]
    assert bool(params.flags & AUX) == aux
    assert params.flags & SERPENTINE
    assert (params.m, params.n[0], params.k_blocks) == (m, n, -(-k // 64))
    a, gate, up = map(read_map, (params.a, *params.b[:2]))
    assert (a["dims"], gate["dims"], up["dims"]) == ([k, m], [k, n], [k, n])
    assert len({a["address"], gate["address"], up["address"]}) == 3
    outs = [read_map(map_) for map_ in params.out[: 3 if aux else 1]]
    assert len({out["address"] for out in outs}) == len(outs)
    for out in outs:
        assert (out["dims"], out["strides"], out["box"]) == ([n, m], [2 * n], [64, 16])


def test_weights_of_one_input_share_a_launch(driver, catalog) -> None:
    m, k, sizes = 2048, 512, (2048, 520, 8)

    def call() -> None:
        x, weights = empty(m, k), [empty(n, k) for n in sizes]
        ops._linears(x, weights, [empty(sizes[0]), None, empty(sizes[2])])

    (launch,) = launches_of(driver, call)
    kernel = catalog[launch["kernel"]]
    params = launch_params.read(launch, PARAMS)
    check_grid(launch, kernel, params, m)
    tiles = [-(-n // kernel["tile"][1]) for n in sizes]
    assert list(params.first) == [0, tiles[0], tiles[0] + tiles[1], sum(tiles)]
    assert params.tiles_n == sum(tiles)
    assert list(params.n)[:3] == list(sizes)
    assert [bool(bias) for bias in params.bias] == [True, False, True, False]
    maps = [read_map(map_) for map_ in (*params.b[:3], *params.out[:3])]
    assert [map_["dims"] for map_ in maps] == [[k, n] for n in sizes] + [[n, m] for n in sizes]


def test_more_weights_take_more_launches(driver, catalog) -> None:
    def call() -> None:
        ops._linears(empty(4096, 512), [empty(1024, 512) for _ in range(6)], [])

    names = [launch["kernel"] for launch in launches_of(driver, call)]
    assert len(names) == 2
    assert all("_layers_" in name for name in names)


def test_an_activation_and_its_input(driver, catalog) -> None:
    def call() -> None:
        ops._linear_activation_aux(empty(4, 1024, 768), empty(3072, 768), empty(3072), "gelu")

    (launch,) = launches_of(driver, call)
    params = launch_params.read(launch, PARAMS)
    check_grid(launch, catalog[launch["kernel"]], params, 4096)
    assert params.flags & AUX
    assert params.flags & 7 == ACTIVATIONS["gelu"]
    out, aux = map(read_map, params.out[:2])
    assert out["dims"] == aux["dims"] == [3072, 4096]
    assert out["address"] != aux["address"]
    assert params.bias[0] != 0


@pytest.mark.parametrize(("m", "n"), [(4096, 3072), (128, 3072), (16, 3072), (128, 1001)])
def test_batch_invariant_activations_are_of_unrounded_sums(driver, catalog, m: int, n: int) -> None:
    """As those without a derivative are: by the product's kernel, by one that follows it, or, where
    that would access single elements, by a product for each result."""
    arguments = empty(m, 768), empty(n, 768), empty(n)

    def names_of(*calls: Callable[[], object]) -> list[str]:
        def run() -> None:
            with torch_cubin.batch_invariant():
                for call in calls:
                    call()

        return [launch["kernel"] for launch in launches_of(driver, run)]

    names = names_of(lambda: ops._linear_activation_aux(*arguments, "gelu"))
    if m == 4096:
        (name,) = names
        assert name.startswith("sm90_fused_matmul_bf16_layers")
    elif n == 1001:
        assert names == names_of(
            lambda: ops._linear_activation(*arguments, "gelu"), lambda: ops._linear(*arguments)
        )
    else:
        assert "finish_matmul_bf16" in names[-1]
        assert sum("finish" not in name for name in names) == 1


@pytest.mark.parametrize(
    "weights",
    [
        lambda: [empty(1001, 512), empty(1001, 512)],  # rows of outputs are not whole vectors
        lambda: [tensors.strided((1024, 512), (1, 1024), torch.bfloat16)] * 2,
        lambda: [tensors.strided((1024, 512), (513, 1), torch.bfloat16)] * 2,
    ],
)
def test_calls_without_a_fused_kernel_are_composed(driver, catalog, weights) -> None:
    def call() -> None:
        ops._linears(empty(4096, 512), weights(), [])

    names = [launch["kernel"] for launch in launches_of(driver, call)]
    assert len(names) >= 2
    assert not any(name.startswith("sm90_fused") for name in names)


def test_few_tiles_are_composed(driver, catalog) -> None:
    def call() -> None:
        ops._linears(empty(128, 4096), [empty(512, 4096), empty(512, 4096)], [])

    names = [launch["kernel"] for launch in launches_of(driver, call)]
    assert not any(name.startswith("sm90_fused") for name in names)


def test_a_bias_of_one_number_is_composed(driver, catalog) -> None:
    """The other weights still share a launch."""

    def call() -> None:
        weights = [empty(2048, 512) for _ in range(3)]
        ops._linears(empty(4096, 512), weights, [empty(1), empty(2048), None])

    names = [launch["kernel"] for launch in launches_of(driver, call)]
    assert sum(name.startswith("sm90_fused") for name in names) == 1
    assert len(names) == 2
