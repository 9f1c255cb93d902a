# shellcheck shell=bash
# What the launchers share: options, the question before money is spent, quoting;
# sourced by them with the repository root as the current directory.

# Prints the user's mistake and its mend, and ends the script.
mistake() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "== $*" >&2
}

# Prints the head of the script as its help.
usage() {
  sed -n -e '/^#!/d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "${BASH_SOURCE[1]}"
}

# Sets the variable of each option: $1 lists the options that have a value, $2 those
# that have none, which become "yes"; all must be set before. What comes after "--"
# are overrides of the config, kept in the array `overrides`.
parse_options() {
  local values=$1 switches=$2 all=" $1 $2 " option
  shift 2
  overrides=()
  while (($#)); do
    option=${1%%=*}
    option=${option#--}
    if [[ $1 == -- ]]; then
      shift
      overrides=("$@")
      break
    elif [[ $1 != --* || ! $option =~ ^[a-z-]+$ || $all != *" $option "* ]]; then
      option="$values $switches"
      mistake "unknown option $(printf %q "${1%%=*}"); there are --${option// / --}," \
        "and -- before overrides of the config"
    elif [[ " $switches " == *" $option "* ]]; then
      [[ $1 != *=* ]] || mistake "--$option takes no value"
      printf -v "${option//-/_}" yes
    else
      [[ $1 == *=?* ]] || mistake "--$option has no value; write --$option=VALUE"
      printf -v "${option//-/_}" %s "${1#*=}"
    fi
    shift
  done
  for option in ${overrides[@]+"${overrides[@]}"}; do
    [[ $option == --config.*=* ]] || mistake \
      "$(printf %q "$option") is no override; write --config.SECTION.FIELD=VALUE"
  done
}

# Refuses a value $2 of option --$1 that is not of pattern $3, which words $4 say.
require() {
  [[ -n $2 ]] || mistake "--$1 is missing; it is $4"
  [[ $2 =~ ^($3)$ && $2 != *..* ]] || mistake "--$1=$(printf %q "$2") is not $4"
}

# Refuses a config file $1 (or FILE:ARGUMENT) that the last commit lacks.
require_config() {
  [[ -n $1 ]] || mistake "--config is missing; it is a file such as configs/base.py"
  git cat-file -e "HEAD:./${1%%:*}" 2>/dev/null || mistake \
    "--config=$(printf %q "$1") is not in the last commit; commit it, or name another"
}

# Asks before money is spent; --yes answers, and without a terminal nothing is done.
confirm() {
  local answer=""
  [[ -z $yes ]] || return 0
  [[ -t 0 ]] || mistake "there is no terminal to ask on; give --yes to go on unasked"
  read -r -p "Type yes to go on: " answer || true
  [[ $answer == yes ]] || die "nothing was done"
}

# Prints the words on one line such that every POSIX shell reads them back unchanged.
quoted() {
  local word separator="" single="'" escaped="'\\''"
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      word="'${word//$single/$escaped}'"
    fi
    printf '%s%s' "$separator" "$word"
    separator=" "
  done
  printf '\n'
}
