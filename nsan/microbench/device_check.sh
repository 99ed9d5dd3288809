#!/bin/sh
# Record the cases of cases.tsv on a GPU machine where nothing can be installed.
#
# Each case runs alone first, which gives its times without profiling, and then under nsys. What fails is marked and
# the rest goes on. All that is written lies in one folder, and is packed into one archive at the end. POSIX shell with
# the core utilities and tar; no Python, no network. `./run.sh --help` says the options.
set -u
LC_ALL=C
export LC_ALL
umask 022

here=$(cd "$(dirname "$0")" && pwd -P) || exit 1
seconds=420 run_seconds=60 device=0 only='' oversubscribe=no to='' part_mib=15
PACKING_SECONDS=60 # of the time limit, kept for the end
RESERVE_MIB=1024   # of GPU and host memory, never asked for

usage() {
  cat <<'END'
usage: ./run.sh [--seconds N] [--only NAME,NAME] [--device N] [--with-oversubscription] [--to FOLDER] ...

Records every case, each for itself and under nsys, and packs what came of it into FOLDER/results.tar.xz
(.gz where there is no xz), in parts if it is large. Bring these home, and there: nsan bench device-check --import.

  --seconds N               stop in time: what has not run by then is marked (default 420)
  --run-seconds N           stop a program, or nsys with it, that takes longer (default 60)
  --only NAME,NAME          these cases only; --list shows them
  --device N                GPU, as nvidia-smi counts (default 0)
  --with-oversubscription   also the case that needs more GPU memory than it leaves free: small, with a ballast, last.
                            Some drivers can hang the whole machine on that: not on one that others need.
  --to FOLDER               where the archive goes (default: beside this script, where results/ always is)
  --part-size MIB           size of a part of the archive (default 15)
  --list                    show the cases

exit status: 0 every case ended well, 1 some did not, 2 the command line is wrong
END
}

exec 4>&2 # the streams of this script, also while those of a program are caught
say() { printf '%s\n' "$*" >&4; }
wrong() {
  say "run.sh: $*"
  exit 2
}
number() { case $2 in '' | *[!0-9]* | ???????*) wrong "$1 takes a whole number, not '$2'." ;; esac }

while [ $# -gt 0 ]; do
  case $1 in
    --seconds | --run-seconds | --only | --device | --to | --part-size) [ $# -gt 1 ] || wrong "$1 needs a value: ./run.sh --help" ;;
  esac
  case $1 in
    --seconds) number "$1" "$2"; seconds=$2; shift ;;
    --run-seconds) number "$1" "$2"; run_seconds=$2; shift ;;
    --only) only=$2; shift ;;
    --device) number "$1" "$2"; device=$2; shift ;;
    --to) to=$2; shift ;;
    --part-size) number "$1" "$2"; part_mib=$2; shift ;;
    --with-oversubscription) oversubscribe=yes ;;
    --list) cut -f 1,2,5 "$here/cases.tsv"; exit 0 ;;
    -h | --help) usage; exit 0 ;;
    *) wrong "there is no option '$1': ./run.sh --help" ;;
  esac
  shift
done
[ "$part_mib" -gt 0 ] || wrong "--part-size is 1 or more."
[ "$run_seconds" -gt 0 ] || wrong "--run-seconds is 1 or more."
[ -n "$to" ] || to=$here
mkdir -p "$to" || wrong "--to: '$to' cannot be made."
to=$(cd "$to" && pwd -P) || exit 1
# nsys preloads its libraries by path, and the loader takes a blank or a colon for the end of one.
case $here in *[[:space:]:]*) wrong "a path with blanks or colons does not work with nsys: move this folder." ;; esac
results=$here/results
[ ! -e "$results" ] || wrong "'$results' is there already: move it away."
for left in "$to"/results.tar*; do
  [ ! -e "$left" ] || wrong "'$left' is there already: move it away, or give another place with --to."
