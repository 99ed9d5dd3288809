#!/bin/sh
# Record the cases of cases.tsv on a GPU machine where nothing can be installed.
#
# Each case runs alone first, which gives its times without profiling, and then under nsys. What fails is marked and
# the rest goes on. All that is written lies in one folder, and is packed into one archive at the end. POSIX shell with
# GNU's core utilities and grep, tar, awk and sed; no Python, no network. `./run.sh --help` says the options.
set -u
LC_ALL=C
export LC_ALL
umask 022

script=$(readlink -f "$0") || script=$0 # it may be called by a link
here=$(cd "$(dirname "$script")" && pwd -P) || exit 1
seconds=420 run_seconds=60 device=0 only='' oversubscribe=no to='' part_mib=15 most_mib=60 most_files=8
PACKING_SECONDS=60 # of the time limit, kept for the end
LEAST_SECONDS=30   # for which there is any sense in beginning
reserve_mib=1024   # of GPU and host memory, never asked for

usage() {
  cat <<'END'
usage: ./run.sh [--seconds N] [--only NAME,NAME] [--device N] [--with-oversubscription] [--to FOLDER] ...

Records every case, each for itself and under nsys, and packs what came of it into FOLDER/results.tar.xz
(.gz where there is no xz), in parts if it is large. Bring these home, and there: nsan bench device-check --import.

  --seconds N               stop in time: what has not run by then is marked (default 420). 60 of them are kept for
                            packing, and a case takes 5 to 20, so that less than 90 is for one case with --only
  --run-seconds N           stop a program, or nsys with it, that takes longer (default 60)
  --only NAME,NAME          these cases only; --list shows them
  --device N                GPU, as nvidia-smi counts, or among those of CUDA_VISIBLE_DEVICES where that is set (default 0)
  --reserve MIB             GPU and host memory that stays free (default 1024); a case that would leave less is not run
  --with-oversubscription   also the case that needs more GPU memory than it leaves free: small, with a ballast, last.
                            Some drivers can hang the whole machine on that: not on one that others need.
  --to FOLDER               where the archive goes (default: beside this script, where results/ is, too; where that cannot
                            be written to, results/ is in FOLDER)
  --part-size MIB           size of a part of the archive (default 15)
  --max-size MIB            of all parts together (default 60)
  --max-files N             how many parts (default 8). Where that is too little for all streams of nsys, the largest
                            are left out, and their cases marked; tables never are
  --list                    show the cases

exit status: 0 every case ended well, 1 some did not, 2 the command line is wrong, 130 it was stopped
END
}

exec 4>&2 5>&1 # the streams of this script, also while those of a program are caught
say() { printf '%s\n' "$*" >&4; }
wrong() {
  say "run.sh: $*"
  exit 2
}
number() { # option value: the value in $whole, without zeros before it, which would make it octal
  case $2 in '' | *[!0-9]*) wrong "$1 takes a whole number, not '$2'." ;; esac
  whole=$2
  while [ "${#whole}" -gt 1 ] && [ "${whole#0}" != "$whole" ]; do whole=${whole#0}; done
  [ "${#whole}" -lt 7 ] || wrong "$1 takes a whole number below a million, not '$2'."
}

while [ $# -gt 0 ]; do
  case $1 in
    --seconds | --run-seconds | --only | --device | --reserve | --to | --part-size | --max-size | --max-files) [ $# -gt 1 ] || wrong "$1 needs a value: ./run.sh --help" ;;
  esac
  case $1 in
    --seconds) number "$1" "$2"; seconds=$whole; shift ;;
    --run-seconds) number "$1" "$2"; run_seconds=$whole; shift ;;
    --only) only=,$(printf '%s' "$2" | tr ' ' ','),; shift ;;
    --device) number "$1" "$2"; device=$whole; shift ;;
    --reserve) number "$1" "$2"; reserve_mib=$whole; shift ;;
    --to) to=$2; shift ;;
    --part-size) number "$1" "$2"; part_mib=$whole; shift ;;
    --max-size) number "$1" "$2"; most_mib=$whole; shift ;;
    --max-files) number "$1" "$2"; most_files=$whole; shift ;;
    --with-oversubscription) oversubscribe=yes ;;
    --list) cut -f 1,2,5 "$here/cases.tsv"; exit 0 ;;
    -h | --help) usage; exit 0 ;;
    *) wrong "there is no option '$1': ./run.sh --help" ;;
  esac
  shift
