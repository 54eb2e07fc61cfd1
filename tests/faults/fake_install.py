"""install() on the stand-in driver: what aten operators launch and decline, and where it goes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from pathlib import Path

import pytest
import torch
from fake_driver import tensors
from faults import catalogs, launch_params
from faults.fake_sm90_launch import Params
from faults.forked import forked

import torch_cubin
from torch_cubin._drop_in import aten_kernels
from torch_cubin._native import library


@pytest.fixture
def products(driver, tmp_path, monkeypatch):
    """Runs a function inside install(): its launches, what was served and what was declined."""
    catalogs.install(driver, tmp_path, monkeypatch, catalogs.kernels_of("matmul"))

    def run(call, policy: str = "all") -> list:
        def child() -> list:
            with torch_cubin.install(policy=policy):
                result = call()
                report = torch_cubin.report()
            stand_in = ctypes.CDLL("libtorch_cuda.so")
            return [
                driver.launches(),
                [[row.function, row.device, row.calls] for row in report.served],
                [[row.function, row.reason] for row in report.declined],
                stand_in.fake_products(),
                result,
            ]

        return forked(child)

    return run


def half(*size: int) -> torch.Tensor:
    return tensors.empty(*size, dtype=torch.float16)


def test_a_linear_layer_launches_one_kernel_with_its_bias(products) -> None:
    def call() -> list[int]:
        x, bias = half(4096, 4096), half(4096)
        weight = tensors.strided(
            (4096, 4096), (1, 4096), torch.float16
        )  # transposed, as F.linear's
        result = torch.addmm(bias, x, weight)
        return [bias.data_ptr(), *result.shape]

    (launch,), served, declined, pytorchs, (bias, *shape) = products(call)
    assert shape == [4096, 4096]
    assert launch["kernel"].startswith("sm90_matmul_f16_nt_")
    params = launch_params.read(launch, Params)
    assert params.bias == bias
    assert served == [["aten::addmm", "cuda", 1]]
    assert declined == []
    assert pytorchs == 0


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_out_is_written_by_the_kernel_itself(products, op: str) -> None:
    """Which Inductor's graphs call: a copy would cost what its planning saves."""

    def call() -> list[int]:
        a, b, out = half(4096, 4096), half(4096, 4096), half(4096, 4096)
        result = torch.mm(a, b, out=out) if op == "mm" else torch.addmm(half(4096), a, b, out=out)
        assert result is out
        return [out.data_ptr()]

    (launch,), served, declined, _, (out,) = products(call)
    params = launch_params.read(launch, Params)
    assert out in (params.out, launch_params.read_map(params.out_map)["address"])
    assert served == [[f"aten::{op}.out", "cuda", 1]]
    assert declined == []


def test_every_product_launches_something(products) -> None:
    def call() -> None:
        a, b, v = half(256, 256), half(256, 256), half(256)
        torch.mm(a, b)
        torch.mv(a, v)
        torch.addmv(v, a, v)
        torch.bmm(half(4, 256, 256), half(4, 256, 256))
        torch.baddbmm(v, half(4, 256, 256), half(4, 256, 256), beta=0.5)
        a.addmm_(b, b, beta=0)

    launches, served, declined, pytorchs, _ = products(call)
    assert len(launches) >= 6
    assert sorted(op for op, *_ in served) == sorted(
        f"aten::{op}" for op in ("mm", "mv", "addmv", "bmm", "baddbmm", "addmm_")
    )
    assert declined == []
    assert pytorchs == 0


def test_unserved_calls_run_pytorch_s_kernel_below_the_dispatcher(products) -> None:
    def call() -> None:
        whole, batch = (tensors.empty(*n, 64, 64, dtype=torch.int32) for n in ((), (2,)))
        torch.mm(whole, whole)
        torch.bmm(batch, batch)
        torch.mm(half(64, 64), half(64, 64), out=tensors.strided((64, 64), (1, 64), torch.float16))

    launches, served, declined, pytorchs, _ = products(call)
    assert launches == []
    assert served == []
    assert sorted(declined) == [
        ["aten::bmm", "dtype int32"],
        ["aten::mm", "dtype int32"],
        ["aten::mm.out", "out= of another shape, or not contiguous"],
    ]
    assert pytorchs == 3


def know(*dtypes: str) -> None:
    row = {"gpu": "Fake GPU", "kinds": ["product"], "dtypes": list(dtypes)}
    library.set_known_speed(json.dumps({"rows": [row] if dtypes else []}))


def test_drop_in_serves_its_thread_below_autograd(products) -> None:
    def call() -> int:
        a = half(256, 256)
        with torch_cubin.drop_in(policy="all"):
            torch.mm(a, a)
            modes = len(torch.overrides._get_current_function_mode_stack())
            thread = threading.Thread(target=torch.mm, args=(a, a))
            thread.start()
            thread.join()
        torch.mm(a, a)
        return modes

    launches, served, declined, pytorchs, modes = products(call, "fastest")
    assert modes == 0
    assert served == [["aten::mm", "cuda", 1]]
    assert declined == [["aten::mm", "this GPU has not been measured"]]  # install()'s policy, twice
    assert len(launches) >= 1
    assert pytorchs == 2