done
tab=$(printf '\t')
if [ -n "$only" ]; then
  for name in $(printf '%s' "$only" | tr ',' ' '); do
    cut -f 1 "$here/cases.tsv" | grep -qxF -e "$name" || wrong "--only: there is no case '$name': ./run.sh --list"
  done
fi
mkdir -p "$results" "$results/work" || exit 1
cd "$here" || exit 1 # flags name the tapes from here
started=$(date +%s)

# What this machine is. No serial number, no host, no user.

PATH=$PATH:/usr/sbin:/sbin:/usr/local/cuda/bin:/usr/local/nvidia/bin
[ ! -d /usr/local/nvidia/lib64 ] || LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64
export PATH
[ -z "${LD_LIBRARY_PATH:-}" ] || export LD_LIBRARY_PATH
CUDA_DEVICE_ORDER=PCI_BUS_ID # so that --device counts as nvidia-smi does
export CUDA_DEVICE_ORDER

nsys=$here/nsys-target/target-linux-x64/nsys
libraries=${LD_LIBRARY_PATH:-}
# The libraries that came along may ask for a newer system than this: they are for where there are none.
"$nsys" --version >/dev/null 2>&1 || libraries=${libraries:+$libraries:}$here/nsys-target/lib
run_nsys() { LD_LIBRARY_PATH=$libraries "$nsys" "$@"; }

ask_gpu() { timeout 20 nvidia-smi -i "$device" "--query-gpu=$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1; }
fact() { [ -z "$2" ] || printf '%s\t%s\n' "$1" "$(printf '%s' "$2" | tr '\t\n' '  ')"; }
has_driver() { [ -r /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

machine() {
  fact nsys "$(run_nsys --version 2>/dev/null | sed -n 's/.*version \([0-9.]*\).*/\1/p' | head -n 1)"
  fact kernel "$(uname -r)"
  fact architecture "$(uname -m)"
  fact cpu "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)"
  fact host_available_mib "$(host_mib)"
  fact started_utc "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  fact driver "$(cat /sys/module/nvidia/version 2>/dev/null || ask_gpu driver_version)"
  fact cuda "$(timeout 20 nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1)"
  for key in name compute_cap memory.total memory.free mig.mode.current; do
    value=$(ask_gpu "$key")
    case $value in *[Ii]nvalid* | *[Nn]ot\ *) ;; *) fact "gpu.$key" "$value" ;; esac
  done
  for file in /sys/module/nvidia_uvm/parameters/*; do
    [ -r "$file" ] && fact "uvm.${file##*/}" "$(cat "$file" 2>/dev/null)"
  done
  fact nvcc "$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
}

host_mib() { sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo 2>/dev/null | awk '{ print int($1 / 1024) }'; }
free_mib() { ask_gpu memory.free | grep -x '[0-9][0-9]*'; }

# The programs: as they came, or built here where these cannot run.

bin=$here/bin
runs() { "$bin/uvm_bench" --help >/dev/null 2>&1; }
# A driver that is older than the CUDA of the programs refuses them with the status of no driver.
refused() {
  timeout -k 5 60 "$bin/uvm_bench" --pattern signature --bytes 2MiB --iterations 1 --device "$device" >/dev/null 2>&1
  [ $? -eq 5 ]
}
build() {
  bin=$results/work/bin
  mkdir -p "$bin"
  for program in uvm_bench dl_bench; do
    say "building $program here"
    (cd "$here/cuda" && timeout -k 5 "$(left)" nvcc -std=c++17 -O3 -lineinfo -arch=native -o "$bin/$program" "$program.cu") \
      >>"$results/build.log" 2>&1 || return 1
  done
}
choose_programs() {
  built=no
  if ! runs; then
    say "the programs that came along do not run on this system$(command -v nvcc >/dev/null || printf ', and there is no nvcc to build others')"
  elif has_driver && refused; then
    say "the driver refuses the programs that came along: it is older than the CUDA that they were built with"
  else
    return
  fi
  if command -v nvcc >/dev/null && [ -d "$here/cuda" ]; then
    if build; then built=yes; else bin=$here/bin; say "nvcc could not build them: results/build.log"; fi
  fi
}

