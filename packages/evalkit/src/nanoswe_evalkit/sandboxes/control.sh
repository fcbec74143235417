# How one command runs in a Daytona sandbox, where the answer to a call may be lost: every call may be made again.
#   sh control.sh born | NAME BORN WHICH SECONDS HALF
# starts NAME.sh unless it was started, waits SECONDS for its end, kills it with 0, kills what it left (WHICH: "all",
# or "own" while a terminal is open), and answers `running`, or its exit code and how many bytes came after the first
# half of its output. NAME "-" only kills. BORN is the start of the sandbox's first process of ours: none that is older
# dies. Nothing forks where it kills, as there may be no room; nothing but `dd`'s memory holds the output before the
# command's end, so that it can't read its own log.
cd "${0%/*}" || exit 1

if [ "$1" = run ]; then # NAME HALF, in a session of its own
  export LC_ALL=C
  name=$2 half=$3
  echo $$ >"$name.runner"
  exec 3<"$name.in" && rm -f "$name.in" # which the command must not read twice
  cat <&3 3<&- | {
    setsid --wait sh "./$name.sh" 3<&-
    echo $? >"$name.code"
  } 3<&- 2>/dev/null | {
    exec 3<&-
    dd bs="$half" count=1 iflag=fullblock >"$name.head" 2>/dev/null
    dd bs=65536 2>"$name.count" | tail -c "$half" >"$name.tail"
  }
  echo done >"$name.done"
  exit
fi

if [ "$1" = born ]; then
  read -r line <"/proc/$$/stat"
  set -- ${line##*) }
  echo "${20}"
  exit
fi

name=$1 born=$2 which=$3 seconds=$4 half=$5 code=

dead() { # is the runner? Then somebody killed all that there is.
  read -r runner 2>/dev/null <"$name.runner" || return 1
  stat=
  read -r stat 2>/dev/null <"/proc/$runner/stat"
  case "$stat" in "" | *") Z "*) ;; *) return 1 ;; esac
  read -r code 2>/dev/null <"$name.code" || code=137
}

kill_some() { # one by one, as long as there are any; fields: 1 state, 2 parent, 4 session, 20 start
  found= main=none runner=none
  read -r runner 2>/dev/null <"$name.runner"
  read -r main 2>/dev/null <"$name.main" && kill -KILL "-$main" 2>/dev/null # mostly that is all
  for path in /proc/[0-9]*/stat; do
    pid=${path#/proc/} pid=${pid%/stat} line=
    read -r line 2>/dev/null <"$path"
    set -- ${line##*) }
    case "${1:-Z}$4" in [ZX]* | [A-Z]"$runner") continue ;; esac
    case "$keep" in *" $pid "*) continue ;; esac
    if [ "$which" = all ]; then
      [ "${20:-$born}" -ge "$born" ] || continue
    else
      [ "$4" = "$main" ] || continue
    fi
    kill -KILL "$pid" 2>/dev/null && found=$pid
  done
  [ "$found" ]
}

if [ "$name" != - ]; then
  if [ ! -d "$name.begun" ] && mkdir "$name.begun" 2>/dev/null; then
    [ "$seconds" != 0 ] || { echo 137 0 && exit; } # it never will
    setsid sh "$0" run "$name" "$half" </dev/null >/dev/null 2>&1 &
  fi
  left=1000
  until read -r runner 2>/dev/null <"$name.runner"; do
    [ $left -gt 0 ] || { echo 137 0 && exit; }
    left=$((left - 1))
    sleep 0.01
  done
  left=$((seconds * 50))
  until read -r code 2>/dev/null <"$name.code" || dead || [ $left -le 0 ]; do
    [ -d "$name.begun" ] || exit 1 # somebody removed it all
    left=$((left - 1))
    sleep 0.02
  done
  [ "$code" ] || [ "$seconds" = 0 ] || { echo running && exit; }
fi

keep=" " up=$$
while [ "$up" -gt 1 ]; do # this shell and those above it stay
  keep="$keep$up "
  read -r line <"/proc/$up/stat" || break
  set -- ${line##*) }
  up=$2
done
left=500
while [ $left -gt 0 ]; do
  if { [ "$which" = all ] || [ "$seconds" = 0 ]; } && kill_some; then
    continue
  fi
  [ "$name" != - ] || { echo 0 0 && exit; }
  [ -e "$name.done" ] || dead && break
  left=$((left - 1))
  sleep 0.01
done
read -r code 2>/dev/null <"$name.code" || code=137
bytes=0
while read -r number word _; do
  case "$word" in byte*) bytes=$number ;; esac
done 2>/dev/null <"$name.count"
echo "$code $bytes"