done
[ "$part_mib" -gt 0 ] || wrong "--part-size is 1 or more."
[ "$most_mib" -gt 0 ] || wrong "--max-size is 1 or more."
[ "$most_files" -gt 0 ] || wrong "--max-files is 1 or more."
[ $((part_mib * most_files)) -ge "$most_mib" ] || most_mib=$((part_mib * most_files))
[ "$run_seconds" -gt 0 ] || wrong "--run-seconds is 1 or more."
smi_device=$device
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # programs count among these, and nvidia-smi does not
  smi_device=$(printf ',%s\n' "$CUDA_VISIBLE_DEVICES" | cut -d , -f $((device + 2)) | tr -d ' ')
  [ -n "$smi_device" ] || wrong "--device $device: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES shows no such GPU."
fi
tab=$(printf '\t')
wanted() { case ,$only in ,) ;; *",$1,"*) ;; *) return 1 ;; esac; } # every case, or those of --only
if [ -n "$only" ]; then
  set -f # a star in it is no file
  for name in $(printf '%s' "$only" | tr ',' ' '); do
    cut -f 1 "$here/cases.tsv" | grep -qxF -e "$name" || wrong "--only: there is no case '$name': ./run.sh --list"
  done
  set +f
fi
n_cases=0
while IFS=$tab read -r name program footprint oversubscribes flags; do
  if wanted "$name" && { [ "$oversubscribes" = no ] || [ "$oversubscribe" = yes ]; }; then n_cases=$((n_cases + 1)); fi
done <"$here/cases.tsv"
if [ $n_cases -eq 0 ]; then
  case $only in
    *[!,]*) wrong "--only names cases that oversubscribe, which are run with --with-oversubscription." ;;
    *) wrong "--only names no case: ./run.sh --list" ;;
  esac
fi
# nsys preloads its libraries by path, and the loader takes a blank or a colon for the end of one.
case $here in *[[:space:]:]*) wrong "a path with blanks or colons does not work with nsys: move this folder." ;; esac
[ -n "$to" ] || to=$here
mkdir -p "$to" 2>/dev/null || wrong "--to: '$to' cannot be made."
to=$(cd "$to" && pwd -P) || wrong "--to: '$to' cannot be entered."
[ -w "$to" ] || wrong "'$to' cannot be written to: name another folder with --to FOLDER."
base=$here
[ -w "$here" ] || base=$to
case $base in *[[:space:]:]*) wrong "--to: a path with blanks or colons does not work with nsys: give another." ;; esac
results=$base/results
[ ! -e "$results" ] || wrong "'$results' is there already: move it away."
for left in "$to"/results.tar*; do
  [ ! -e "$left" ] || wrong "'$left' is there already: move it away, or give another place with --to."
done
mkdir -p "$results/work" || wrong "'$base' cannot be written to: name another folder with --to FOLDER."
cd "$here" || exit 1 # flags name the tapes from here
[ $((seconds - PACKING_SECONDS)) -ge $LEAST_SECONDS ] ||
  say "--seconds $seconds: $PACKING_SECONDS of them are kept for packing, so that few cases have time, or none"
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
timeout -k 5 20 "$nsys" --version >/dev/null 2>&1 || libraries=${libraries:+$libraries:}$here/nsys-target/lib

# Whoever asks a driver may wait for ever.
limit() { timeout -k 5 "$@" 3<&- 4>&- 5>&-; }
ask_smi() { limit 20 nvidia-smi "$@" 2>/dev/null; }
ask_gpu() { # nothing, and false, where nvidia-smi does not end well, or as if there were a GPU; 14 is a damaged infoROM
  answer=$(ask_smi -i "$smi_device" "--query-gpu=$1" --format=csv,noheader,nounits)
  case $?:$answer in *:No\ devices*) return 1 ;; 0:* | 14:*) printf '%s\n' "$answer" | head -n 1 ;; *) return 1 ;; esac
}
one_line() { tr '\000-\037\177' ' '; } # of what is put into a table
fact() { [ -z "$2" ] || printf '%s\t%s\n' "$1" "$(printf '%s' "$2" | one_line)"; }
has_driver() { [ -r /proc/driver/nvidia/version ] || ask_smi -L >/dev/null; }

