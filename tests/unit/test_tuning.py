"""Tuning as far as it needs no GPU: operands as a product names them, and a sweep's files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import types
from pathlib import Path

import declared
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cubin
from torch_cubin import __main__ as command_line
from torch_cubin._tuning import measure, op_calls, store, sweep
from torch_cubin._tuning.products import Operands, Product

CONFIGS = ("sm90 128x128", "sm90 64x128 share_b")


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("sizes", [(64, 96, 128), (63, 95, 127), (8, 1, 3), (64, 95, 128)])
@pytest.mark.parametrize(("dtype", "batch"), [("bfloat16", 1), ("tf32", 3), ("float64", 1)])
def test_operands_have_the_layout_of_the_product(monkeypatch, layout, sizes, dtype, batch) -> None:
    class Properties:
        L2_cache_size = 1 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    product = Product.of_layout(*sizes, layout, dtype, batch)
    m, n, k = sizes
    pairs = Operands(torch.device("cpu")).sets(product)
    assert len(pairs) > 1
    ends = set()
    for a, b in pairs:
        lead = () if batch == 1 else (batch,)
        assert (a.shape, b.shape) == ((*lead, m, k), (*lead, k, n))
        for x, access, along_k in (
            (a, product.a, layout[0] == "n"),
            (b.mT, product.b, layout[1] == "t"),
        ):
            assert x.stride(-1 if along_k else -2) == 1
            row, step = (x.shape[-1], x.stride(-2)) if along_k else (x.shape[-2], x.stride(-1))
            assert step >= row
            aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
            assert aligned == (not access.endswith("elements"))
            offset = x.storage_offset() * x.element_size()  # of memory that begins at a line
            lines = offset % 128 == 0 and step * x.element_size() % 128 == 0
            assert lines == access.endswith("lines")
            assert access.startswith("k" if along_k else "own")
            ends.add(x.data_ptr())
    assert len(ends) == 2 * len(pairs)  # no two share memory


def test_products_have_names() -> None:
    assert str(Product.of_layout(1, 2, 8, "nt", "bfloat16")) == "1x2x8 nt bfloat16"
    assert str(Product.of_layout(64, 63, 9, "nn", "float16", 4)) == "4x64x63x9 NN float16"
    line = Product.of_layout(64, 64, 64, "tn", "tf32").line()
    assert (line["math"], line["a"], line["b"]) == ("tf32", "own_lines", "own_lines")
    assert "dtype" not in line


def times(gain: float, product: Product | None = None) -> measure.Times:
    rounds = {
        CONFIGS[0]: [10.0, 11.0, 10.0],
        CONFIGS[1]: [10 / gain, 11 / gain, 10 / gain],
        measure.TORCH: [12.0, 12.0, 12.0],
    }
    product = product or Product.of_layout(64, 64, 64, "nt", "bfloat16")
    return measure.Times(product, rounds, dict.fromkeys(CONFIGS, 1.0), CONFIGS[0])


def narrow_sums() -> list[object]:
    settings = torch.backends.cuda.matmul
    names = [n for name in measure._NARROW_SUMS for n in (name, f"{name}_split_k")]
    return [getattr(settings, name, None) for name in names]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("bf16", [True, False, (False, False)])
def test_a_reference_is_added_in_float32(monkeypatch, bf16, fails) -> None:
    settings = torch.backends.cuda.matmul
    at_first = settings.allow_bf16_reduced_precision_reduction
    seen = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append([getattr(settings, name) for name in measure._NARROW_SUMS])
        if fails:
            raise MemoryError
        return a @ b

    monkeypatch.setattr(torch, "matmul", matmul)
    try:
        settings.allow_bf16_reduced_precision_reduction = bf16
        before = narrow_sums()
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            measure.reference_of(torch.ones(2, 3), torch.ones(3, 2))
        assert seen == [[False] * 3]
        assert narrow_sums() == before
    finally:
        settings.allow_bf16_reduced_precision_reduction = at_first


def test_another_config_must_be_clearly_quicker() -> None:
    assert times(1.005).best() == CONFIGS[0]
    assert times(1.05).best() == CONFIGS[1]
    assert times(0.9).best() == CONFIGS[0]
    line = sweep.line_of(times(1.25))
    assert line["best"] == CONFIGS[1]
    assert line["gain"] == pytest.approx(0.25)
    assert line["torch"] == pytest.approx(1.5)


def test_a_sweep_resumes_after_the_last_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert sweep.read_lines(path) == []
    first, second = sweep.line_of(times(1.25)), sweep.line_of(times(0.9))
    path.write_text(json.dumps(first) + "\n" + json.dumps(second)[:40])
    assert sweep.read_lines(path) == [first]  # the process ended in the middle of a line
    path.write_text(json.dumps(second)[:40] + "\n" + json.dumps(first) + "\n")
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*is damaged"):
        sweep.read_lines(path)


@pytest.mark.parametrize("cut", [0, 1, 40, 10_000])
def test_an_interrupted_sweep_measures_each_product_once(
    tmp_path: Path, monkeypatch, capsys, cut: int
) -> None:
    """A process that ends, `cut` characters before a line's end, or after its measurement: the next
    one goes on, and the one after that reads whole lines."""
    products = [Product.of_layout(64, 64, 64 * n, "nt", "bfloat16") for n in range(1, 6)]
    measured: list[Product] = []

    def measure_one(product: Product, *_, **__) -> measure.Times:
        if len(measured) == 2 and product not in measured:
            measured.append(product)
            raise KeyboardInterrupt
        measured.append(product)
        return times(1.25, product)

    monkeypatch.setattr(sweep, "Operands", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "measure", measure_one)
    path = tmp_path / "lines.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(products, path, measure.Effort())
    text = path.read_text()
    path.write_text(text[: max(0, len(text) - cut)])
    kept = {json.dumps(line["product"]) for line in sweep.read_lines(path)}
    assert len(kept) == {0: 2, 1: 2, 40: 1, 10_000: 0}[cut]
    before = len(measured)
    for _ in range(2):  # the second time nothing is left to be measured
        lines = sweep.sweep(products, path, measure.Effort())
        assert [line["product"]["k"] for line in lines] == [64, 128, 192, 256, 320]
    assert len(measured) - before == 5 - len(kept)
    assert sweep.read_lines(path) == lines
    shown = capsys.readouterr().err
    assert f"{5 - len(kept)}/{5 - len(kept)}, 0 s left, 64x64x320" in shown


def test_times_do_not_depend_on_the_clocks_of_a_round() -> None:
    """The second config was disturbed in one round, and is as fast as the first."""
    clocks = (1.0, 1.3, 1.2, 0.8, 1.1)
    rounds = {name: [10 * clock for clock in clocks] for name in CONFIGS}
    rounds[CONFIGS[1]][0] = 14
    found = measure.Times(Product.of_layout(64, 64, 64, "nt", "bfloat16"), rounds, {}, CONFIGS[0])
    assert found.median(CONFIGS[1]) / found.median(CONFIGS[0]) == pytest.approx(1)


def test_a_table_lists_only_faster_configs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "measured_on", lambda: {"gpu": "a GPU"})
    other = Product.of_layout(64, 64, 128, "nt", "bfloat16")
    lines = [sweep.line_of(times(1.25)), sweep.line_of(times(1.0, other))]
    table = sweep.table_of(lines)
    (entry,) = table["products"]
    kept = {**sweep.line_of(times(1.0, other)), "tuned": CONFIGS[0]}  # of the table that was there
    assert len(sweep.table_of([*lines, kept])["products"]) == 2
    assert entry == {**Product.of_layout(64, 64, 64, "nt", "float16").line(), "way": CONFIGS[1]}
    store.write(table, tmp_path / "new" / "table.json")
    assert json.loads((tmp_path / "new" / "table.json").read_text()) == table


def test_the_standard_sweep_names_no_product_twice() -> None:
    products = list(sweep.standard_products())
    assert len(set(products)) == len(products) > 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu(capsys) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[no_device\].*tune"):
        torch_cubin.tune([(1, 2, 3)])
    assert command_line.main(["tune", "--sweep"]) == 1
    assert "[no_device]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1x2", "1x2x0", "axbxc", ""])
def test_shapes_of_the_command_line(text) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*MxNxK"):
        sweep.shape_of(text)


def test_a_missing_or_malformed_tuned_table_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[file\]"):
        torch_cubin.load_tuned(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(torch_cubin.Error, match=r"\[file\]"):
        torch_cubin.load_tuned(tmp_path / "text.json")


def call_times(medians: dict[int, float], chosen: int = 0, **more) -> op_calls.CallTimes:
    rounds = {kernel: [us, 1.1 * us, us] for kernel, us in medians.items()}
    names = {kernel: f"{kernel}: kernel" for kernel in (*medians, *more.get("differ", {}))}
    key = {"x": ["float16", [2, 3]], "n": 5}
    fields = {"differ": {}, "elsewhere": []} | more
    return op_calls.CallTimes("ns::op", key, chosen, rounds, names, **fields)


def test_a_call_s_kernel_must_be_clearly_quicker() -> None:
    assert call_times({0: 10, 1: 9.95}).best == 0
    times = call_times({0: 10, 1: 9.0, 2: 8.0}, differ={3: "its results differ"}, elsewhere=[4])
    assert times.best == 2
    line = times.line()
    assert (line["kernel"], line["instead_of"], line["gain"]) == (2, 0, 0.25)
    text = str(times)
    for part in (
        "ns::op(x=float16[2, 3], n=5)",
        "best",
        "not used: its results differ",
        "1 kernel",
    ):
        assert part in text, text


def one_op_table(key: dict, kernel: int, **head) -> dict:
    op = {"op": "a::b", "hash": "h", "calls": [{"key": key, "kernel": kernel, "instead_of": 0}]}
    return {"version": 1, "gpu": "g", "driver": "1", "ops": [op]} | head


def test_stored_tables_of_an_op_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    store.keep(one_op_table({"n": 1}, 1), path)
    store.keep(one_op_table({"n": 2}, 2), path)
    store.keep(one_op_table({"n": 1}, 3), path)
    assert store.read(path)["ops"][0]["calls"] == [
        {"key": {"n": 2}, "kernel": 2, "instead_of": 0},
        {"key": {"n": 1}, "kernel": 3, "instead_of": 0},  # the newest stand last
    ]
    # Measurements with another driver are not used, nor is a damaged file.
    store.keep(one_op_table({"n": 4}, 4, driver="2"), path)
    assert len(store.read(path)["ops"][0]["calls"]) == 1
    for damaged in ("{", "[]", '{"version": 1, "ops": 5}'):
        path.write_text(damaged)
        store.keep(one_op_table({"n": 5}, 5), path)
        assert [call["key"] for call in store.read(path)["ops"][0]["calls"]] == [{"n": 5}]
    (tmp_path / "file").write_text("")
    assert "file" in store.keep(one_op_table({"n": 5}, 5), tmp_path / "file" / "a.json")


def test_a_stored_file_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "_MOST_CALLS", 8)
    for i in range(12):
        assert store.keep(one_op_table({"n": i}, i), tmp_path / "a.json") == ""
    kept = [call["kernel"] for call in store.read(tmp_path / "a.json")["ops"][0]["calls"]]
    assert kept == list(range(4, 12))
    monkeypatch.setattr(store, "_MOST_BYTES", 400)
    store.keep(one_op_table({"n": 99}, 99), tmp_path / "a.json")
    assert (tmp_path / "a.json").stat().st_size <= 400
    assert store.read(tmp_path / "a.json")["ops"][0]["calls"][-1]["kernel"] == 99


def test_processes_that_keep_at_once_lose_nothing(tmp_path: Path) -> None:
    path, count = tmp_path / "a.json", 8
    with concurrent.futures.ThreadPoolExecutor(count) as pool:  # each opens the lock for itself
        list(pool.map(lambda i: store.keep(one_op_table({"n": i}, i), path), range(5 * count)))
    assert {call["key"]["n"] for call in store.read(path)["ops"][0]["calls"]} == set(range(40))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.lock"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(40)[1:21:2].view(2, 5),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(()),
        torch.randn(8, 8)[1:, 1:],
        torch.arange(12, dtype=torch.int16).view(3, 4)[:, 1:],
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.stride()}",
)
def test_copies_have_the_strides_of_their_originals(tensor) -> None:
    copy = op_calls.copy_of(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.dtype) == (tensor.stride(), tensor.dtype)
    assert not tensor.numel() or copy.data_ptr() % 512 == tensor.data_ptr() % 512
    assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def test_load_tuned_takes_a_path() -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*load_tuned takes a path"):
        torch_cubin.load_tuned(5)


def test_results_that_differ_are_reported() -> None:
    x = torch.randn(100)
    nan = x.clone()
    nan[3] = float("nan")
    integers = torch.arange(5)
    assert op_calls._difference([x, integers], [x * (1 + 1e-5), integers]) == ""
    assert op_calls._difference([nan], [nan.clone()]) == ""
    assert "off by" in op_calls._difference([x], [x + 0.1])
    assert "finite" in op_calls._difference([nan], [x])
    assert "differ" in op_calls._difference([integers], [integers + 1])
    assert "shape" in op_calls._difference([x], [x[1:]])
    assert op_calls._difference([torch.empty(0)], [torch.empty(0)]) == ""
    assert "off by" in op_calls._difference([x], [torch.zeros(100)])


def test_results_that_are_not_finite_are_distinguished() -> None:
    kinds = [float("nan"), float("inf"), -float("inf")]
    for i, one in enumerate(kinds):
        for j, other in enumerate(kinds):
            far = op_calls._difference([torch.tensor([1, one, 2])], [torch.tensor([1, other, 2])])
            assert (far == "") == (i == j), (one, other)


@pytest.mark.parametrize("shape", [(1000,), (10, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_outlier_hides_no_wrong_elements(shape, dtype) -> None:
    right = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    right.view(-1)[0] = 1e4
    wrong = torch.zeros_like(right)
    wrong.view(-1)[0] = 1e4
    assert "neighbours" in op_calls._difference([wrong], [right])
    near = right * (1 + torch.finfo(dtype).eps)
    assert op_calls._difference([near], [right]) == ""


SHAPES = [(), (1,), (50,), (3, 1), (5, 7), (2, 40), (1, 3, 1, 9), (4, 1, 6), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_compared_in_pieces(shape, monkeypatch) -> None:
    """No temporary is larger than a piece, and nothing else is said than of the whole."""
    random_ = torch.Generator().manual_seed(11)
    right = torch.randn(shape, generator=random_)
    far = right.clone()
    if right.numel():
        far.view(-1)[-1] += 2e-2  # of fifty elements more than a hundredth
    laid_out = right.t().contiguous().t() if right.dim() == 2 else right
    pairs = [(right.clone(), right), (laid_out, right), (far, right), (right * 2, right)]
    whole = [op_calls._difference([a], [b]) for a, b in pairs]
    assert (whole[:2], all(whole[3:])) == (["", ""], right.numel() > 0)

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(one, torch.Tensor) and one.dtype is not right.dtype:
                    self.found = max(self.found, one.numel())
            return out

    for piece in (1, 4, 9, 1000):
        monkeypatch.setattr(op_calls, "_PIECE", piece)
        with Largest() as largest:
            assert [op_calls._difference([a], [b]) for a, b in pairs] == whole
        assert largest.found <= piece
        assert op_calls._difference([right.int()], [right.int()]) == ""


def test_complex_results_are_compared_as_far_as_rounding_goes() -> None:
    x = torch.randn(100, dtype=torch.complex64)
    assert op_calls._difference([x * (1 + 1e-6)], [x]) == ""
    assert "off by" in op_calls._difference([x.conj()], [x])


def test_a_kernel_that_writes_half_of_its_output_is_reported(monkeypatch) -> None:
    """Each result lies where the one before lay, as the caching allocator has it."""
    memory, state = torch.zeros(8), {"kernel": 0, "calls": 0}

    def results(op, args, kwargs):
        state["calls"] += 1
        out = torch.zeros(8) if state["calls"] == 1 else memory  # the first is held: the reference
        out[: 4 if state["kernel"] == 2 else 8] = 1
        return [out]

    call = {"key": {}, "chosen": 0, "fits": [0, 1, 2], "same": [0, 1, 2], "device": 0}
    monkeypatch.setattr(op_calls, "_results", results)
    monkeypatch.setattr(op_calls, "_names", lambda op, kernels: {k: str(k) for k in kernels})
    monkeypatch.setattr(op_calls.library, "watch_op", lambda name: None)
    monkeypatch.setattr(op_calls.library, "watched_calls", lambda: [call])
    monkeypatch.setattr(op_calls.library, "force_kernel", lambda k: state.update(kernel=k))
    op = types.SimpleNamespace(name="a::b", contract={"kernels": [{}] * 3})
    times = op_calls.measure_call(op, (), {}, timer=lambda *a: {k: [1.0] for k in a[3]})
    assert sorted(times.rounds) == [0, 1]
    assert "not finite" in times.differ[2]
    # A call that did not reach the kernels, as one of an op with cpu=.
    monkeypatch.setattr(op_calls.library, "watched_calls", list)
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*did not run on a GPU"):
        op_calls.measure_call(op, (), {})


def test_integers_that_an_op_changes_are_restored() -> None:
    signature = declared.vec_add()._signature
    arguments = [
        dataclasses.replace(signature.arguments[0], name=name, kind=kind, mutable=mutable)
        for name, kind, mutable in [
            ("index", "tensor", True), ("x", "tensor", True), ("n", "tensor", False),
            ("none", "tensor?", True),
        ]
    ]  # fmt: skip
    op = types.SimpleNamespace(
        _signature=dataclasses.replace(signature, arguments=tuple(arguments))
    )
    given = (torch.arange(6)[::2], torch.ones(3), torch.arange(3), None), {}
    copy = op_calls._copied(*given)
    pairs = op_calls._restored(op, copy, given)
    assert [(a is copy[0][0], b is given[0][0]) for a, b in pairs] == [(True, True)]


def test_many_kernels_are_timed_a_few_at_a_time() -> None:
    """Each heat runs at a pace of its own, which the first kernel's times take out."""
    sizes = []

    def heat(kernels):
        sizes.append(len(kernels))
        return {kernel: [len(sizes) * (10.0 + kernel)] for kernel in kernels}

    rounds = op_calls._in_heats(list(range(30)), heat)
    assert max(sizes) <= 12
    assert rounds == {kernel: [pytest.approx(10.0 + kernel)] for kernel in range(30)}
    assert op_calls._in_heats([4], heat).keys() == {4}


