#!/usr/bin/env bash
# The C++ library without torch, compiled with AddressSanitizer and UBSan, runs
# tests/cpp/check_cubin.cpp on the stand-in driver: two minutes. `make test` runs the same program
# with the plain library.
#
#   tools/cpp_sanitize.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
work=build/sanitized_cpp
mkdir -p "$work/driver"
PYTHONPATH=tests "$python" - "$work/driver" <<'PYTHON'
import sys
from pathlib import Path

from fake_driver.build import build

sys.exit(build(Path(sys.argv[1])) or 0)
PYTHON
includes="-Icsrc -Ibuild/generated -Itorch_cubin/include"
includes+=" -isystem $("$python" -c 'import nlohmann_json as n; print(n.__path__[0])')/include"
includes+=" -isystem $(PYTHONPATH=tests "$python" -c 'from fake_driver.build import cuda_include; print(cuda_include())')"
flags="-std=c++17 -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
units=()
for layer in cubin driver runtime package abi; do units+=("build/generated/units/all_of_$layer.cpp"); done
# shellcheck disable=SC2086
printf '%s\n' "${units[@]}" tests/cpp/check_cubin.cpp | xargs -P 2 -I{} sh -c \
  "c++ $flags $includes -c {} -o $work/\$(basename {} .cpp).o"
# shellcheck disable=SC2086
c++ $flags "$work"/*.o -o "$work/check_cubin" -ldl -pthread
FAKE_CUDA_DEVICES=2 LD_LIBRARY_PATH="$work/driver" ASAN_OPTIONS=detect_leaks=1 \
  "$work/check_cubin" tests/data
