"""torch.h and load_inline on the stand-in driver: what a launch with tensors becomes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from fake_driver import tensors

import torch_cubin
from torch_cubin import cpp, errors

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SEVERAL = DATA / "several.sm_90a.cuda130.cubin"
os.environ.setdefault("TORCH_CUBIN_CACHE", str(ROOT / "build" / "unit" / "inline"))
SOURCE = """
#include <torch_cubin/torch.h>
using namespace torch_cubin;
TORCH_CUBIN_EMBED(several);

Tensor vec_add(Tensor x, std::optional<Tensor> y) {
  static auto kernel = embedded(several)["vec_add"];
  Tensor z = torch_cubin::empty_like(x);
  kernel(grid(cdiv(x.numel(), 256)), block(256), x, y, z, int(x.numel()));
  return z;
}
void fill(Tensor x, int64_t value) {
  static auto kernel = Module::embedded("several", Module::kForever)["fill<int>"];
  kernel(launch(grid(1), block(1)).dependent(), strided(x), int(value));
}
std::tuple<Tensor, Tensor> empties(Tensor x, std::vector<int64_t> sizes) {
  return {new_empty(x, sizes), new_empty(x, sizes, ScalarType::BFloat16)};
}
void wrong_size(Tensor x) {
  static auto kernel = embedded(several)["vec_add"];
  kernel(grid(1), block(1), x, x, x, x.numel());
}
void on_device(Tensor x, int64_t device, int64_t stream) {
  static auto kernel = embedded(several)["fill"];
  auto* named = reinterpret_cast<CUstream_st*>(stream);
  kernel(launch(grid(1), block(1)).device(int(device)).on(named), x, 1);
}
void on_device_alone(Tensor x, int64_t device) {
  static auto kernel = embedded(several)["fill"];
  kernel(launch(grid(1), block(1)).device(int(device)), x, 1);
}
Tensor product(Tensor a, Tensor b) { return ops::matmul(a, b); }
Tensor layer(Tensor x, Tensor w, std::optional<Tensor> b, std::string activation) {
  return ops::linear(x, w, b, activation);
}
Tensor attention(Tensor q, bool is_causal) {
  ops::AttentionOptions options;
  options.is_causal = is_causal;
  return ops::attention(q, q, q, options);
}
"""
FUNCTIONS = [
    *("vec_add", "empties", "wrong_size", "on_device", "on_device_alone", "product"),
    "attention",
    'layer(Tensor x, Tensor w, Tensor? b=None, str activation="none") -> Tensor',
    "fill(Tensor(a!) x, int value=7) -> ()",
]


@pytest.fixture(scope="module")
def ops(driver):
    return cpp.load_inline("inline_test", SOURCE, embed={"several": SEVERAL}, functions=FUNCTIONS)


@pytest.fixture(autouse=True)
def declared(driver, clean):
    module = torch_cubin.load(SEVERAL)
    driver.declare(module)


def hex_of(*tensors: torch.Tensor) -> list[str]:
    return [struct.pack("<q", tensor.data_ptr()).hex() for tensor in tensors]


def test_a_launch_with_tensors(driver, ops):
    x, y = tensors.empty(3, 100), tensors.empty(3, 100)
    z = ops.vec_add(x, y)
    (launch,) = driver.launches()
    assert launch["kernel"] == "vec_add"
    assert (launch["grid"], launch["block"]) == ([2, 1, 1], [256, 1, 1])
    assert (launch["device"], launch["stream"]) == (0, 0x5000)
    assert launch["params"] == [*hex_of(x, y, z), "2c010000"]
    assert (z.shape, z.stride(), z.dtype, z.device) == (x.shape, x.stride(), x.dtype, x.device)


def test_the_tensors_device_and_its_stream(driver, ops):
    ops.vec_add(tensors.empty(4, device=1), None)
    ops.on_device(tensors.empty(4, device=1, dtype=torch.int32), 1, 0x7000)
    first, second = driver.launches()
    assert (first["device"], first["stream"]) == (1, 0x5001)
    assert first["params"][1] == "00" * 8
    assert (second["device"], second["stream"]) == (1, 0x7000)  # the one that was named
    ops.on_device_alone(tensors.empty(4, device=1, dtype=torch.int32), 1)
    assert driver.launches()[2]["stream"] == 0x5001  # PyTorch's current one of that device


def test_schemas_with_defaults_and_strided_tensors(driver, ops):
    x = tensors.strided((4, 4), (1, 8), dtype=torch.int32)
    ops.fill(x)
    (launch,) = driver.launches()
    assert launch["kernel"] == "_Z4fillIiEvPT_S0_"
    assert launch["params"] == [*hex_of(x), "07000000"]
    assert launch["attributes"] == {"6": [1]}
    assert "Tensor(a!) x, int value=7" in str(ops.fill.default._schema)
    assert 'str activation="none"' in str(ops.layer.default._schema)
    assert str(ops.empties.default._schema).endswith(
        "::empties(Tensor arg0, int[] arg1) -> (Tensor, Tensor)"
    )


def test_allocation(ops):
    one, two = ops.empties(tensors.empty(2, device=1), [3, 0, 5])
    assert (one.shape, two.stride()) == ((3, 0, 5), (5, 5, 1))
    assert (one.dtype, two.dtype, two.device.index) == (torch.float32, torch.bfloat16, 1)


def test_wrong_calls_are_refused(driver, ops):
    x = tensors.empty(4)
    with pytest.raises(RuntimeError, match=r"\[params\]: argument 3 .* an integer of 8 bytes"):
        ops.wrong_size(x)
    with pytest.raises(RuntimeError, match=r"\[input\]: .* is not contiguous"):
        ops.vec_add(tensors.strided((4, 4), (1, 4)), x)
    with pytest.raises(RuntimeError, match=r"\[input\]: .* another device .* cuda:0, got cuda:1"):
        ops.vec_add(x, tensors.empty(4, device=1))
    with pytest.raises(RuntimeError, match=r"\[input\]: .* another device"):
        ops.on_device(x, 1, 0x7000)
    with pytest.raises(RuntimeError, match=r"\[input\]: .* elements and no memory"):
        ops.vec_add(tensors.without_memory(4), x)
    with pytest.raises(NotImplementedError):
        ops.vec_add(torch.zeros(4), None)
    assert driver.launches() == []


def test_an_error_of_an_op_keeps_its_text(ops):
    a, b = tensors.empty(3, 4), tensors.empty(5, 6)
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*3, 4.*5, 6"):
        ops.product(a, b)
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]: .*activation"):
        ops.layer(a, tensors.empty(7, 4), None, "none of these")


def test_a_compiled_extension_is_cached(ops, monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cpp, "_build", refuse)
    given = {"embed": {"several": SEVERAL.read_bytes()}, "functions": FUNCTIONS}
    again = cpp.load_inline("inline_test", SOURCE, **given)
    assert again.vec_add is ops.vec_add
    with pytest.raises(AssertionError, match="compiled again"):
        cpp.load_inline("inline_test", SOURCE + "\n", **given)


def test_a_cache_that_has_moved(tmp_path, monkeypatch):
    """A second library with the same ops would end the process."""
    function = "torch_cubin::Tensor same(torch_cubin::Tensor x) { return x; }"
    source = f"#include <torch_cubin/torch.h>\n{function}"
    made = []
    for cache in (tmp_path / "before", tmp_path / "after"):
        monkeypatch.setenv("TORCH_CUBIN_CACHE", str(cache))
        made.append(cpp.load_inline("inline_moved", source, functions=["same"]).same)
    assert made[0] is made[1]


def test_headers_of_the_users_own_are_part_of_the_key(monkeypatch, tmp_path):
    """With an edited header the same source has other functions, in this process, too."""
    folders = []

    def build(folder, *arguments):
        folders.append(folder)
        raise AssertionError("compiled")

    def compiled(source, **given):
        with pytest.raises(AssertionError, match="compiled"):
            cpp.load_inline("inline_header", source, **given)
        return folders[-1]

    monkeypatch.setattr(cpp, "_build", build)
    source, given = "#include <mine.h>\n", {"extra_compile_args": [f"-I{tmp_path}"]}
    header = tmp_path / "mine.h"
    made = []
    for content in ("int one;", "int other;", "int one;"):
        header.write_text(content)
        made.append(compiled(source, **given))
        assert made[-1] == compiled(source, extra_compile_args=iter(given["extra_compile_args"]))
        monkeypatch.setenv("CPATH", str(tmp_path))
        made.append(compiled(source))
        monkeypatch.delenv("CPATH")
    assert len({*made}) == 4
    assert made[:2] == made[4:]
    assert {folder.parent for folder in made} == {cpp.cache_path()}
    made.clear()
    linked, with_comma, held = (tmp_path / name for name in ("mine.o", "mine,2.o", "held"))
    held.write_text(f"'{with_comma}'")
    for content in ("1", "2", "1"):
        for file in (linked, with_comma):
            file.write_text(content)
        for option in (
            linked, f"-Wl,--whole-archive,{linked}", with_comma, f"@{held}",
            f"-Wl,--version-script={linked}",
        ):  # fmt: skip
            made.append(compiled("", extra_link_args=[option]))
    assert made[:5] == made[10:]
    assert len({*made}) == 10
    # What a macro or an option includes, nothing can say.
    by_macro = "#define H <mine.h>\n#include H\n"
    for source, options in ((by_macro, []), ("", ["-include", "mine.h"])):
        own = [compiled(source, extra_compile_args=options) for _ in range(2)]
        assert own[0] != own[1]
        assert own[0].parent == own[1].parent != cpp.cache_path()
    monkeypatch.setenv("TORCH_CUBIN_CACHE", "0")
    assert cpp.cache_path() == folders[-1].parent
    assert cpp.cache_path().is_absolute()


def test_libraries_that_options_find_are_part_of_the_key(monkeypatch, tmp_path):
    """As those that options name by a path are."""
    folders, files = [], []

    def build(folder, *arguments):
        folders.append(folder)
        raise AssertionError("compiled")

    def keys():
        folders.clear()
        for options in (
            [f"-L{tmp_path}", "-lmine"], ["-L", str(tmp_path), "-l", "mine"],
            ["-lmine", f"-L{tmp_path}"], [f"-L{tmp_path}", "-l:libmine.so"], ["-lmine"],
        ):  # fmt: skip
            monkeypatch.setenv("LIBRARY_PATH", str(tmp_path) if len(options) == 1 else "")
            with pytest.raises(AssertionError, match="compiled"):
                cpp.load_inline("inline_library", "", extra_link_args=options)
        return [*folders]

    monkeypatch.setattr(cpp, "_build", build)
    without = keys()
    assert keys() == without
    for name in ("libmine.a", "libmine.so"):
        files.append(tmp_path / name)
        files[-1].write_text("1")
    first = keys()
    assert not {*first} & {*without}
    assert keys() == first
    for file in files:
        file.write_text("2")
    assert not {*keys()} & {*first}


@pytest.mark.parametrize(
    ("function", "kind", "schema"),
    [
        ("Tensor f(Tensor x, int n) { return x; }", "int", ""),
        ("void f(Tensor x, float n) {}", "float", "(Tensor x, float n=1) -> ()"),
        ("unsigned f(const float* x) { return 1; }", "const float*", ""),
        ("void f(std::optional<std::vector<size_t>> x) {}", "long unsigned int", ""),
    ],
)
def test_a_type_that_no_op_takes_is_named(function, kind, schema):
    source = f"#include <torch_cubin/torch.h>\nusing namespace torch_cubin;\n{function}"
    with pytest.raises(errors.InputError) as raised:
        cpp.load_inline("inline_types", source, functions=[f"f{schema}"])
    text = str(raised.value)
    assert f"got {kind}. PyTorch's integers are int64_t" in text
    assert "function 'f' of 'inline_types_" in text
    assert "expected Tensor, int64_t, double, bool, std::string, ScalarType, Device" in text
    assert len(text.splitlines()) == 1


def test_a_schema_of_other_types_than_the_functions_is_refused():
    source = "#include <torch_cubin/torch.h>\nusing namespace torch_cubin;\n"
    source += "Tensor f(Tensor x, int64_t n, std::optional<Tensor> y) { return x; }"
    for schema, fits in (
        ("f(Tensor(a!) x, int by=1, Tensor? y=None) -> Tensor(a!)", True),
        ("f(Tensor x, float by, Tensor? y) -> Tensor", False),
    ):
        if fits:
            cpp.load_inline("inline_schemas", source, functions=[schema])
            continue
        with pytest.raises(
            errors.InputError, match="is not that of the C\\+\\+ function: expected f"
        ):
            cpp.load_inline("inline_schemas", source, functions=[schema])


def test_modules_are_embedded(driver):
    x = tensors.empty(3, 100)
    module = torch_cubin.load(SEVERAL.read_bytes())
    ops = cpp.load_inline("inline_test", SOURCE, embed={"several": module}, functions=FUNCTIONS)
    ops.vec_add(x, None)
    assert driver.launches()[0]["kernel"] == "vec_add"


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("TORCH_CUBIN_CACHE", str(cache))
        assert vars(cpp.load_inline("inline_empty", "")) == {}
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_bad_arguments_of_load_inline(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    for name, given, error, text in (
        ("a b", {}, errors.InputError, "namespace"),
        ("a" * 201, {}, errors.InputError, "namespace"),
        ("x", {"functions": ["f g"]}, errors.InputError, "neither a name nor a schema"),
        ("x", {"functions": "f g"}, errors.InputError, "'f g' is neither a name nor a schema"),
        ("x", {"functions": ["f", "f(Tensor x) -> ()"]}, errors.InputError, "'f' is given twice"),
        ("x", {"functions": ["f(Tensor x) -> Tensr"]}, errors.InputError, "'.*' does not parse"),
        ("x", {"functions": ["f(int n=99999999999999999999) -> ()"]}, errors.InputError, "parse"),
        ("x", {"embed": {"a": []}}, errors.InputError, "holds no image"),
        ("x", {"embed": {"a": b""}}, errors.InputError, "holds no image"),
        ("x", {"embed": {"a b": b"1"}}, errors.InputError, "cannot be embedded under"),
        ("x", {"embed": {"a": tmp_path / "none"}}, errors.FileError, "cannot be read"),
    ):
        with pytest.raises(error, match=text):
            cpp.load_inline(name, "", **given)
    with pytest.raises(errors.InputError, match=r"(?s)does not compile.*broken_1.*nonsense"):
        cpp.load_inline("broken_1", "nonsense;")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with pytest.raises(errors.FileError, match=r"a C\+\+ compiler is missing"):
        cpp.load_inline("x", "")
