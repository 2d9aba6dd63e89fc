#!/bin/bash
# Makes what lies in this folder, on a machine with a GPU, the CUDA toolkit or torch's own CUDA packages, and no
# network:   docs/h200/measure.sh CARRIED OUT STEP...
#
# CARRIED holds what such a machine lacks: wheels (DeepSpeed and what it needs, nvidia-cuda-crt), Debian's libaio
# packages, a static fio. OUT receives reports and logs. Steps: facts, grow, ops (compile), tests (what needs a GPU),
# driver-only (compile and run where no toolkit is to be found), plan:NAME (one `make gpu-check`; LIMIT=SECONDS ends
# it early, with the rows so far). Everything but the checkout and OUT goes below /tmp/fastpersist.
set -uo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
carried=$(realpath "$1"); out=$(realpath "$2"); shift 2
place=/tmp/fastpersist
mkdir -p $place/{site,crt,bin,aio,folder}
offline() { python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$@"; }
if [ ! -e $place/ready ]; then
    offline $place/site $(ls "$carried"/*.whl | grep -v nvidia_cuda_crt) || exit
    offline $place/crt "$carried"/nvidia_cuda_crt-*.whl || exit
    for package in "$carried"/*.deb; do dpkg -x "$package" $place/aio; done
    install -m 755 "$carried/fio" $place/bin/fio
    touch $place/ready
fi
lib=$place/aio/usr/lib/x86_64-linux-gnu
[ -e $lib/libaio.so.1 ] || ln -s "$(ls -d $place/aio/lib/x86_64-linux-gnu/libaio.so.1)" $lib/libaio.so.1
ln -sf libaio.so.1 $lib/libaio.so
export PYTHONPATH=$checkout:$place/site PATH=$place/bin:$PATH PYTHONUNBUFFERED=1 COLUMNS=200
export CPATH=$place/aio/usr/include LIBRARY_PATH=$lib LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BENCH_RUNTIME_ROOT=$place/root BENCH_OPS_CACHE=$place/ops XDG_DATA_HOME=$place/data XDG_CACHE_HOME=$place/cache
export HF_HUB_OFFLINE=1
cd "$checkout" || exit

began=$(date +%s)
said() { echo "== $1 ($(($(date +%s) - began)) s)"; }
name() { nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-' | tr '[:upper:]' '[:lower:]'; }
check() { # PLAN
    ${LIMIT:+timeout -s TERM $LIMIT} make gpu-check GPU_PYTHON="$(which python3)" PLAN="$1" FOLDER=$place/folder \
        ARGS="--host $(name)"
}
keep() { # NAME: report, log and cases' logs of the newest run
    local run; run=$(ls -td $place/root/runs/*/ | head -1)
    cp "$run/report.json" "$out/$1.json"
    tar czf "$out/$1-cases.tgz" -C "$run" .
}
hide_toolkit() { # in a mount namespace of its own: the toolkit's folders are empty, torch's packages are left
    for home in /usr/local/cuda*/; do mount -t tmpfs none "$(realpath "$home")"; done
    PATH=$(echo "$PATH" | tr : '\n' | grep -v cuda | paste -sd:)
    unset CUDA_HOME CUDA_PATH CUDACXX
    while nvcc=$(which nvcc); do mount --bind /dev/null "$nvcc"; done
    ! which nvcc && [ -z "$(ls /usr/local/cuda)" ] && echo "no toolkit to be found"
}

for step in "$@"; do
    said "$step"
    case $step in
    facts)
        nvidia-smi; lsblk; df -hT / /tmp; free -g; nproc; uname -a; ldd --version | head -1; fio --version
        python3 -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))'
        python3 -m bench.host.hook "$(python3 -c 'import torch; print(torch.__path__[0])')/serialization.py"
        ls -d /usr/local/cuda*; which nvcc gcc g++ ninja
        ls /proc/driver /proc/driver/nvidia-fs 2>&1; ulimit -l; cat /proc/sys/fs/aio-max-nr ;;
    grow) # some machines show their memory only as it is used; the checks look at what is shown
        python3 -c 'b = bytearray(60 << 30)
for i in range(0, len(b), 4096): b[i] = 1'; free -g | head -2 ;;
    ops) time python3 -m bench ops build || tail -40 $place/ops/failed-*.log ;;
    tests)
        timeout 280 python3 -m pytest -q -p no:cacheprovider --maxfail=12 tests/host/test_gpu.py tests/host/test_direct.py \
            tests/host/test_dcp.py tests/host/test_tuned.py tests/host/test_hook.py 2>&1 | tail -60 ;;
    driver-only)
        export -f hide_toolkit check name; export place
        unshare --mount bash -c 'set -e; hide_toolkit
            export BENCH_OPS_CACHE=$place/ops-driver-only PYTHONPATH=$PYTHONPATH:$place/crt
            time timeout 300 python3 -m bench ops build
            check docs/h200/driver-only.yml' 2>&1 | tee "$out/driver-only.log"
        [ -e $place/ops-driver-only/failed-async_io.log ] && tail -30 $place/ops-driver-only/failed-*.log
        keep driver-only ;;
    plan:*) n=$(basename "${step#plan:}" .yml); check "${step#plan:}" 2>&1 | tee "$out/$n.log"; keep "$n" ;;
    *) echo "unknown step $step" >&2; exit 2 ;;
    esac
done
said done
