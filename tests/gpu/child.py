"""The scenarios that run in a process of their own: `python tests/gpu/child.py NAME ARGUMENT...`.

Each is a function that returns a JSON object, printed as the last line of output; what it should
say is asserted by the test that carries the `child` marker. Nothing is imported at the top but
the standard library and torch, because several scenarios test the import and the first use.

The file is long because it is a list: no scenario knows of another, and each is begun by its name.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F


def _inputs(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"):
    """Small integers, so that the right result is exact."""
    a = torch.randint(-3, 4, (m, k), device=device).to(dtype)
    b = torch.randint(-3, 4, (k, n), device=device).to(dtype)
    return a, b


def _expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def quiet_import() -> dict:
    """Import neither makes a driver call nor opens libcuda (torch itself may have)."""

    def libraries() -> set[str]:
        with open("/proc/self/maps") as maps:
            return {line.split()[-1] for line in maps if "libcuda.so" in line}

    before = libraries()
    import torch_cubin

    torch.ops.cubin.matmul(torch.ones(2, 2), torch.ones(2, 2))  # the CPU path is quiet, too
    return {
        "initialized": torch.cuda.is_initialized(),
        "libcuda": sorted(libraries() - before),
        "file": torch_cubin.__file__,
    }


def first_use_threads() -> dict:
    """16 threads, none of which has touched CUDA, make the first call at the same moment."""
    import torch_cubin  # noqa: F401

    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    inputs = [_inputs(48 + i, 40, 72, dtypes[i % 4]) for i in range(16)]
    expected = [_expected(a, b) for a, b in inputs]
    torch.cuda.synchronize()
    barrier = threading.Barrier(16)
    results: list = [None] * 16
    errors: list[str] = []

    def work(index: int) -> None:
        try:
            barrier.wait()
            for _ in range(20):
                results[index] = torch.ops.cubin.matmul(*inputs[index])
        except Exception as error:  # reported to the test, which fails on any
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    right = [r is not None and torch.equal(r, e) for r, e in zip(results, expected, strict=True)]
    return {"errors": errors, "right": right}


def destroyed_streams() -> dict:
    """Streams of the driver's, each destroyed while products run on it, as CUDA allows: calls, and
    a graph that was captured on a stream of PyTorch's, with programmatic dependent launch."""
    import ctypes

    import torch_cubin  # noqa: F401

    cuda = ctypes.CDLL("libcuda.so.1")
    a, b = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    expected = torch.ops.cubin.matmul(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [torch.ops.cubin.matmul(a, b) for _ in range(20)]

    def each_on_a_destroyed_stream(work) -> list:
        results = []
        for _ in range(40):
            handle = ctypes.c_void_p()
            assert cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0
            with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
                results += work()
            assert cuda.cuStreamDestroy_v2(handle) == 0
        torch.cuda.synchronize()
        return [torch.equal(result, expected) for result in results]

    return {
        "called": each_on_a_destroyed_stream(
            lambda: [torch.ops.cubin.matmul(a, b) for _ in range(2)]
        ),
        "replayed": each_on_a_destroyed_stream(lambda: graph.replay() or captured),
    }


def capture_first_call(mode: str) -> dict:
    """The very first calls of the process happen inside a CUDA graph capture."""
    import torch_cubin  # noqa: F401

    shapes = [(64, 64, 64), (16, 128, 8192), (1, 256, 4096), (300, 200, 100)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    inputs = [_inputs(*shape, dtype) for dtype in dtypes for shape in shapes]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        outputs = [torch.ops.cubin.matmul(a, b) for a, b in inputs]
    right = []
    for _ in range(3):
        for a, b in inputs:
            a.copy_(torch.randint(-3, 4, a.shape, device="cuda"))
            b.copy_(torch.randint(-3, 4, b.shape, device="cuda"))
        for out in outputs:
            out.fill_(torch.nan)
        graph.replay()
        right += [
            torch.equal(c, _expected(a, b)) for c, (a, b) in zip(outputs, inputs, strict=True)
        ]
    # Replays go on being right after other work has used the library and the allocator.
    torch.ops.cubin.matmul(*_inputs(512, 512, 512))
    gc.collect()
    for _ in range(1000):
        graph.replay()
    right += [torch.equal(c, _expected(a, b)) for c, (a, b) in zip(outputs, inputs, strict=True)]
    return {"right": right}


def declared_slots() -> dict:
    """As many declared ops as a process can have, each called twice, in a random order."""
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    import declared

    import torch_cubin

    def op(number: int) -> torch_cubin.Op:
        return torch_cubin.define_op(
            declared.schema("slot(Tensor x) -> Tensor"),
            kernel=(declared.DECLARED, "affine"),
            tensors={"x": "float32[m]", "out": "float32[m]"},
            args=lambda x, out, m: (x, None, out, 2.0, number, False, 0, m),
            grid=declared.blocks,
            block=256,
        )

    ops = [op(number) for number in range(1024)]
    x = torch.arange(300.0, device="cuda")
    order = [*range(1024)] * 2
    random.Random(0).shuffle(order)
    results = [(number, ops[number](x)) for number in order]
    wrong = [number for number, out in results if not torch.equal(out, 2 * x + number)]
    return {"ops": len(ops), "wrong": wrong}


def _in_fork(action) -> dict:
    """Runs `action` in a forked child and reports how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            message = json.dumps({"result": action()})
        except BaseException as error:  # the child must always end here
            message = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 60
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = code if done else None
        time.sleep(0.02)
    if status is None:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return {"hung": True}
    text = os.read(read, 65536).decode()
    return {"status": status, **(json.loads(text) if text else {})}


def fork_after_use() -> dict:
    """A child forked after the first use gets an error, not a crash or a hang."""
    import torch_cubin  # noqa: F401

    a, b = _inputs(64, 64, 64)
    torch.ops.cubin.matmul(a, b)
    torch.cuda.synchronize()
    answers = {}
    for name, grad in (("grad", True), ("no_grad", False)):
        with torch.set_grad_enabled(grad):
            # The child's memory block comes from the pool: the first CUDA call in it is ours.
            answers[name] = _in_fork(lambda: torch.ops.cubin.matmul(a, b).shape)
    answers["parent_still_right"] = torch.equal(torch.ops.cubin.matmul(a, b), _expected(a, b))
    return answers


def fork_before_use() -> dict:
    """Import, fork, use in the child: succeeds."""
    import torch_cubin  # noqa: F401

    def use() -> bool:
        a, b = _inputs(64, 64, 64)
        return torch.equal(torch.ops.cubin.matmul(a, b), _expected(a, b))

    return _in_fork(use)


def catalog(kind: str) -> dict:
    """TORCH_CUBIN_CATALOG names a package with a fault (see run_child.broken_catalog)."""
    import torch_cubin  # noqa: F401

    answers = {}
    a, b = _inputs(64, 64, 64)
    for name, grad in (("no_grad", False), ("grad", True), ("again", True)):
        with torch.set_grad_enabled(grad):
            try:
                answers[name] = f"no error: {torch.ops.cubin.matmul(a, b).shape}"
            except Exception as error:  # which one is the question
                answers[name] = f"{type(error).__name__}: {error}"
    # torch itself must have survived.
    answers["torch"] = bool(torch.equal(a @ b, _expected(a, b)))
    return answers


def precision(family: str) -> dict:
    """Which multiplication ran under each of torch's precision settings of one family.

    One family a process: torch complains where the old and the new switches are mixed.
    """
    import torch_cubin  # noqa: F401

    generator = torch.Generator("cuda").manual_seed(5)
    a = torch.randn(256, 512, generator=generator, device="cuda")
    b = torch.randn(512, 256, generator=generator, device="cuda")
    exact = a.double() @ b.double()

    def name(out: torch.Tensor) -> str:
        error = ((out.double() - exact).norm() / exact.norm()).item()
        if 5e-5 < error < 2e-3:
            return "tf32"
        return "ieee" if error <= 2e-6 else f"neither: relative error {error}"

    def weights(function):
        return lambda: function(a, b)

    linear = lambda x, w: torch.ops.cubin.linear(x, w.t().contiguous())  # noqa: E731
    product = lambda x, y: torch.ops.cubin.matmul(x, y)  # noqa: E731
    calls = {
        "torch": weights(torch.matmul),
        "matmul": weights(product),
        "linear": weights(linear),
        "compiled": weights(torch.compile(product, fullgraph=True)),
        "compiled_eager": weights(torch.compile(product, backend="eager", fullgraph=True)),
    }

    settings = []
    if family == "allow_tf32":
        for value in (False, True, False, True):
            settings.append((value, lambda v=value: setattr(torch.backends.cuda.matmul, family, v)))
    elif family == "set_float32_matmul_precision":
        for value in ("highest", "high", "medium", "highest"):
            settings.append((value, lambda v=value: torch.set_float32_matmul_precision(v)))
    elif family == "fp32_precision":
        for value in ("ieee", "tf32", "ieee", "tf32"):
            settings.append((value, lambda v=value: setattr(torch.backends.cuda.matmul, family, v)))
    elif family == "global_fp32_precision":
        torch.backends.cuda.matmul.fp32_precision = "none"
        for value in ("ieee", "tf32", "ieee"):
            settings.append((value, lambda v=value: setattr(torch.backends, "fp32_precision", v)))
    steps = []
    for value, apply in settings:
        apply()
        steps.append({"setting": value, **{key: name(run()) for key, run in calls.items()}})
    return {"steps": steps}


def sanitize(tool: str) -> dict:
    """A reduced set of shapes, dtypes and layouts; compute-sanitizer watches (see run_child)."""
    from gpu import cases, layers_child

    import torch_cubin  # noqa: F401

    shapes = [
        (64, 64, 64),
        (129, 65, 33),
        (1, 300, 257),
        (4, 129, 1025),
        (17, 1, 40),
        (96, 72, 2049),
    ]
    if tool == "racecheck":
        shapes = [(129, 65, 97), (1, 300, 257), (16, 64, 2049)]
    layouts = cases.matrix_layouts(2)
    names = list(layouts)
    r = random.Random(7)
    wrong, calls = [], 0
    for mode in cases.MODES:
        with cases.math_mode(mode) as dtype, torch.no_grad():
            for m, n, k in shapes:
                pairs = [("rows", "rows"), ("rows", "columns"), tuple(r.choices(names, k=2))]
                for a_name, b_name in pairs:
                    # Built on the CPU and compared there: fewer kernels but ours to instrument.
                    a = torch.randint(-3, 4, (m, k)).to(dtype)
                    b = torch.randint(-3, 4, (k, n)).to(dtype)
                    bias = torch.randint(-3, 4, (n,)).to(dtype)
                    expected = a.double() @ b.double()
                    gpu_a = _bare(a, layouts[a_name])
                    gpu_b = _bare(b, layouts[b_name])
                    out = torch.ops.cubin.matmul(gpu_a, gpu_b).cpu()
                    biased = torch.ops.cubin.linear(gpu_a, gpu_b.t(), bias.cuda()).cpu()
                    calls += 2
                    if not torch.equal(out, expected.to(dtype)):
                        wrong.append(f"matmul {mode} {(m, n, k)} {a_name} {b_name}")
                    if not torch.equal(biased, (expected + bias.double()).to(dtype)):
                        wrong.append(f"linear {mode} {(m, n, k)} {a_name} {b_name}")
    kinds = [layers_child.gradients]
    if torch.cuda.get_device_capability() == (9, 0):
        kinds.append(layers_child.layers_of_few_rows)
    for dtype in (torch.bfloat16, torch.float16):
        found, made = layers_child.wrong_of(kinds, dtype)
        wrong, calls = wrong + found, calls + made
    wrong += symmetric_sanitize(tool)["wrong"]
    wrong += _wrong_products_of_groups()
    wrong += _wrong_8_bit_products()
    torch.cuda.synchronize()
    return {"wrong": wrong, "calls": calls}


def _wrong_products_of_groups() -> list[str]:
    """Rows and sums of uneven groups, and mixtures of experts: one chunk of ids, and two."""
    import grouped_options
    from gpu import experts_child

    if torch.cuda.get_device_capability() != (9, 0):
        return []
    wrong = []
    offs = torch.tensor([5, 5, 77, 90], dtype=torch.int32)
    starts = [0, *offs.tolist()]
    parts = list(zip(starts, offs.tolist(), strict=False))
    dtypes = torch.bfloat16, torch.float32, torch.float64
    # The second one's rows are no multiples of 16 bytes.
    for dtype, (k, n) in itertools.product(dtypes, ((72, 136), (64, 51))):
        a = torch.randint(-3, 4, (90, k)).to(dtype)
        b = torch.randint(-3, 4, (4, n, k)).to(dtype)
        grad = torch.randint(-3, 4, (90, n)).to(dtype)
        rows = torch.cat([a[i:j] @ own.t() for (i, j), own in zip(parts, b, strict=True)])
        sums = torch.stack([a[i:j].t() @ grad[i:j] for i, j in parts])
        for weights in (b.cuda().mT, b.mT.contiguous().cuda()):
            out = torch.ops.cubin.grouped_matmul(a.cuda(), weights, offs=offs.cuda())
            if not torch.equal(out.cpu(), rows):
                wrong.append(f"rows of groups {dtype} {k} {n}")
        out = torch.ops.cubin.grouped_matmul(a.cuda().t(), grad.cuda(), offs=offs.cuda())
        if not torch.equal(out.cpu(), sums):
            wrong.append(f"sums of groups {dtype} {k} {n}")
    for k, n in ((72, 136), (64, 51)):
        options = grouped_options.OPTIONS
        args = random.Random(k), (5, 0, 72, 13), k, n, options, torch.bfloat16, "cpu", 3
        (a, b), given = grouped_options.draw(*args)
        on_gpu = {x: y.cuda() if torch.is_tensor(y) else y for x, y in given.items()}
        out = torch.ops.cubin.grouped_matmul(a.cuda(), b.cuda(), **on_gpu).cpu()
        right, stored = grouped_options.expected(a, b, given)
        if not torch.allclose(out[stored], right[stored], rtol=0.05, atol=0.05):
            wrong.append(f"options of groups {k} {n}")
    sizes = (7, 72, 40), (300, 136, 136), (9, 51, 27)
    return wrong + experts_child.wrong_layers(dtypes[:2], sizes)


def _wrong_8_bit_products() -> list[str]:
    """scaled_matmul with every kind of sums and tails in every dim, groups of rows and of K, and
    quantize."""
    import scaled_cases as scaled
    from gpu import experts_child

    if torch.cuda.get_device_capability() != (9, 0):
        return []
    wrong, generator = [], torch.Generator().manual_seed(0)
    for m, n, k in ((129, 77, 130), (200, 264, 640)):
        for recipes in ((1, 1), (4, 5), (4, 4)):
            args = scaled.operands(m, n, k, recipes, generator)
            bias = scaled.integers((n,), generator)
            expected = scaled.expected(*args, bias)
            own = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
            own[1] = args[1].t().cuda().t()
            for dtype in scaled.OUT_DTYPES:
                for fast in (False, True):
                    options = {"bias": bias.cuda(), "output_dtype": dtype, "use_fast_accum": fast}
                    out = torch.ops.cubin.scaled_matmul(*own, **options)
                    if not torch.equal(out.cpu(), expected.to(dtype)):
                        wrong.append(f"scaled {(m, n, k)} {recipes} {dtype} {fast}")
    sizes = (5, 0, 130, 17)
    offs = torch.tensor(sizes).cumsum(0).cuda()
    for (n, k), recipes in itertools.product(((136, 272), (77, 130)), scaled.OF_GROUPS):
        args = scaled.groups(recipes, sum(sizes) + 3, len(sizes), n, k, generator)
        expected = scaled.expected_of_groups(args, sizes)
        own = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
        for fast in (False, True) if recipes == scaled.OF_GROUPS[0] else (False,):
            out = torch.ops.cubin.scaled_grouped_matmul(*own, offs=offs, use_fast_accum=fast)
            if not torch.equal(out[: sum(sizes)].cpu(), expected.bfloat16()):
                wrong.append(f"scaled groups {(n, k)} {recipes} {fast}")
    for (m, rest), (recipe, _) in itertools.product(((77, 4), (136, 104)), scaled.OF_K):
        args = scaled.groups_of_k(recipe, len(sizes), m, 272, sum(sizes) + rest, generator)
        expected = scaled.expected_of_k(args, sizes)
        own = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
        own[1] = args[1].t().cuda().t()
        for fast in (False, True):
            out = torch.ops.cubin.scaled_grouped_matmul(*own, offs=offs, use_fast_accum=fast)
            if not torch.equal(out.cpu(), expected.bfloat16()):
                wrong.append(f"scaled groups of K {m} {rest} {recipe} {fast}")
    dtypes = torch.bfloat16, torch.float32
    return wrong + experts_child.wrong_quantize(dtypes, ((129, 257), (40, 1032)))


def symmetric_sanitize(tool: str, *modes: str) -> dict:
    """syrk and symm_square by every kernel and kind of config of sm90_symmetric.cu, and by a
    product in full, of some modes (default: all); compute-sanitizer watches."""
    from gpu import cases

    from torch_cubin._native import library

    syrk, symm_square = torch.ops.cubin.syrk, torch.ops.cubin.symm_square
    tiles = ["128x256", "128x192", "128x128", "128x64"]
    kinds = "", " streamed in 2", " split in 3"
    configs = [f"{tile}{kind}" for tile in tiles for kind in kinds]
    # These are for more tiles than multiprocessors: of each matrix there are three, four or six.
    many = ["128x256 in pairs", "128x128 ping_pong", "128x128 ping_pong with thin rows"]
    # Four tiles at the diagonal of each, 140 in all.
    four = ["128x128 with extra squares"]
    lone = ["128x64", "128x64 split in 2"]  # of a batch
    shapes = {(264, 520): configs, (33, 17): [""], (3, 320, 264): lone, (45, 264, 8): many,
              (14, 392, 8): four}  # fmt: skip
    wrong, calls = [], 0
    for mode in modes or ("bfloat16", "float16", "tf32"):
        with cases.math_mode(mode) as dtype, torch.no_grad():
            for shape, names in shapes.items():
                *batch, n, _ = shape
                sizes = (shape, (*batch, n, n), (n, n))
                x, a, c = (torch.randint(-3, 4, each).double() for each in sizes)
                rows, of_a, addend = (value.to(dtype).cuda() for value in (x, a, c))
                columns = rows.mT.contiguous().mT
                gram, product = x @ x.mT + c, a @ a
                for config in names:
                    library.watch_plans(True)
                    library.force_config(f"sm90_symmetric {config}")
                    operands = [columns if "split" in config else rows]
                    if config.endswith("ping_pong"):  # kernels that no other config runs
                        operands = [rows, columns]
                    outs = [syrk(own, addend, beta=1) for own in operands]
                    squares = symm_square(of_a)
                    library.force_config("")
                    library.watch_plans(False)
                    fulls = [gram] * len(outs) + [product]
                    calls += len(fulls)
                    for out, full in zip([*outs, squares], fulls, strict=True):
                        expected = full.tril() + full.tril(-1).mT
                        if not torch.equal(out.cpu(), expected.to(dtype)):
                            wrong.append(f"symmetric {mode} {shape} {config}")
    return {"wrong": wrong, "calls": calls}


def configs_sanitize(tool: str, mode: str, *layouts: str) -> dict:
    """Every config in which Hopper's kernels run some products of `mode`, and so every one of these
    kernels, K split with a second kernel too; with a bias, and with an activation besides, in
    alternation; of some layouts (default: all). compute-sanitizer watches."""
    from gpu import answers, cases

    import torch_cubin  # noqa: F401
    from torch_cubin._native import library

    # Tails in every dim. A last wave of tiles is streamed if there are two whole ones before it.
    middle, streamed = (200, 264, 1032), (3080, 4616, 264)
    few = [(m, 520, 1032) for m in (1, 16, 24, 40, 64)]
    # Rows that begin anywhere, of a K that is read whole, and of one that is split.
    split = 1229 if tool != "racecheck" else 589  # which takes many times as long
    unaligned = [(131, 75, 61 if mode == "tf32" else 101), (75, 131, split), (3, 75, split)]
    shapes = [middle, *unaligned, *few, streamed]
    if tool == "racecheck":
        shapes[0] = (72, 136, 1032)
    if mode in ("float32", "float64"):  # none of their kernels is streamed
        shapes.remove(streamed)
    # K of all tiles divided evenly, among blocks or pairs of them: each has parts of two tiles.
    few_streamed = [(m, 8512, 1032) for m in (1, 16, 24, 64)]
    wrong, ran = [], set()
    runs: collections.Counter[tuple] = collections.Counter()
    for layout in layouts or ("nt", "nn", "tn", "tt"):
        if mode == "tf32" and layout == "tn":  # one operand is copied first, then as nn or tt
            continue
        own = [*shapes, *(few_streamed if layout == "nn" and "float16" in mode else ())]
        if answers.ENDS in os.environ:
            answers.shuffle(own)
        for m, n, k in own:
            with cases.math_mode(mode) as dtype, torch.no_grad():
                a, b = torch.randint(-3, 4, (m, k)), torch.randint(-3, 4, (k, n))
                bias = torch.randint(-3, 4, (n,))
                exact = a.double() @ b.double()
                a, b, bias = (x.to(dtype) for x in (a, b, bias))
                a = a.cuda() if layout[0] == "n" else a.t().contiguous().cuda().t()
                b = b.cuda() if layout[1] == "n" else b.t().contiguous().cuda().t()
                library.watch_plans(True)
                torch.ops.cubin.matmul(a, b)
                # Some configs plan products of copies, whose rows begin at lines of the cache.
                plan = min(
                    library.watched_plans(),
                    key=lambda x: sum("lines" in x["product"][side] for side in "ab"),
                )
                configs = [w["name"] for w in plan["configs"]]
                # The others are copies before a product.
                configs = [name for name in configs if not name.startswith(("pad", "transpose"))]
                if (m, n, k) == streamed:
                    configs = [name for name in configs if "streamed" in name]
                # One kernel runs in any number of splits.
                configs = [c for c in configs if not re.search(r" ([4567]|\d\d+) splits", c)]
                if (m, n, k) in few_streamed:
                    configs = [n for n in configs if "skinny" in n and "streamed" in n]
                if tool == "racecheck":  # each kernel twice
                    kernels = {c: (layout, re.sub(r"\d+ split", "split", c), "skinny" in c and m)
                               for c in configs}  # fmt: skip
                    configs = [c for c in configs if runs[kernels[c]] < 2]
                    runs.update(kernels[c] for c in configs)
                    if not configs:
                        library.watch_plans(False)
                        continue
                for number, config in enumerate(configs):
                    library.force_config(config)
                    out = torch.ops.cubin.matmul(a, b)
                    # If the forced config does not support the call, using another config is not a
                    # failure.
                    forced = {x["chosen"] for x in library.watched_plans()}
                    if config not in forced:
                        wrong.append(f"{mode} {layout} {(m, n, k)} {config} was not taken")
                    expected = exact
                    takes_bias = config.startswith("sm90 ") or config == "split"
                    # Warps that finish rows of a cluster's tile wait for the bias in one place, and
                    # those that finish none in another: synccheck takes that for divergence. (A
                    # swapped config takes no ReLU: the planner's choice would run, such a one.)
                    if tool == "synccheck" and (config.endswith("_k") or "swapped" in config):
                        takes_bias = False
                    if number % 3 and takes_bias:
                        activation = ("none", "relu")[number % 3 - 1]
                        out = torch.ops.cubin.linear(a, b.t(), bias.cuda(), activation=activation)
                        expected = exact + bias.double()
                        expected = expected.relu() if activation == "relu" else expected
                    if not torch.equal(out.cpu(), expected.to(dtype)):
                        wrong.append(f"{mode} {layout} {(m, n, k)} {config} {number % 3}")
                    ran.add(f"{mode} {layout} {config} {m}")
                # The planner's choice may be such a cluster's, too.
                library.force_config("finish" if tool == "synccheck" else "")
                relu = torch.ops.cubin.linear(a, b.t(), bias.cuda(), activation="relu")
                library.watch_plans(False)
                expected = (exact + bias.double()).relu().to(dtype)
                if not torch.equal(relu.cpu(), expected):
                    wrong.append(f"{mode} {layout} {(m, n, k)} relu")
    torch.cuda.synchronize()
    sixteen = (
        *(" split ", " sm90 64x64 read ", " 128 rows streamed ", " 64 rows streamed in pairs "),
        *(" anywhere 64x128 8 splits ", " residues 128x128 of b 2 splits "),
    )
    others = {"tf32": " sm90 128x256 ", "float32": " sliced 64x32x64 ", "float64": " mma 64x64x16 "}
    for config in () if layouts else (others[mode],) if mode in others else sixteen:
        if not any(config in name for name in ran):
            wrong.append(f"no product had the config '{config.strip()}'")
    return {"wrong": wrong, "calls": len(ran)}


def _bare(value: torch.Tensor, layout) -> torch.Tensor:
    """The tensor on the GPU in this layout, its allocation ending with its last element."""
    from gpu import cases

    placed = cases.place(value, layout)
    last = sum((n - 1) * s for n, s in zip(placed.shape, placed.stride(), strict=True))
    whole = placed.as_strided((layout.offset + last + 1,), (1,), cases.GUARD)
    return whole.cuda().as_strided(placed.shape, placed.stride(), layout.offset)


def tile(kind: str, name: str) -> dict:
    """Every kernel of one kind and tile, by products of small integers: all tails, a bias, batches
    and broadcasts, an output of ragged rows, K split and streamed; and the same bits again and
    again while another stream keeps the GPU busy."""
    import torch_cubin  # noqa: F401
    from torch_cubin._native import library

    bm, bn = map(int, name.split("x"))
    kernels = [k for k in library.catalog()["kernels"] if k["kind"] == kind]
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32}
    wrong, calls = [], 0
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()

    def operand(batch: tuple, rows: int, columns: int, transposed: bool, dtype: torch.dtype):
        """Rows padded to multiples of 16 bytes, with NaN as padding."""
        shape = (*batch, columns, rows) if transposed else (*batch, rows, columns)
        whole = torch.full((*shape[:-1], -(-shape[-1] // 8) * 8), torch.nan, device="cuda")
        whole[..., : shape[-1]] = torch.randint(-3, 4, shape, device="cuda")
        value = whole.to(dtype)[..., : shape[-1]]
        return value.mT if transposed else value

    def compare(label: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if not torch.equal(out, expected.to(out.dtype)):
            wrong.append(label)

    # Those that take TF32 from registers compute nn, too: as the transposed product.
    jobs = [(kernel, kernel["layout"]) for kernel in kernels]
    jobs += [(k, "nn") for k, layout in jobs if k["math"] == "tf32" and layout == "tt"]
    for kernel, layout in jobs:
        dtype = dtypes[kernel["math"]]
        torch.backends.cuda.matmul.allow_tf32 = kernel["math"] == "tf32"
        shapes = [
            (1, 8, 8), (2 * bm, 2 * bn, 520), (bm - 3, 3 * bn + 8, 200), (3 * bm + 1, bn, 136),
            (7, 5 * bn, 1000), (bm, 2 * bn, 4096), (bm + 9, bn + 11, 96), (5 * bm, 40 * bn + 2, 64),
            (24 * bm + 8, 23 * bn, 1016), (9 * bm, 35 * bn, 72),
        ]  # fmt: skip
        for m, n, k in shapes:
            label = f"{kernel['name']} {layout} {(m, n, k)}"
            a = operand((), m, k, layout[0] == "t", dtype)
            b = operand((), k, n, layout[1] == "t", dtype)
            bias = torch.randint(-3, 4, (n,), device="cuda").to(dtype)
            exact = a.double() @ b.double()
            first = torch.ops.cubin.matmul(a, b)
            compare(label, first, exact)
            compare(f"{label} bias", torch.ops.cubin.linear(a, b.mT, bias), exact + bias.double())
            out = torch.ops.cubin.addmm(bias, a, b, alpha=2.0, beta=-3.0)
            compare(f"{label} addmm", out, 2 * exact - 3 * bias.double())
            if m > 8 * bm:
                with torch.cuda.stream(side):
                    for _ in range(4):
                        busy @ busy
                for _ in range(20):
                    compare(f"{label} again", torch.ops.cubin.matmul(a, b), first)
        # Rows that begin anywhere.
        for m, n, k in [(bm + 3, 2 * bn + 5, 61), (9 * bm, 35 * bn + 1, 127)] * kernel.get(
            "reads", 0
        ):
            a = torch.randint(-3, 4, (m, k) if layout[0] == "n" else (k, m), device="cuda")
            b = torch.randint(-3, 4, (k, n) if layout[1] == "n" else (n, k), device="cuda")
            a, b = (x.to(dtype) for x in (a, b))
            a, b = a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT
            label = f"{kernel['name']} {(m, n, k)}"
            compare(label, torch.ops.cubin.matmul(a, b), a.double() @ b.double())
        for a_batch, b_batch in (((3,), (1,)), ((2, 1), (2, 3)), ((4, 1, 2), (3, 1)), ((5,), ())):
            a = operand(a_batch, bm + 8, 200, layout[0] == "t", dtype)
            b = operand(b_batch, 200, bn + 16, layout[1] == "t", dtype)
            label = f"{kernel['name']} {layout} batches {a_batch} {b_batch}"
            compare(label, torch.ops.cubin.matmul(a, b), a.double() @ b.double())
    torch.cuda.synchronize()
    loaded = {entry["name"] for entry in library.catalog()["loaded"]}
    unused = sorted({kernel["name"] for kernel in kernels} - loaded)
    return {"wrong": wrong, "calls": calls, "unused": unused, "kernels": len(kernels)}


def unaligned(kind: str, name: str) -> dict:
    """Every kernel of one kind and tile, and every split of each, by products of small integers of
    operands whose rows begin anywhere: tails of all dims, gaps, offsets, batches, broadcasts, a
    bias; and the same bits again while another stream keeps the GPU busy. Operands lie
    among NaN, which no product may see."""
    import torch_cubin
    from torch_cubin._native import library

    kernels = [k for k in library.catalog()["kernels"] if k["kind"] == kind]
    bm, bn = map(int, name.split("x"))
    draw = random.Random(name)
    wrong, calls, configs = [], 0, set()
    torch.backends.cuda.matmul.allow_tf32 = True
    busy, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()

    def operand(batch: tuple, rows: int, columns: int, turned: bool, dtype: torch.dtype):
        """[*batch, rows, columns] with gaps and an offset; contiguous along rows if `turned`."""
        rows, columns = (columns, rows) if turned else (rows, columns)
        pitch, offset = columns + draw.choice((0, 0, 1, 2, 3, 8)), draw.choice((1, 2, 3, 6, 7, 9))
        count = math.prod(batch) * rows * pitch + offset
        memory = torch.full((count,), torch.nan, device="cuda", dtype=dtype)
        strides = [pitch, 1]
        for size in reversed((*batch[1:], rows)):
            strides.insert(0, strides[0] * size)
        value = memory.as_strided((*batch, rows, columns), strides[-len(batch) - 2 :], offset)
        value.copy_(torch.randint(-3, 4, value.shape, device="cuda"))
        return value.mT if turned else value

    def every_config(
        label: str, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, bias=None
    ) -> None:
        nonlocal calls
        library.watch_plans(True)
        try:
            run = partial(torch.ops.cubin.matmul, a, b)
            if bias is not None:
                run = partial(torch.ops.cubin.linear, a, b.mT, bias)
            run()
            names = [config["name"] for config in library.watched_plans()[-1]["configs"]]
            for config in names:
                library.force_config(config)
                calls += 1
                configs.add(config)
                if not torch.equal(run(), exact.to(a.dtype)):
                    wrong.append(f"{label} {config}")
        finally:
            library.force_config("")
            library.watch_plans(False)

    def every_shape(kernel: dict) -> None:
        nonlocal wrong
        dtype = getattr(torch, kernel["dtype"])
        turned = kernel["layout"] == "nt"
        shapes = [
            (1, 3, 3), (2, 5, 2), (bm, bn, 65), (bm + 1, bn - 1, 63), (bm - 1, 3 * bn + 1, 129),
            (33, 31, 1001), (3 * bm + 7, 130, 517), (5, 3 * bn + 3, 4099),
            (5 * bm, 9 * bn + 1, 191),
        ]  # fmt: skip
        for m, n, k in shapes:
            label = f"{kernel['name']} {(m, n, k)}"
            a, b = operand((), m, k, False, dtype), operand((), k, n, turned, dtype)
            exact = a.double() @ b.double()
            every_config(label, a, b, exact)
            bias = torch.randint(-3, 4, (n,), device="cuda").to(dtype)
            every_config(f"{label} bias", a, b, exact + bias.double(), bias)
            if m * n > 4 * bm * bn:
                first = torch.ops.cubin.matmul(a, b)
                with torch.cuda.stream(side):
                    for _ in range(4):
                        busy @ busy
                again = [torch.ops.cubin.matmul(a, b) for _ in range(200)]
                wrong += [f"{label} again" for x in again if not torch.equal(x, first)][:1]
        for a_batch, b_batch in (
            ((3,), (1,)),
            ((2, 1), (2, 3)),
            ((5,), ()),
            ((2, 1, 3, 1), (1, 2, 1, 2)),
        ):
            a = operand(a_batch, bm + 5, 131, False, dtype)
            b = operand(b_batch, 131, bn + 9, turned, dtype)
            every_config(
                f"{kernel['name']} batches {a_batch} {b_batch}", a, b, a.double() @ b.double()
            )

    for kernel in kernels:  # some serve batch_invariant() alone
        with torch_cubin.batch_invariant() if kernel.get("in_order") else nullcontext():
            every_shape(kernel)
    torch.cuda.synchronize()
    loaded = {entry["name"] for entry in library.catalog()["loaded"]}
    unused = sorted({kernel["name"] for kernel in kernels} - loaded)
    return {
        "wrong": wrong[:20], "calls": calls, "unused": unused, "kernels": len(kernels),
        "configs": sorted(configs),
    }  # fmt: skip


def order(kind: str, name: str) -> dict:
    """What the kernels of one kind and tile make of the same batch-invariant products: a hash of
    the bits for each math, layout and number of rows that they take."""
    import torch_cubin
    from torch_cubin._native import library

    kernels = [k for k in library.catalog()["kernels"] if k["kind"] == kind]
    dtypes = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "tf32": torch.float32,
        "float64": torch.float64,
    }
    host = torch.Generator().manual_seed(7)
    bits = {}
    # K that is not summed in parts (test_cuda_sm90_parts.py).
    for m, n, k in ((8, 272, 1000), (48, 320, 4000), (336, 200, 2056)):
        a, b = (torch.randn(size, generator=host, dtype=torch.float64) for size in ((m, k), (n, k)))
        for kernel in kernels:
            math, layout = kernel["math"], kernel["layout"]
            if kind == "sm90_skinny" and m > kernel["tile"][0]:
                continue
            if kind == "sm90" and math == "tf32" and layout != "nt":
                continue  # it takes B of NN products from registers (test_cuda_batch_invariant.py)
            torch.backends.cuda.matmul.allow_tf32 = math == "tf32"
            left, right = a.to("cuda", dtypes[math]), b.to("cuda", dtypes[math])
            if layout[0] == "t":
                left = left.t().contiguous().t()
            if layout[1] == "n":
                right = right.t().contiguous().t()
            if layout == "any":  # no row begins at a multiple of 16 bytes
                left, right = (F.pad(x, (0, 1))[:, :-1] for x in (left, right))
            with torch_cubin.batch_invariant():
                out = torch.ops.cubin.matmul(left, right.t())
            # All layouts of one math add the same numbers in the same order.
            digest = hashlib.sha256(out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
            bits[f"{math} {layout} {m}x{n}x{k}"] = digest[:16]
    torch.cuda.synchronize()
    loaded = {entry["name"] for entry in library.catalog()["loaded"]}
    return {"bits": bits, "kernels": len(loaded)}


def your_own_kernel() -> dict:
    """Every step of docs/your_own_kernel.md; how many of each kind ran."""
    import tempfile

    import tutorial

    with tempfile.TemporaryDirectory() as folder:
        return tutorial.run(Path(folder), gpu=True)


def calibrated() -> dict:
    """A GPU without known speeds, under the policy fastest, twice; the cache folder is empty."""
    import tempfile

    import torch_cubin
    from torch_cubin._drop_in import aten_kernels, calibrate

    torch.use_deterministic_algorithms(False)  # nothing is measured with them
    os.environ["TORCH_CUBIN_CACHE"] = tempfile.mkdtemp()
    aten_kernels._known_speed = lambda: '{"rows": []}'
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    random_state = torch.cuda.get_rng_state()
    seconds = []
    with torch_cubin.install(), torch.autocast("cuda", torch.float16):
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.mm(x, x)
            seconds.append(time.perf_counter() - begin)
        report = torch_cubin.report()
    return {
        "seconds": seconds,
        "calls": sum(row.calls for row in (*report.served, *report.declined)),
        "ran": [str(row) for row in report.ran],
        "lines": [[line.kind, line.dtype, line.speed] for line in calibrate.lines_of(0)],
        "same random numbers": torch.equal(random_state, torch.cuda.get_rng_state()),
    }


if __name__ == "__main__":
    from gpu import answers, fresh_memory

    fresh_memory.fill_if_wanted()
    scenario = globals()[sys.argv[1]]
    answers.give(answers.in_time(scenario, *sys.argv[2:]))