def test_a_table_is_kept_for_the_device_of_the_tensors(tmp_path: Path, monkeypatch) -> None:
    module = importlib.import_module("torch_cubin._tuning.tune")
    asked, path = [], tmp_path / "a.json"

    def tuned_file(name, device):
        asked.append(device)
        return {"path": str(path), "gpu": "g", "driver": "1", "hash": "h"}

    monkeypatch.setattr(module.library, "tuned_file", tuned_file)
    monkeypatch.setattr(module.library, "add_tuned_table", lambda table: None)
    op = types.SimpleNamespace(name="a::b")
    times = [call_times({0: 10, 1: 9}, device=1)]
    _, kept = module._use(op, times)
    assert (set(asked), kept) == ({1}, f"kept in {path}")
    assert kept in str(module.Tuning(calls=times, table={}, kept=kept))
    path = tmp_path / "a.json" / "b.json"
    assert module._use(op, times)[1].startswith("not kept: ")


@pytest.mark.parametrize("work", [5, None, (5,), torch.ops.aten.add, torch.ops.aten.add.Tensor])
def test_tune_refuses_other_arguments(work) -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\]"):
        torch_cubin.tune(work)


def test_inputs_of_an_op() -> None:
    op = declared.vec_add()
    x = torch.ones(3)
    assert op_calls.op_of(op) is op
    space, name = op.name.split("::")
    packet = getattr(getattr(torch.ops, space), name)
    assert op_calls.op_of(packet) is op
    assert op_calls.op_of(packet.default) is op
    assert op_calls.op_of(torch.ops.aten.add) is None
    assert op_calls.op_of(lambda: x) is None
    assert op_calls.calls_of(op, (x, x)) == [((x, x), {})]
    assert op_calls.calls_of(op, [{"x": x, "y": x}, x]) == [((), {"x": x, "y": x}), ((x,), {})]
    for wrong in ([], 5, [5]):
        with pytest.raises(torch_cubin.Error, match=r"\[input\].*inputs"):
            op_calls.calls_of(op, wrong)
    for arguments in ((op,), ([(1, 2, 3)], (x,)), (lambda: x, (x,))):
        with pytest.raises(torch_cubin.Error, match=r"\[input\].*takes inputs of a declared op"):
            torch_cubin.tune(*arguments)