# One case.

left() { echo $((seconds - PACKING_SECONDS - ($(date +%s) - started))); }
most() { # the time limit of one run, or what is left
  most_left=$(left)
  [ "$most_left" -gt 0 ] || most_left=1 # 0 would be no limit
  [ "$most_left" -lt "$run_seconds" ] && echo "$most_left" || echo "$run_seconds"
}
status_name() {
  case $1 in
    0) echo ok ;; 2) echo usage ;; 5) echo no_driver ;; 6) echo skipped ;; 7) echo refused ;;
    124 | 137 | 143) echo timed_out ;; 126 | 127) echo cannot_run ;; *) echo failed ;;
  esac
}
passed() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.3f", b - a }'; }
last_words() { grep -v '^[[:space:]]*$' "$1" 2>/dev/null | tail -n 1 | tr '\t' ' ' | cut -c 1-400; }

mark() { # case status alone recorded seconds_alone seconds_nsys stream_bytes reason
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$@" >>"$results/status.tsv"
  say "  $2${8:+: $8}"
}

lacks_memory() { # the reason, if there is too little for a footprint in MiB
  there=$(free_mib) || there=''
  if [ -n "$there" ] && [ "$there" -lt $(($1 + RESERVE_MIB)) ]; then
    echo "GPU $device has $there MiB free, and this takes $1 and leaves $RESERVE_MIB: end what uses it"
    return
  fi
  there=$(host_mib)
  if [ -n "$there" ] && [ "$there" -lt $((2 * $1 + RESERVE_MIB)) ]; then
    echo "this machine has $there MiB of memory available, and this takes up to $((2 * $1)) and leaves $RESERVE_MIB"
  fi
}

limited() { # command...: its status; a signal to this script reaches it
  timeout -k 20 "$(most)" "$@" &
  child=$!
  wait $child
  limited_code=$?
  child=''
  return $limited_code
}

alone() { # program flags...: its status
  program=$1
  shift
  limited "$bin/$program" "$@" --out "$results/$name.alone" >"$results/work/stdout" 2>"$results/work/stderr"
  code=$?
  { echo "# alone: $program $*"; cat "$results/work/stdout" "$results/work/stderr"; } >>"$results/$name.log"
  return $code
}

under_nsys() { # program flags...: the status of the program, which nsys passes on
  program=$1
  shift
  # shellcheck disable=SC2046 -- the switches are words
  limited env LD_LIBRARY_PATH="$libraries" "$nsys" profile $(cat "$here/switches") --output "$results/$name" \
    "$bin/$program" "$@" --out "$results/$name.truth" >"$results/work/nsys" 2>&1
  code=$?
  { echo "# under nsys: $program $*"; cat "$results/work/nsys"; } >>"$results/$name.log"
  return $code
}

run_case() { # program footprint_mib flags...
  program=$1 footprint=$2
  shift 2
  lacking=$(lacks_memory "$footprint")
  if [ -n "$lacking" ]; then
    mark "$name" not_run '' '' '' '' '' "$lacking"
    return
  fi
  began=$(date +%s.%N)
  alone "$program" "$@" --device "$device"
  code_alone=$?
  seconds_alone=$(passed "$began") reason=$(last_words "$results/work/stderr")
  status=$(status_name $code_alone)
  if [ "$status" = timed_out ]; then
    mark "$name" timed_out $code_alone '' "$seconds_alone" '' '' "it did not end in time without nsys, and was not tried with it"
    return
  fi
  began=$(date +%s.%N)
  under_nsys "$program" "$@" --device "$device"
  code=$?
  if [ ! -s "$results/$name.qdstrm" ] && grep -q 'Local Endpoint is not available' "$results/work/nsys"; then
    under_nsys "$program" "$@" --device "$device" # its agent was not up in time; nothing has run yet
    code=$?
  fi
  seconds_nsys=$(passed "$began")
  if [ ! -s "$results/$name.qdstrm" ]; then
    status=no_stream reason="nsys made no stream: $(last_words "$results/work/nsys")"
  elif [ "$status" = ok ] && [ $code -ne 0 ]; then
    status=$(status_name $code)
    reason="it ended well alone, and with status $code under nsys: $name.log"
  fi
  [ "$status" = ok ] && reason=''
  bytes=$(wc -c <"$results/$name.qdstrm" 2>/dev/null | tr -d ' ')
  mark "$name" "$status" $code_alone $code "$seconds_alone" "$seconds_nsys" "$bytes" "$reason"
}