machine() {
  fact nsys "$(limit 20 env LD_LIBRARY_PATH="$libraries" "$nsys" --version 2>/dev/null | sed -n 's/.*version \([0-9.]*\).*/\1/p' | head -n 1)"
  fact kernel "$(uname -r)"
  fact architecture "$(uname -m)"
  fact cpu "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)"
  fact host_available_mib "$(host_mib)"
  fact started_utc "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  fact driver "$(cat /sys/module/nvidia/version 2>/dev/null || ask_gpu driver_version)"
  fact cuda "$(ask_smi | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1)"
  for key in name compute_cap memory.total memory.free mig.mode.current; do
    value=$(ask_gpu "$key")
    case $value in *[Ii]nvalid* | *[Nn]ot\ *) ;; *) fact "gpu.$key" "$value" ;; esac
  done
  for file in /sys/module/nvidia_uvm/parameters/*; do
    [ -r "$file" ] && fact "uvm.${file##*/}" "$(cat "$file" 2>/dev/null)"
  done
  fact nvcc "$(limit 20 nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
}

host_mib() { sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo 2>/dev/null | awk '{ print int($1 / 1024) }'; }
free_mib() { ask_gpu memory.free | grep -x '[0-9][0-9]*'; }

# The programs: as they came, or built here where these cannot run.

bin=$here/bin
runs() { limit 20 "$bin/uvm_bench" --help >/dev/null 2>&1; }
# A driver that is older than the CUDA of the programs refuses them with the status of no driver, as one without a GPU does.
refused() {
  limit 60 "$bin/uvm_bench" --pattern signature --bytes 2MiB --iterations 1 --device "$device" 2>&1 >/dev/null |
    grep -q 'driver is made for CUDA'
}
build() {
  bin=$results/work/bin && mkdir -p "$bin"
  for program in uvm_bench dl_bench; do
    say "building $program here"
    (cd "$here/cuda" && limit "$(at_least_one "$(left)")" nvcc -std=c++17 -O3 -lineinfo -arch=native -o "$bin/$program" "$program.cu") \
      >>"$results/build.log" 2>&1 || return 1
  done
}
choose_programs() {
  built=no
  why_not=$(command -v nvcc >/dev/null || printf ', and there is no nvcc to build them')
  if [ ! -e "$bin/uvm_bench" ]; then
    say "only the sources of the programs came along$why_not"
  elif ! runs; then
    say "the programs that came along do not run on this system$why_not"
  elif has_driver && refused; then
    say "the driver refuses the programs that came along, as it is older than the CUDA that they were built with$why_not"
  else
    return
  fi
  if command -v nvcc >/dev/null && [ -d "$here/cuda" ]; then
    if build; then built=yes; else bin=$here/bin; say "nvcc could not build them: results/build.log"; fi
  fi
}

# One case.

left() { echo $((seconds - PACKING_SECONDS - ($(date +%s) - started))); }
at_least_one() { [ "$1" -gt 0 ] && echo "$1" || echo 1; } # 0 would be no limit
most() { # the time limit of one run, or what is left
  most_left=$(at_least_one "$(left)")
  [ "$most_left" -lt "$run_seconds" ] && echo "$most_left" || echo "$run_seconds"
}
status_name() { # of the last run; what killed it may have been its limit, or somebody else
  case $1 in
    0) echo ok ;; 2) echo usage ;; 5) echo no_driver ;; 6) echo skipped ;; 7) echo refused ;; 124) echo timed_out ;;
    126 | 127) echo cannot_run ;; 137 | 143) [ "${ran%.*}" -ge "$may_run" ] && echo timed_out || echo failed ;; *) echo failed ;;
  esac
}
how() { [ "$1" -gt 128 ] && echo "was killed (signal $(($1 - 128)))" || echo "ended with status $1"; }
passed() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.3f", b - a }'; }
last_words() { # the last line that says something; a progress bar writes its states over each other
  tr '\r' '\n' <"$1" 2>/dev/null | tr '\000-\011\013-\037\177' ' ' | grep -v '^ *$' | tail -n 1 | cut -c 1-400
}

mark() { # case status alone recorded seconds_alone seconds_nsys stream_bytes reason
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$@" >>"$results/status.tsv"
  say "  $2${8:+: $8}"
}

