#!/usr/bin/env bash
# Builds the GPU's tests and benchmarks for a machine with nothing but a driver, into one archive:
# build/gpu/gpu.tar.xz. tests/gpu/build.sh [ARCHS]. Run it there, in a copy of this tree, with
# tests/gpu/run.sh. The daemons travel too when BATON_UCX is the prefix of a UCX with CUDA support
# (the package libucx-cu13 of the Python index has one).
set -euo pipefail
cd "$(dirname "$0")/../.."
archs=${1:-90a} build=build/cuda out=build/cuda/gpu ucx=${BATON_UCX:-}
programs=(
  tests/unit/kernels/test_cuda_{ops,topk,sparse,graph,experts}
  tests/model_{check,eval}
  bench/bench_gpu_{linear,sparse}
)
if [ -n "$ucx" ]; then
  for d in router prefill decode expertd; do programs+=($d/baton-$d); done
fi
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DBATON_CUDA=ON -DBATON_CUDA_ARCHS="$archs" -DBATON_UCX="$ucx" \
  -DCMAKE_EXE_LINKER_FLAGS="-Wl,--as-needed" -DCMAKE_BUILD_RPATH='$ORIGIN/lib' >/dev/null
ninja -C "$build" "${programs[@]}"
rm -rf "$out"
mkdir -p "$out/lib"
for p in "${programs[@]}"; do
  strip -o "$out/$(basename "$p")" "$build/$p"
done
# Everything but glibc travels along.
for p in "${programs[@]}"; do
  LD_LIBRARY_PATH="$ucx/lib" ldd "$build/$p" | awk '$2 == "=>" && $3 ~ /^\// {print $3}'
done | sort -u | grep -vE '/(libc|libm|libdl|librt|libpthread)\.so' | xargs -I{} cp -L {} "$out/lib/"
# UCX loads what knows GPUs at run time, from a folder beside itself.
if [ -n "$ucx" ]; then
  mkdir -p "$out/lib/ucx"
  for m in uct_cuda ucm_cuda uct_cma; do
    cp -L "$ucx"/lib/ucx/lib$m.so.0 "$out/lib/ucx/"
    ln -s lib$m.so.0 "$out/lib/ucx/lib$m.so"
  done
  cp -L "$ucx"/../libucx_cu13.libs/libcudart* "$out/lib/"
  strip "$out"/lib/libuc*.so* "$out"/lib/ucx/*.so.0
fi
git describe --always --dirty >"$out/commit"
# The programs share most of their kernels: together they pack to little more than one of them.
rm -rf build/gpu
mkdir -p build/gpu
tar -C "$out" -c . | xz -T1 --lzma2=preset=2,dict=128MiB >build/gpu/gpu.tar.xz
du -sh build/gpu
