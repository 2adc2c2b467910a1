#!/usr/bin/env bash
# Install ltx2 on a TPU VM, from a checkout: bash docs/tpu/install.sh. On every host of a slice alike.
# DISK: a folder with 120 GB free for checkpoints and compiled programs, as of an attached disk; without it the home.
set -euo pipefail

cd "$(dirname "$0")/../.."
disk=${DISK:-$HOME}
environment=$HOME/ltx2-environment

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then # as on images with Ubuntu 22.04
    python3 -m pip install --user --quiet uv
    python3 -m uv venv --seed --python 3.12 "$environment"
else
    python3 -m venv "$environment"
fi
# torch without CUDA
"$environment/bin/pip" install --quiet -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[tpu]'

cat >"$HOME/ltx2.env" <<END
export PATH="$environment/bin:\$PATH"
export HF_HOME="$disk/huggingface"
export XDG_CACHE_HOME="$disk/cache"
END
echo "source $HOME/ltx2.env"