lacks_memory() { # the reason, if there is too little for a footprint in MiB
  there=$(free_mib) || there=''
  if [ -n "$there" ] && [ "$there" -lt $(($1 + reserve_mib)) ]; then
    echo "GPU $device has $there MiB free, and this takes $1 and leaves $reserve_mib: end what uses it, or --reserve MIB"
    return
  fi
  there=$(host_mib)
  if [ -n "$there" ] && [ "$there" -lt $((2 * $1 + reserve_mib)) ]; then
    echo "this machine has $there MiB of memory available, and this takes up to $((2 * $1)) and leaves $reserve_mib: --reserve MIB"
  fi
}

limited() { # command...: its status; a signal to this script reaches it
  may_run=$(most) ran_from=$(date +%s.%N)
  timeout -k 20 "$may_run" "$@" 3<&- 4>&- 5>&- &
  child=$!
  wait $child 2>/dev/null # a shell says there what has killed it, after the last words of the program
  limited_code=$?
  child='' ran=$(passed "$ran_from")
  return $limited_code
}

# nsys gives its program a session of its own, so that one which does not end when it is told to lives on. What a run
# starts has a word in its environment to be found by. To read that of one that hangs in the driver may hang, too.
our_word=NSAN_DEVICE_CHECK=$$.$started.end
ours() { # PIDs of what this run has left; false if the search does not end
  found=$(limit 10 grep -lszxF --line-buffered "$our_word" /proc/[0-9]*/environ)
  searched=$?
  for pid in $(printf '%s\n' "$found" | cut -d / -f 3); do
    case $(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null) in '' | Z) ;; *) echo "$pid" ;; esac
  done
  [ $searched -lt 124 ]
}
end_all() { # false if something cannot be ended, or not be looked at: then the driver hangs
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    rest=$(ours) && looked=0 || looked=1
    [ -n "$rest" ] || return $looked
    for pid in $rest; do # its number may be that of another by now
      limit 10 grep -qszxF "$our_word" "/proc/$pid/environ" && kill -KILL "$pid" 2>/dev/null
    done
    [ $looked -eq 0 ] && sleep 1 || return 1
  done
  return 1
}

alone() { # program flags...: its status
  program=$1
  shift
  limited env "$our_word" "$bin/$program" "$@" --out "$results/$name.alone" >"$results/work/stdout" 2>"$results/work/stderr"
  code=$?
  { echo "# alone: $program $*"; cat "$results/work/stdout" "$results/work/stderr"; } >>"$results/$name.log"
  return $code
}

under_nsys() { # program flags...: the status of the program, which nsys passes on
  program=$1
  shift
  # shellcheck disable=SC2046 -- the switches are words; a % in --output begins what nsys puts in
  limited env "$our_word" LD_LIBRARY_PATH="$libraries" "$nsys" profile $(cat "$here/switches") \
    --output "$(printf '%s' "$results/$name" | sed 's/%/%%/g')" "$bin/$program" "$@" --out "$results/$name.truth" >"$results/work/nsys" 2>&1
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
  end_all || stuck=$name
  seconds_alone=$(passed "$began") reason=$(last_words "$results/work/stderr")
  status=$(status_name $code_alone)
  [ "$status" != failed ] || [ $code_alone -le 128 ] || reason="it $(how $code_alone)${reason:+: $reason}"
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
  end_all || stuck=$name
  if [ ! -s "$results/$name.qdstrm" ]; then
    status=no_stream reason="nsys made no stream: $(last_words "$results/work/nsys")"
  elif [ "$status" = ok ] && [ $code -ne 0 ]; then
    status=$(status_name $code)
    reason="it ended well alone, and $(how $code) under nsys: $name.log"
    [ "$status" != timed_out ] || reason="it ended well alone, and not in time under nsys: --run-seconds N"
  fi
  [ "$status" = ok ] && reason=''
  bytes=$(wc -c <"$results/$name.qdstrm" 2>/dev/null | tr -d ' ')
  mark "$name" "$status" $code_alone $code "$seconds_alone" "$seconds_nsys" "$bytes" "$reason"
}

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
    if [ -n "$stuck" ]; then
      mark "$name" not_run '' '' '' '' '' "a program of $stuck cannot be ended, or not even looked at: the driver hangs"
      continue
    fi
    under_way=$name
    # shellcheck disable=SC2086 -- flags are words
    run_case "$program" "$footprint" $flags
    under_way=''
  done 3<"$here/cases.tsv"
}

# What comes home.

