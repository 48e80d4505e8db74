#!/usr/bin/env bash
# Make .venv in the repository's root and install the pinned packages of pyproject.toml into it.
#
#   bash scripts/setup.sh              the CUDA set if `nvidia-smi -L` lists a GPU, else the CPU set
#   bash scripts/setup.sh cpu|cuda     that set
#   PYTHON=/path/to/python bash scripts/setup.sh     with that Python, 3.10 to 3.14
#   SET=oldest|newest bash scripts/setup.sh     the oldest or newest versions that are supported, into .venv-SET
#
# Does nothing when all is there and the pins are unchanged. Two at once are safe: the second waits.
#
# PyPI's torch is the CUDA build: without a GPU it works, and is gigabytes. So the CPU set takes torch from PyTorch's index
# of CPU builds, or the mirror of it that TORCH_CPU_INDEX names, where that answers, and from pip's own places elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv${SET:+-$SET}
venv_python=$venv/bin/python
stamp=$venv/recsys-set.txt # what was installed; its first line alone while the installation is not finished
command=$venv/bin/recsys
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say() { echo "setup: $*"; }
die() {
    echo "setup: $*" >&2
    exit 1
}

fitting_kind() { if [[ "$(nvidia-smi -L 2>/dev/null)" == *GPU* ]]; then echo cuda; else echo cpu; fi; }

# A Debian python3 has venv, but without the python3-venv package no ensurepip, and makes no usable venv.
usable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' &>/dev/null
}

find_python() {
    local python
    if [[ -n "${PYTHON:-}" ]]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 to 3.14 with a working venv module."
        echo "$PYTHON"
        return
    fi
    for python in python3.11 python3.12 python3.10 python3.13 python3.14 python3; do
        if usable "$python"; then
            echo "$python"
            return
        fi
    done
    die "no Python 3.10 to 3.14 with a working venv module was found: install Python 3.11 (on Debian or" \
        "Ubuntu the packages python3.11 and python3.11-venv), or name one with PYTHON=/path/to/python."
}

wanted() { "$1" scripts/requirements.py "$kind" ${SET:+"$SET"}; }

first_line() { echo "${1%%$'\n'*}"; }

up_to_date() {
    [[ -f "$stamp" && -x "$command" ]] && { [[ -z "${PYTHON:-}" ]] || usable "$PYTHON"; } &&
        [[ "$(wanted "${PYTHON:-$venv_python}" 2>/dev/null)" == "$(<"$stamp")" ]] &&
        "$venv_python" -m recsys.runtime.versions &>/dev/null
}

make_venv() {
    local python
    python=$(find_python)
    # Without pyvenv.cfg, as where its removal was interrupted, its python is the system's, which packages would go into.
    if [[ -f "$venv/pyvenv.cfg" ]] && usable "$venv_python" && [[ -z "${PYTHON:-}" || "$("$PYTHON" -V)" == "$("$venv_python" -V)" ]]; then
        # Another set, place or Python leaves files behind that the new packages would meet: start anew.
        if [[ ! -f "$stamp" || "$(first_line "$(<"$stamp")")" == "$(first_line "$(wanted "$venv_python")")" ]]; then
            return
        fi
    fi
    say "making $venv with $("$python" -V) ($python)"
    if [[ -L "$venv" ]]; then rm "$venv"; fi # --clear would empty what it links to, such as the .venv of another clone
    "$python" -m venv --clear "$venv"
}

# The small CPU build, unless torch is there already; the rest of the CPU set finds it in place. The whole try takes 5 s.
install_cpu_torch() {
    "$venv_python" -m pip -q show torch &>/dev/null && return
    if timeout 5 "$venv_python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=4)' \
        "$torch_cpu_index/torch/" &>/dev/null; then
        say "taking torch's CPU build from $torch_cpu_index"
        "${pip[@]}" --extra-index-url "$torch_cpu_index" "$1" ||
            say "that did not work, see pip's error above: taking torch from where pip takes the rest"
    else
        say "$torch_cpu_index does not answer: torch comes from where pip takes the rest, which on PyPI is the CUDA build"
    fi
}

install() {
    local list pins
    list=$(wanted "$venv_python")
    first_line "$list" >"$stamp"
    mapfile -t pins < <(grep -v '^#' <<<"$list")
    say "installing the $kind set (minutes, the first time)"
    # A venv whose making was interrupted has no pip yet, nor has one of uv's.
    "$venv_python" -m pip --version &>/dev/null || "$venv_python" -m ensurepip >/dev/null ||
        die "$venv has no pip, see the error above; $venv can be removed to start anew."
    local pip=("$venv_python" -m pip install -qq --disable-pip-version-check --no-input)
    local torchrec=() others=() pin
    for pin in "${pins[@]}"; do
        if [[ "$pin" == torchrec==* ]]; then torchrec+=("$pin"); else others+=("$pin"); fi
        if [[ "$pin" == torch==* && "$kind" == cpu ]]; then install_cpu_torch "$pin"; fi
    done
    # torchrec's dependency fbgemm-gpu is fbgemm-gpu-cpu in the CPU set; the others are among the pins.
    "${pip[@]}" "${others[@]}" && "${pip[@]}" --no-deps "${torchrec[@]}" ||
        die "pip could not install the $kind set, see its error above (\"from versions: none\" is what it says where" \
            "it reaches no package index: see the network, the proxy or PIP_INDEX_URL): mend that and run this again."
    # The package and its command are those of this folder, whatever is changed in it.
    pwd >"$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/recsys.pth"
    printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m recsys "$@"\n' >"$command"
    chmod +x "$command"
}

verify() {
    "$venv_python" -m recsys.runtime.versions >/dev/null || exit 1
    # The CUDA set may well be installed where no GPU is, as on a cluster's login node; it need not load there.
    if [[ "$kind" == "$(fitting_kind)" ]]; then
        say "checking that torch, fbgemm and torchrec load"
        "$venv_python" -W ignore -c 'import logging; logging.disable(); import torch, fbgemm_gpu, torchrec' >/dev/null ||
            die "the $kind set is installed but does not load, see the error above; $venv can be removed to start anew."
    fi
}

kind=${1:-$(fitting_kind)}
[[ $# -le 1 && "$kind" =~ ^(cpu|cuda)$ ]] || die "usage: bash scripts/setup.sh [cpu|cuda]"
[[ "${SET:-oldest}" =~ ^(oldest|newest)$ ]] || die "SET is '$SET', and must be oldest or newest, or not set."
if up_to_date; then exit 0; fi

# pyproject.toml is the lock: it is there in every clone. Opened for writing too, as NFS wants it for a lock.
exec 9<>pyproject.toml
flock --nonblock 9 || { say "waiting for another set-up to end" && flock 9; }
if up_to_date; then exit 0; fi
make_venv
install
verify
wanted "$venv_python" >"$stamp"
say "done"
