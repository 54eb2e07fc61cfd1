"""Device code in C and C++ sources as an array of numbers: which arrays are read or ignored."""

from __future__ import annotations

import struct
from pathlib import Path

import containers
import cubin_check
import pytest
import real_cubins
from containers import CUBIN, FOLDER, hex_array

DATA = CUBIN.read_bytes()
HEX = hex_array(DATA)
DECIMAL = ", ".join(map(str, DATA))


def inspect(tmp_path: Path, source: str | bytes) -> dict:
    path = tmp_path / "source.cpp"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return cubin_check.inspect(path)


def names(facts: dict) -> list[str]:
    assert "entries" in facts, facts
    return [entry["name"] for entry in facts["entries"]]


def words(data: bytes, layout: str, suffix: str) -> str:
    padded = data + b"\0" * (-len(data) % struct.calcsize(layout))
    return ", ".join(f"0x{word:x}{suffix}" for (word,) in struct.iter_unpack("<" + layout, padded))


def signed(data: bytes) -> str:
    return ", ".join(str(byte - 256 if byte > 127 else byte) for byte in data)


FORMS = {
    "plain": f"unsigned char k_cubin[] = {{{HEX}}};",
    "const": f"static const unsigned char k_cubin[{len(DATA)}] = {{{HEX}}};",
    "const behind": f"unsigned char const k_cubin[] = {{{HEX}}};",
    "decimal": f"const unsigned char k_cubin[] = {{{DECIMAL}}};",
    "octal": f"const unsigned char k_cubin[] = {{{', '.join(f'0{b:o}' for b in DATA)}}};",
    "binary": f"const unsigned char k_cubin[] = {{{', '.join(f'0b{b:b}' for b in DATA)}}};",
    "upper case and suffix": "const unsigned char k_cubin[] = {"
    + ", ".join(f"0X{b:02X}u" for b in DATA)
    + "};",
    "trailing comma": f"unsigned char k_cubin[] = {{{HEX},}};",
    "uint8_t": f"inline constexpr std::uint8_t k_cubin[]={{{HEX}}};",
    "signed": f"const char k_cubin[] = {{{signed(DATA)}}};",
    "no spaces": f"unsigned char k_cubin[]={{{HEX.replace(' ', '').replace(chr(10), '')}}};",
    "braces alone": f"const unsigned char k_cubin[] {{{HEX}}};",
    "alignas": f"alignas(16) const unsigned char k_cubin[] = {{{HEX}}};",
    "attribute before": f"__attribute__((aligned(8))) unsigned char k_cubin[] = {{{HEX}}};",
    "attribute behind": "static const unsigned char k_cubin[] __attribute__((aligned(16), "
    f'section(".nv"))) = {{{HEX}}};',
    "c++ attribute": f"[[gnu::aligned(16)]] unsigned char k_cubin[] = {{{HEX}}};",
    "declspec": f"__declspec(align(8)) unsigned char k_cubin[] = {{{HEX}}};",
    "extern c": f'extern "C" {{ extern const unsigned char k_cubin[] = {{{HEX}}}; }}',
    "namespace": f"namespace a {{ namespace {{ unsigned char k_cubin[] = {{{HEX}}}; }} }}",
    "comments within": "unsigned char /* 1 */ k_cubin[] // 2\n = { // { 3\n"
    + HEX.replace("\n", " // row, 0x00\n /* 0x11, */ ")
    + "};",
    "digits apart": "unsigned char k_cubin[] = {"
    + ", ".join(f"0x{b >> 4:x}'{b & 15:x}" for b in DATA)
    + "};",
    "crlf": f"unsigned char k_cubin[] = {{\r\n{HEX}\r\n}};\r\n",
    "short": f"const unsigned short k_cubin[] = {{{words(DATA, 'H', 'u')}}};",
    "int": f"const unsigned int k_cubin[] = {{{words(DATA, 'I', 'u')}}};",
    "unsigned": f"unsigned k_cubin[] = {{{words(DATA, 'I', '')}}};",
    "long long": f"static const unsigned long long k_cubin[] = {{{words(DATA, 'Q', 'ull')}}};",
    "uint64_t": f"const uint64_t k_cubin[] = {{{words(DATA, 'Q', 'ULL')}}};",
    "macro name": f"#define  NAME\tk_cubin\nunsigned char NAME[] = {{{HEX}}};",
    "after code": "int f(int x) { char s[] = \"a{\"; return s[x] ? '}' : '\"'; }\n"
    f"#define BRACE {{ \\\n  {{\nunsigned char k_cubin[] = {{{HEX}}};",
    "after other arrays": "int a[] = {1, 2, 3}; float b[2][2] = {{1.f, 2.f}, {3.f, 4.f}};\n"
    f'const char* c[] = {{"x", "y"}};\nunsigned char k_cubin[] = {{{HEX}}};',
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_array(form: str, tmp_path: Path) -> None:
    facts = inspect(tmp_path, FORMS[form])
    assert facts.get("kind") == "c_source", facts
    (entry,) = facts["entries"]
    assert (entry["name"], entry["kind"], entry["error"]) == ("k_cubin", "cubin", None)
    assert (entry["arch"], entry["compression"]) == ("sm_80", "none")
    assert entry["content"] == cubin_check.inspect(CUBIN)
    assert FORMS[form][entry["offset"]] == "{"


def test_tritons_ahead_of_time_source(tmp_path: Path) -> None:
    facts = inspect(tmp_path, containers.triton_aot(DATA, "add_0123abcd_0d1d2d"))
    assert names(facts) == ["add_0123abcd_0d1d2d_cubin"]
    assert facts["entries"][0]["content"]["kernels"][0]["name"] == "vec_add"


def test_tensorrt_llms_source_of_several_kernels(tmp_path: Path) -> None:
    arrays = {
        "cubin_fmha_v2_sm80_cu_cubin": DATA,
        "cubin_fmha_v2_sm90_cu_cubin": (
            real_cubins.DATA / "vec_add.sm_90a.cuda124.cubin"
        ).read_bytes(),
        "unrelated_table": bytes(range(1, 200)),
    }
    facts = inspect(tmp_path, containers.tensorrt_llm(arrays))
    assert names(facts) == list(arrays)[:2]
    assert [entry["arch"] for entry in facts["entries"]] == ["sm_80", "sm_90a"]
    out = tmp_path / "out"
    cubin_check.run(("unpack", tmp_path / "source.cpp", 1, out))
    assert out.read_bytes() == arrays["cubin_fmha_v2_sm90_cu_cubin"]


def test_every_kind_of_device_code_in_an_array(tmp_path: Path) -> None:
    kinds = {
        "fatbin": (FOLDER / "vec_add.zstd.fatbin").read_bytes(),
        "ptx": (FOLDER / "vec_add.ptx").read_bytes() + b"\0",
        "relocatable_cubin": (FOLDER / "vec_add.relocatable").read_bytes(),
        "lto_ir": b"\xed\x43\x4e\x7f" + b"\1" * 60,
        "llvm_bitcode": b"BC\xc0\xde" + b"\1" * 60,
        "cutile_bytecode": b"\x7fTileIR\0" + b"\1" * 60,
    }
    facts = inspect(tmp_path, containers.tensorrt_llm(kinds))
    assert names(facts) == list(kinds)
    assert [entry["kind"] for entry in facts["entries"]] == list(kinds)
    fatbin = facts["entries"][0]["content"]
    assert fatbin == cubin_check.inspect(FOLDER / "vec_add.zstd.fatbin")
    assert all(entry["error"] is None for entry in facts["entries"])


def test_a_damaged_array_does_not_hide_the_others(tmp_path: Path) -> None:
    facts = inspect(tmp_path, containers.tensorrt_llm({"cut": DATA[:-100], "whole": DATA}))
    cut, whole = facts["entries"]
    assert cut["error"]["tag"] == "image"
    assert "truncated" in cut["error"]["message"]
    assert (cut["content"], cut["arch"]) == (None, None)
    assert whole["content"]["arch"] == "sm_80"


LEFT_ALONE = {
    "no array": "int main() { return 0; }",
    "values too large": f"unsigned char k[] = {{{HEX.replace('0x7f', '0x17f', 1)}}};",
    "expressions": f"unsigned char k[] = {{{HEX.replace('0x7f', 'X', 1)}}};",
    "no commas": f"unsigned char k[] = {{{HEX.replace(',', ' ')}}};",
    "two commas": f"unsigned char k[] = {{{HEX.replace(',', ',,', 1)}}};",
    "no type": f"k[] = {{{HEX}}};",
    "struct": f"struct k = {{{HEX}}};",
    "function": f"int f(unsigned char k[]) {{{HEX}}}",
    "in a comment": f"/* unsigned char k[] = {{{HEX}}}; */",
    "in a line comment": f"// unsigned char k[] = {{{HEX.replace(chr(10), ' ')}}};\n",
    "in a string": f'const char* s = "unsigned char k[] = {{{HEX.replace(chr(10), " ")}}};";',
    "in a macro": f"#define K unsigned char k[] = {{{HEX.replace(chr(10), ' ')}}};\n",
    "table": "unsigned char k[] = {1, 2, 3};",
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_arrays_without_device_code_are_ignored(case: str, tmp_path: Path) -> None:
    error = inspect(tmp_path, LEFT_ALONE[case])["error"]
    assert error["tag"] == "image"
    assert "not a cubin" in error["message"]


def test_every_truncation_of_a_source_gives_facts_or_an_error(tmp_path: Path) -> None:
    source = containers.triton_aot(DATA)
    at = source.index("0x7f, 0x45")
    closing = source.index("}", at)
    for end in (at + 4, at + 200, at + 3000, closing):
        error = inspect(tmp_path, source[:end])["error"]
        assert error["tag"] == "image"
        if end > at + 100:
            assert "ends within the array 'CUBIN_NAME'" in error["message"]
    assert names(inspect(tmp_path, source[: closing + 1])) != []
