# shellcheck shell=bash
# Makes and keeps the environment .venv; sourced by the other scripts, with the
# repository root as the current directory.

# Prints the reason and ends the script.
die() {
  echo "error: $*" >&2
  exit 1
}

# Prints the version of interpreter $1, such as 3.11.7; fails where there is none.
python_version() {
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null
}

# Succeeds where interpreter $1 runs and is new enough.
new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the interpreter to make .venv with: $PYTHON, else the first that will do.
find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    new_enough "$PYTHON" || die "PYTHON=$PYTHON is no Python >= 3.11; name another"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3 $0"
}

# Prints what an installation depends on. The folder is part of it, since an editable
# installation points at the folder that it was made from.
fingerprint() {
  .venv/bin/python - <<'END'
import hashlib, pathlib, platform

digest = hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes()).hexdigest()
print(digest, platform.python_version(), pathlib.Path.cwd())
END
}

# Makes .venv where it is missing, broken or of another Python than $PYTHON asks for.
make_venv() {
  local python
  if new_enough .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null; then
    [[ -n ${PYTHON:-} ]] || return 0
    python=$(find_python)
    [[ $(python_version "$python") != "$(python_version .venv/bin/python)" ]] || return 0
  else
    python=$(find_python)
  fi
  echo "environment: making .venv with Python $(python_version "$python")"
  "$python" -m venv --clear .venv ||
    die "$python cannot make a virtual environment; install its venv module"
}

# Makes the environment ready, with extra $1 of pyproject.toml, or none where it is "".
ensure_env() {
  local extra=$1 wanted
  local stamp=.venv/.installed${extra:+-$extra}
  make_venv
  wanted=$(fingerprint)
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "environment: found (.venv)"
    return
  fi
  echo "environment: installing the package${extra:+ with extra $extra} into .venv"
  rm -f "$stamp" # a run cut short is not taken for a finished one
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --editable ".${extra:+[$extra]}"
  # An extra brings the plain package too.
  echo "$wanted" | tee .venv/.installed >"$stamp"
}