works() { echo 1 | "$@" 2>/dev/null | "$@" -d >/dev/null 2>&1; }
# shellcheck disable=SC2086 -- $xz is words
with_xz() { # seconds: with that of this machine, or the one that came along; -6 where there is not the memory for -9,
  # and -1, which has a third of the time for itself, where there is not the time
  xz=xz within=$(($1 * 2 / 3)) too_slow=no
  works $xz || { xz="env LD_LIBRARY_PATH=$here/tools/lib $here/tools/xz" && works $xz; } || return 1
  for level in 9 6 1; do
    case $level$too_slow in 6yes) continue ;; 1*) within=$(($1 - within)) ;; esac
    timeout -k 5 "$within" $xz -$level results.tar 2>/dev/null
    case $? in 0) return 0 ;; 124 | 137) too_slow=yes ;; esac
    rm -f results.tar.xz
  done
  return 1
}
compress() { # results.tar: with xz, which finds what the streams have in common; else gzip; else as it is
  if with_xz "$1"; then return; fi
  if command -v gzip >/dev/null && gzip -6 results.tar; then return; fi
  rm -f results.tar.gz
}
too_much() { # by how many thousandths the archive is larger than what may leave; nothing if it is not
  wc -c results.tar* | awk -v most=$((most_mib * 1048576)) '$1 > most { print int(1000 * ($1 - most) / $1) + 1 }'
}
leave_out() { # thousandths: the largest streams that together are as much of all of them; false if there are none
  sizes=$(cd "$results" && wc -c *.qdstrm 2>/dev/null | grep -v ' total$' | sort -k 1,1nr -k 2)
  [ -n "$sizes" ] || return 1
  for name in $(printf '%s\n' "$sizes" | awk -v share="$1" '
      { size[NR] = $1; name[NR] = $2; all += $1 }
      END { for (i = 1; i <= NR && (i == 1 || gone * 1000 < all * share); i++) { gone += size[i]; print name[i] } }'); do
    rm -f "$results/$name"
    name=${name%.qdstrm}
    why="its stream was left out, as the archive may have $most_mib MiB: --max-size MIB, --max-files N, or --only $name"
    awk -F '\t' -v OFS='\t' -v name="$name" -v why="$why" '$1 == name { $2 = "left_out"; $8 = why } { print }' \
      "$results/status.tsv" >"$results/status.new" && mv "$results/status.new" "$results/status.tsv"
    say "$name: $why"
  done
}
pack() { # the archive; without the largest streams where it would be too large
  while :; do
    rm -f results.tar*
    tar cf results.tar -C "$base" results || return 1
    spent=$(($(date +%s) - started))
    compress $((seconds - spent > 20 ? seconds - spent : 20))
    excess=$(too_much)
    [ -n "$excess" ] && leave_out "$excess" || return 0
  done
}
bring_together() {
  rm -rf "$results/work"
  cp "$here/cases.tsv" "$here/switches" "$here/pack.json" "$results/"
  cd "$to" || return 1
  pack || return 1
  echo
  awk -F '\t' 'NR == 1 { printf "%-22s %-11s %9s %10s %10s  %s\n", "case", "status", "alone", "with nsys", "stream", "reason"; next }
    { printf("%-22s %-11s %9s %10s %10s  %s\n", $1, $2, ($5 == "" ? "" : sprintf("%.1f s", $5)),
      ($6 == "" ? "" : sprintf("%.1f s", $6)), ($7 == "" ? "" : sprintf("%.1f MiB", $7 / 1048576)), $8) }' "$results/status.tsv"
  echo
  for archive in results.tar*; do
    if [ "$(wc -c <"$archive")" -gt $((part_mib * 1048576)) ]; then
      split -b "${part_mib}m" "$archive" "$archive.part-" && rm -f "$archive"
    fi
  done
  for file in results.tar*; do
    say "bring home: $to/$file ($(wc -c <"$file" | awk '{ printf(($1 < 1048576 ? "%.1f KiB" : "%.1f MiB"), $1 / ($1 < 1048576 ? 1024 : 1048576)) }'))"
  done
}

child='' under_way='' stuck=''
interrupted() {
  trap '' INT TERM HUP
  exec >&5 2>&4 # it may have come while those of a program were caught, in a file that goes
  [ -z "$child" ] || { kill "$child" 2>/dev/null; wait "$child"; } # nsys ends its program, and writes what it has
  end_all
  [ -z "$under_way" ] || mark "$under_way" interrupted '' '' '' '' '' "run.sh was stopped while it ran"
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
bring_together || exit 1
! tail -n +2 "$results/status.tsv" | cut -f 2 | grep -qvx ok
