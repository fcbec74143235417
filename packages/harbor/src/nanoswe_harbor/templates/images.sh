#!/bin/bash
# All that `nanoswe-harbor images` and `image` do with the docker command.
#   images.sh merged BAKE_FILE                              stdin: the generated bake file
#   images.sh build BAKE_FILE GENERATED LOGS KEEP_FREE_GB   stdin: target, its tags, why it cannot be built; by tabs
#   images.sh ls | size | prune [--yes]                     stdin of prune: the images to keep
# Lines of stdout are tab-separated; exit code 2 and one line on stderr where docker does not answer.
set -euo pipefail
shopt -s lastpipe
export BUILDX_BAKE_ENTITLEMENTS_FS=0 # what the command line names may be read: prefixes, certificates

die() { printf '%s\n' "$1" | tail -n 1 >&2; exit 2; }
command -v docker > /dev/null || die "docker: not found; install it, with buildx"
if [ -n "${2:-}" ] && ! [ -f "$2" ] && [ "$1" != prune ]; then
  die "$2: not here; run this in a checkout of the repository"
fi
if [ "$1" = merged ]; then # bake's own print; no daemon is asked
  mapfile -t static < <(sed -n 's/^target "\([a-z-]*\)".*/\1/p' "$2")
  exec docker buildx bake -f "$2" -f - --print envs "${static[@]}"
fi
answer=$(docker info --format '{{.DockerRootDir}}' 2>&1) || die "$answer"
row() { local IFS=$'\t'; printf '%s\n' "$*"; }
bytes() { docker image inspect --format '{{.Size}}' "$@" 2> /dev/null | awk 'NF && !seen++'; } # fails unless all are there
ours() { docker image ls --no-trunc --filter reference='nanoswe/*' --format "$1" | grep -v '<none>' || true; }

# One after the other: a failure stops none, what has all its tags is there, a nearly full disk ends it.
build() {
  local disk=$answer log size free began state name tags why seconds said
  [ -d "$disk" ] || disk=$3
  while IFS=$'\t' read -r name tags why; do
    read -ra tags <<< "$tags"
    if [ -n "$why" ]; then
      row planned 0 0 "$name" "$why"
    elif size=$(bytes "${tags[@]}"); then
      row there 0 "$size" "$name"
    else
      free=$(df --output=avail --block-size=1M "$disk" | tail -n 1)
      if awk "BEGIN { exit !($free < $4 * 1024) }"; then
        die "$name: not begun: $free MiB are free, less than --keep-free-gb $4; make room, then run again"
      fi
      log=$3/$name.log began=$(date +%s.%N) state=built
      docker buildx bake -f "$1" -f "$2" --progress plain "$name" > "$log" 2>&1 < /dev/null || state=failed
      seconds=$(awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $began }") said=()
      if [ $state = failed ]; then # bake repeats the end of what the failed step printed, between two rules
        awk '/^------$/ { n++; next } n == 1 && NF' "$log" | tail -n 6 | cut -c -200 | tr '\t\r' '  ' | mapfile -t said
        [ ${#said[@]} != 0 ] || tail -n 6 "$log" | cut -c -200 | tr '\t\r' '  ' | mapfile -t said
      fi
      row "$state" "$seconds" "$(bytes "${tags[0]}" || echo 0)" "$name" "${said[@]}"
    fi
  done
}

# When an image was named here; all of them claim to be made at one time, that of their files.
ls() {
  local id size name
  ours '{{.ID}}	{{.Size}}	{{.Repository}}:{{.Tag}}' | while IFS=$'\t' read -r id size name; do
    row "$id" "$size" "$(docker image inspect --format '{{.Metadata.LastTagTime.Format "2006-01-02 15:04"}}' "$id")" "$name"
  done | sort -t $'\t' -k4
}

# Each layer once, by what it holds. The history names steps; those that made a layer stand in the order of its list.
size() {
  local image kinds layers
  ours '{{.ID}}' | sort -u | while read -r image; do
    kinds=$(docker history --no-trunc --human=false --format '{{.Size}} {{.CreatedBy}}' "$image" | tac | awk '
      $2 ~ /^(RUN|COPY|ADD|WORKDIR)$/ || NF == 1 {
        kind = "base"
        if (/COPY \/opt\/python /) kind = "python"
        else if (/COPY \/opt\/(miniconda3\/envs|agent|nanoswe)/) kind = "environment"
        else if (/\/opt\/wheels /) kind = "wheels"
        else if (/SYSTEM=[^ ]/) kind = "system"
        else if (/\/testbed/) kind = "checkout"
        else if (/apt-get/) kind = "debian"
        else if (NF > 1 && !/COPY \/ \/ /) kind = "other"
        print $1, kind
      }')
    layers=$(docker image inspect --format '{{range .RootFS.Layers}}{{println .}}{{end}}' "$image" | grep .)
    paste -d ' ' <(printf '%s\n' "$layers") <(printf '%s\n' "$kinds")
  done | awk 'NF == 3 && !seen[$1]++ { sum[$3] += $2; count[$3]++; all += $2; layers++ }
    END { OFS = "\t"; for (kind in sum) print kind, count[kind], sum[kind]; print "all", layers + 0, all + 0 }' | sort -t $'\t' -k3 -n
}

# Images of environments and tasks that no line of stdin names, nor shares an image with.
prune() {
  local keep image tag
  keep=$(cat)
  ours '{{.ID}}	{{.Repository}}:{{.Tag}}' | { grep -E '	nanoswe/(env|task):' || true; } | while IFS=$'\t' read -r image tag; do
    if ! ours '{{.ID}}	{{.Repository}}:{{.Tag}}' | awk -F '\t' -v id="$image" '$1 == id { print $2 }' | grep -qxFf <(printf '%s\n' "$keep"); then
      row "$tag"
      if [ "${1:-}" = --yes ]; then docker image rm "$tag" > /dev/null; fi
    fi
  done
}

"$@"
