#!/bin/bash
# Runs the tests of a GPU training step without a GPU or driver, with a CUDA build of torch and tensors that report
# cuda:0.
#
#   tests/fake_cuda/run.sh [FOLDER [PYTEST ARGUMENTS]]    that torch (5 GB) goes in FOLDER, by default build/fake_cuda
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-build/fake_cuda}")
shift || true
mkdir -p "$out/driver"
if [ ! -x "$out/venv/bin/pytest" ]; then
  python3 -m venv "$out/venv"
  "$out/venv/bin/pip" install --quiet torch==2.11.0 numpy safetensors msgspec tomli-w platformdirs psutil tqdm \
    pytest pytest-timeout pytest-asyncio
fi
g++ -shared -fPIC -o "$out/devices.so" "$here/devices.cpp"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$out/driver/libcuda.so.1" "$here/driver.c"
cd "$here/../.."
export LD_LIBRARY_PATH=$out/driver LD_PRELOAD=$out/devices.so FAKE_CUDA=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD
[ $# -gt 0 ] || set -- tests/trainer/test_ops_of_a_step.py tests/fake_cuda/kernel_cases.py
exec "$out/venv/bin/python" -m pytest --noconftest -p no:cacheprovider "$@"
