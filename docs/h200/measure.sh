#!/bin/bash
# Makes what lies in this folder, on a machine with a GPU, the CUDA toolkit's or torch's own CUDA packages, and
# no network:   docs/h200/measure.sh CARRIED OUT STEP...
#
# CARRIED holds what such a machine lacks: wheels (DeepSpeed and what it needs), Debian's libaio packages, a
# static fio. OUT receives reports and logs. Steps: ops (compile), tests (what needs a GPU), nodriver (ops again
# with no toolkit to be found), facts, plan:NAME (one run; LIMIT=SECONDS ends it early, with the rows so far).
# Everything but the checkout and OUT goes below /tmp/fastpersist.
set -uo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
carried=$(realpath "$1"); out=$(realpath "$2"); shift 2
place=/tmp/fastpersist
mkdir -p $place/{site,bin,aio,folder}
if [ ! -e $place/ready ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $place/site \
        $(ls "$carried"/*.whl | grep -v nvidia_cuda_crt) || exit
    for package in "$carried"/*.deb; do dpkg -x "$package" $place/aio; done
    install -m 755 "$carried/fio" $place/bin/fio
    touch $place/ready
fi
lib=$place/aio/usr/lib/x86_64-linux-gnu
[ -e $lib/libaio.so.1 ] || ln -s "$(cd $place/aio && ls -d "$PWD"/lib/x86_64-linux-gnu/libaio.so.1 | head -1)" $lib/libaio.so.1
ln -sf libaio.so.1 $lib/libaio.so
export PYTHONPATH=$checkout:$place/site PATH=$place/bin:$PATH PYTHONUNBUFFERED=1 COLUMNS=200
export CPATH=$place/aio/usr/include LIBRARY_PATH=$lib LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BENCH_RUNTIME_ROOT=$place/root BENCH_OPS_CACHE=$place/ops XDG_DATA_HOME=$place/data XDG_CACHE_HOME=$place/cache
export HF_HUB_OFFLINE=1
[ -d "$carried/ops" ] && [ ! -d $place/ops ] && cp -r "$carried/ops" $place/ops
cd "$checkout" || exit

said() { echo "== $1 ($(($(date +%s) - began)) s)"; }
began=$(date +%s)

one_run() { # NAME PLAN
    ${LIMIT:+timeout -s TERM $LIMIT} make gpu-check GPU_PYTHON="$(which python3)" PLAN="$2" FOLDER=$place/folder \
        ARGS="--host $(name)" > "$place/$1.log" 2>&1
    echo "exit code $?" >> "$place/$1.log"
}
name() { nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' ' '-' | tr '[:upper:]' '[:lower:]'; }
collect() { # NAME: report and log of its newest run, and the logs of cases that are not ok
    local run; run=$(ls -td $place/root/runs/*/ | head -1)
    cp "$run/report.json" "$out/$1.json"; cp "$place/$1.log" "$out/$1.log"
    tar czf "$out/$1-cases.tgz" -C "$run" .
}

for step in "$@"; do
    said "$step"
    case $step in
    facts)
        nvidia-smi; lsblk; df -hT / /tmp; free -g; nproc; uname -a; ldd --version | head -1
        python3 -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))'
        python3 -m bench.host.hook "$(python3 -c 'import torch; print(torch.__path__[0])')/serialization.py"
        ls -d /usr/local/cuda*; which nvcc gcc g++ ninja; find / -xdev -name cufile.h -not -path '/proc/*' 2>/dev/null
        ls /proc/driver /proc/driver/nvidia-fs 2>&1; ulimit -l; cat /proc/sys/fs/aio-max-nr ;;
    ops) python3 -m bench ops build || { tail -40 $place/ops/failed-*.log; } ;;
    ops-back) tar czf "$out/ops.tgz" -C $place/ops . ;;
    tests)
        timeout 280 python3 -m pytest -q -p no:cacheprovider -x --maxfail=12 tests/host/test_gpu.py tests/host/test_direct.py \
            tests/host/test_dcp.py tests/host/test_tuned.py tests/host/test_hook.py 2>&1 | tail -60 ;;
    nodriver)
        # A mount namespace in which the toolkit's folders are empty: only torch's own CUDA packages are left.
        crt=$(ls "$carried"/nvidia_cuda_crt-*.whl); mkdir -p $place/crt
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $place/crt "$crt"
        unshare --mount bash -c '
            for home in /usr/local/cuda*/; do mount -t tmpfs none "$(realpath "$home")"; done
            export PATH=$(echo "$PATH" | tr : "\n" | grep -v cuda | paste -sd:)
            unset CUDA_HOME CUDA_PATH; which nvcc; ls /usr/local/cuda
            BENCH_OPS_CACHE='$place'/ops-without PYTHONPATH=$PYTHONPATH:'$place'/crt timeout 200 python3 -m bench ops build' \
            || tail -30 $place/ops-without/failed-*.log ;;
    grow) # some machines show their memory only as it is used; the checks look at what is shown
        python3 -c 'import sys; b = bytearray(int(sys.argv[1]) << 30)
for i in range(0, len(b), 4096): b[i] = 1' 40; free -g | head -2 ;;
    gdstests) timeout 120 python3 -m pytest -q -p no:cacheprovider tests/host/test_gpu.py -k "cufile or double or named or short or zip_rows" 2>&1 | tail -40 ;;
    plan:*) n=$(basename "${step#plan:}" .yml); one_run "$n" "${step#plan:}"; collect "$n"; cat "$place/$n.log" ;;
    *) echo "unknown step $step" >&2; exit 2 ;;
    esac
done
said done