wanted() { [ -z "$only" ] || printf ',%s,' "$only" | grep -qF -e ",$1,"; }

record() { # every case that is wanted, those that oversubscribe only if asked for
  while IFS=$tab read -r name program footprint oversubscribes flags <&3; do
    wanted "$name" || continue
    if [ "$oversubscribes" = yes ] && [ "$oversubscribe" = no ]; then
      say "$name: left out; --with-oversubscription runs it"
      continue
    fi
    say "$name"
    if [ "$(left)" -lt 5 ]; then
      mark "$name" not_run '' '' '' '' '' "the $seconds s were over: ./run.sh --seconds N, or --only $name"
      continue
    fi
    # shellcheck disable=SC2086 -- flags are words
    run_case "$program" "$footprint" $flags
  done 3<"$here/cases.tsv"
}

# What comes home.

compress() { # results.tar: with xz, which finds what the streams have in common; else gzip; else as it is
  if command -v xz >/dev/null && timeout -k 5 "$1" xz -9 results.tar 2>/dev/null; then return; fi
  rm -f results.tar.xz
  if command -v gzip >/dev/null && gzip -6 results.tar; then return; fi
  rm -f results.tar.gz
}
bring_together() {
  rm -rf "$results/work"
  cp "$here/cases.tsv" "$here/switches" "$here/pack.json" "$results/"
  cd "$to" || return 1
  tar cf results.tar -C "$here" results || return 1
  spent=$(($(date +%s) - started))
  compress $((seconds - spent > 20 ? seconds - spent : 20))
  for archive in results.tar*; do
    if [ "$(wc -c <"$archive")" -gt $((part_mib * 1048576)) ]; then
      split -b "${part_mib}m" "$archive" "$archive.part-" && rm -f "$archive"
    fi
  done
  for file in results.tar*; do say "bring home: $to/$file ($(wc -c <"$file" | tr -d ' ') byte)"; done
}

child=''
interrupted() {
  trap '' INT TERM HUP
  if [ -n "$child" ]; then
    kill "$child" 2>/dev/null # nsys ends its program, and writes what it has
    wait "$child"
  fi
  say 'run.sh: interrupted; what was recorded so far is packed.'
  bring_together
  exit 130
}
trap interrupted INT TERM HUP

printf 'case\tstatus\talone\trecorded\tseconds_alone\tseconds_nsys\tstream_bytes\treason\n' >"$results/status.tsv"
machine >"$results/machine.txt"
choose_programs
fact programs "$([ $built = yes ] && echo 'built here' || echo 'as packed')" >>"$results/machine.txt"
record
echo
cut -f 1,2,5,6,7,8 "$results/status.tsv" | awk -F '\t' '{ printf "%-22s %-10s %13s %12s %12s  %s\n", $1, $2, $3, $4, $5, $6 }'
echo
bring_together || exit 1
[ "$(tail -n +2 "$results/status.tsv" | wc -l)" -gt 0 ] || wrong 'no case was left to run.'
! tail -n +2 "$results/status.tsv" | cut -f 2 | grep -qvx ok