@contextlib.contextmanager
def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_the_policy_fastest_serves_what_was_measured(products) -> None:
    def call() -> None:
        know("float16", "tf32")
        single, batch = tensors.empty(256, 256), half(2, 256, 256)
        torch.mm(half(256, 256), half(256, 256))
        torch.mm(single, single)
        with tf32():
            torch.mm(single, single)
        torch.bmm(batch, batch)

    _, served, declined, pytorchs, _ = products(call, "fastest")
    assert served == [["aten::mm", "cuda", 1], ["aten::mm", "cuda", 1]]  # a row for each dtype
    assert sorted(declined) == [
        ["aten::bmm", "float16, which is not known to be quicker"],
        ["aten::mm", "float32 without TF32, which is not known to be quicker"],
    ]
    assert pytorchs == 2


def test_batch_invariance_is_worth_more_than_speed(products) -> None:
    """PyTorch's kernel, which the policy would choose, does not have it."""

    def call() -> None:
        know()
        single = tensors.empty(256, 256)
        with torch_cubin.batch_invariant():
            torch.mm(single, single)
        torch.mm(single, single)

    _, served, declined, pytorchs, _ = products(call, "fastest")
    assert served == [["aten::mm", "cuda", 1]]
    assert declined == [["aten::mm", "this GPU has not been measured"]]
    assert pytorchs == 1


@pytest.mark.parametrize("policy", ["fastest", "all"])
def test_a_gpu_that_was_not_measured(products, policy) -> None:
    def call() -> None:
        know()
        torch.mm(half(256, 256), half(256, 256))

    _, served, declined, pytorchs, _ = products(call, policy)
    if policy == "all":
        assert (served, declined) == ([["aten::mm", "cuda", 1]], [])
    else:
        assert declined == [["aten::mm", "this GPU has not been measured"]]
        assert (served, pytorchs) == ([], 1)


def test_speed_is_known_before_flash_attention_alone_is_served(monkeypatch) -> None:
    """By its implementation "cubin", without install(): the first call reads its GPU's speed for
    the whole process."""

    def child() -> list[str]:
        order: list[str] = []
        monkeypatch.setattr(library, "set_known_speed", lambda table: order.append("speed"))
        monkeypatch.setattr(library, "stand_over_flash", lambda *_: order.append("flash"))
        aten_kernels._send_known_speed.cache_clear()
        aten_kernels.register_flash()
        return order

    assert forked(child) == ["speed", "flash"]


def test_a_gpu_that_was_not_measured_is_calibrated_once(products) -> None:
    def call() -> list[int]:
        know()
        asked = []

        def calibrate(index: int) -> int:
            asked.append(index)
            if len(asked) == 1:  # as during a capture
                return 0
            torch.mm(half(256, 256), half(256, 256))  # another call meanwhile goes to PyTorch
            row = {"kinds": ["product"], "dtypes": ["float16"]}
            library.set_calibrated_speed(index, json.dumps({"rows": [row]}))
            return 1

        library.set_calibrate(calibrate)
        for _ in range(4):
            torch.mm(half(256, 256), half(256, 256))
        torch.bmm(half(2, 64, 64), half(2, 64, 64))
        torch.use_deterministic_algorithms(True)
        torch.mm(half(256, 256), half(256, 256))
        torch.use_deterministic_algorithms(False)
        return asked

    _, served, declined, pytorchs, asked = products(call, "fastest")
    assert asked == [0, 0]
    assert served == [["aten::mm", "cuda", 3]]
    assert sorted(declined) == [
        ["aten::bmm", "float16, which is not known to be quicker"],
        ["aten::mm", "this GPU has not been measured"],
    ]
    assert pytorchs == 4


def test_calls_that_measure_are_not_counted(products) -> None:
    def call() -> list[int]:
        know()
        library.set_calibrate(lambda index: 1)
        counts = []
        for state in (1, 2):
            library.set_measuring(state)
            torch.mm(half(256, 256), half(256, 256))
            counts.append(ctypes.CDLL("libtorch_cuda.so").fake_products())
        library.set_measuring(0)
        return counts

    launches, served, declined, _, counts = products(call, "fastest")
    assert (served, declined, counts) == ([], [], [1, 1])
    assert len(launches) >= 1


def test_the_shipped_table_names_gpus_that_were_measured() -> None:
    path = Path(aten_kernels.__file__).with_name("known_speed.json")
    for row in json.loads(path.read_text())["rows"]:
        machine = json.loads((path.parents[2] / row["measured"]).read_text())["machine"]
        assert row["gpu"] in machine["GPU"]


@pytest.mark.parametrize("policy", ["fastest", "all"])
def test_a_gpu_without_kernels_is_left_to_pytorch(products, driver, policy) -> None:
    def call() -> None:
        driver.set("sm", 75)
        torch.mm(half(256, 256), half(256, 256))

    launches, served, declined, pytorchs, _ = products(call, policy)
    assert (launches, served, pytorchs) == ([], [], 1)
    assert declined == [["aten::mm", "no kernels for sm_75"]]


def test_a_catalog_that_cannot_be_read_is_an_error(products, monkeypatch, tmp_path) -> None:
    def call() -> str:
        with pytest.raises(RuntimeError, match=r"torch_cubin \[file\]") as caught:
            torch.mm(half(256, 256), half(256, 256))
        return str(caught.value)

    (tmp_path / "manifest.json").write_text("{")
    assert "manifest" in products(call)[-1]
