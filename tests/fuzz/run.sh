#!/bin/sh
# Fuzzes what reads device code: tests/fuzz/run.sh [SECONDS=60] [more libFuzzer options]
#
# Needs clang++ with libFuzzer (Debian: clang-14 libclang-rt-14-dev). Without it, the committed
# inputs are run once each through g++'s sanitizers. A crashing input is left in build/fuzz/; once
# the bug is mended, put it into tests/fuzz/corpus/ (tests/unit/test_fuzz_replay.py runs them all).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$root/build/fuzz
mkdir -p "$out/corpus"
seconds=${1:-60}
[ $# -gt 0 ] && shift

json=$(find "$root"/.venv/lib/python3*/site-packages "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
  -maxdepth 2 -type d -path '*nlohmann_json/include' 2>/dev/null | head -n 1)
if [ -z "$json" ]; then
  echo "run.sh: the headers of nlohmann-json are missing: pip install nlohmann-json" >&2
  exit 1
fi
set_flags="-std=c++17 -O1 -g -I$root/csrc -isystem$json -fno-sanitize-recover=all"
sources="$root/tests/fuzz/parse_cubin.cpp $(echo "$root"/csrc/cubin/*.cpp)"

clang=
for name in clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14; do
  if command -v "$name" >/dev/null 2>&1; then clang=$name && break; fi
done

# shellcheck disable=SC2086  # the lists are meant to be split
if [ -n "$clang" ]; then
  "$clang" $set_flags -fsanitize=fuzzer,address,undefined $sources -o "$out/parse_cubin"
  cd "$out"
  exec ./parse_cubin "$out/corpus" "$root/tests/fuzz/corpus" "$root/tests/data" "$root/tests/data/containers" \
    -max_total_time="$seconds" -max_len=32768 -timeout=10 -rss_limit_mb=1024 "$@"
fi
echo "run.sh: no clang++ here, so nothing new is tried: replaying the committed inputs" >&2
g++ $set_flags -fsanitize=address,undefined -DTORCH_CUBIN_REPLAY $sources -o "$out/replay"
exec "$out/replay" "$root"/tests/fuzz/corpus/* "$root"/tests/data/*.cubin "$root"/tests/data/containers/*
