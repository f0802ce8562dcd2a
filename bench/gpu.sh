#!/bin/bash
# bench/gpu.sh FOLDER [--emulated] [--quick] [--seconds N]: measure a GPU, or do the same on an emulated one.
#
# A run ends within nine minutes; FOLDER keeps what is measured, and further runs go on there. It begins
# with every kernel on small shapes, and ends with what is wrong there, if something is. The figures of
# RESULT come first, llama.cpp last of them, then the tools of compute-sanitizer. The machine needs CUDA's
# driver, g++, and Python with cuda-bindings, nanobind, cmake, ninja, numpy, psutil, xxhash,
# prometheus-client, aiohttp, uvloop, jinja2, tokenizers and pytest. What it lacks beside them is read
# from wheels in build/gpu-wheels:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
#     --platform manylinux_2_31_x86_64 -d build/gpu-wheels msgspec gguf llguidance==1.9.1
# PYTHON: the interpreter (default: that of .venv, else python3). TARGET: only build the module, and
# compile the kernels for this one, such as sm_90; a machine with an equal Python and NVRTC, to which
# build/cuda, build/gpu-native.key and the module in kernels/ are copied, then does neither.
# LLAMA_SOURCE: a source tree of llama.cpp, which is compiled for CUDA and measured too; of it
# CMakeLists.txt, cmake, common, include, src, vendor, tools/batched-bench and ggml are needed, of
# ggml/src the files, ggml-cpu and ggml-cuda.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { sed -n '2,19p' "$root/bench/gpu.sh"; exit 2; }
folder=$(realpath -m "$1")
shift
cd "$root"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=$root/.venv/bin/python
fi
python=$("$PYTHON" -c 'import sys; print(sys.executable)')
PATH=$(dirname "$python"):$PATH

# A folder for each set of wheels and Python: another run may use one.
wheels=$({ echo "$python"; ls build/gpu-wheels 2>/dev/null || true; } | sha256sum)
site=$root/build/gpu-site/${wheels:0:16}
mkdir -p "$site"
for wheel in build/gpu-wheels/*.whl; do
  name=$(basename "$wheel")
  "$python" -c "import importlib.metadata as m; m.version('${name%%-*}')" 2>/dev/null && continue
  [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site"
done
# A package for another Python is found, and cannot be imported.
lacking=$(PYTHONPATH=$site TARGET=${TARGET:-} "$python" -P - "$@" <<'EOF'
import importlib, os, shutil, sys
names = "numpy psutil xxhash prometheus_client aiohttp uvloop jinja2 tokenizers pytest msgspec gguf llguidance"
if "--emulated" not in sys.argv:
    names += " nanobind cuda.bindings.driver cuda.bindings.nvrtc"
for name in names.split():
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"  {name}: {error}")
for program in ("g++", "cmake", "ninja") if "--emulated" not in sys.argv else ("g++",):
    if shutil.which(program) is None:
        print(f"  the program {program}")
if "--emulated" not in sys.argv:  # else it would show after minutes
    try:
        from cuda.bindings import driver, nvrtc
        found = "NVRTC {}.{}".format(*nvrtc.nvrtcVersion()[1:])
        if not os.environ["TARGET"]:
            for name in ("cuInit", "cuDeviceGet"):
                status, *_ = getattr(driver, name)(0)
                if status != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"{name}: {status.name}")
            found += f", a driver of CUDA {driver.cuDriverGetVersion()[1]}"
        print(found, file=sys.stderr)
    except Exception as error:
        print(f"  a GPU, its driver and compiler: {error}")
EOF
)
[ -z "$lacking" ] || { printf 'missing for %s:\n%s\n' "$python" "$lacking"; exit 1; }
export PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# A checkout where `make native` ran has the module; elsewhere it is built for this Python, unless it was, of
# the same sources.
key=$(find kernels/CMakeLists.txt kernels/csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum)
key="${key%% *} $("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
is_there=
if [[ " $* " == *" --emulated "* ]] || [ "$(cat build/gpu-native.key 2>/dev/null)" = "$key" ]; then
  "$python" -c 'import kernels' 2>/dev/null && is_there=yes
fi
if [ -z "$is_there" ]; then
  echo "native module: building"
  # -w: what another compiler warns of ends no run.
  cmake -S kernels -G Ninja -B build/gpu-native -DPython_EXECUTABLE="$python" -DCMAKE_CXX_FLAGS=-w \
    -DCMAKE_BUILD_TYPE=Release -DBATCHENGINE_IN_PLACE=ON > build/gpu-native.log \
    || { cat build/gpu-native.log; exit 1; }
  cmake --build build/gpu-native > build/gpu-native.log || { tail -50 build/gpu-native.log; exit 1; }
  echo "$key" > build/gpu-native.key
  echo "native module: $SECONDS s"
fi
[ -z "${TARGET:-}" ] || exec "$python" -P -m bench.cuda.gpu "$folder" --target "$TARGET"
exec "$python" -P -m bench.cuda.gpu "$folder" --seconds $((480 - SECONDS)) "$@"
