# The diff of the work tree against the commit $0; stdin: that commit as a pack, if $1 is "pack". Nothing that the agent
# may have written in .git is read but objects: the repository here is a fresh one without configuration, refs or an
# index. Exit code 3: the commit is not there. A folder that is a repository without a commit is left out.
exec 2>/dev/null
objects=$PWD/.git/objects
[ ! -f .git ] || objects=$(sed -n 's/^gitdir: //p' .git)/objects
GIT_DIR=$(mktemp -d "$PWD/.git/nanoswe.XXXXXX" || mktemp -d /tmp/.nanoswe.XXXXXX || mktemp -d /dev/shm/.nanoswe.XXXXXX) || exit 1
trap 'rm -rf "$GIT_DIR"' EXIT
export GIT_DIR GIT_WORK_TREE="$PWD" HOME="$GIT_DIR" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
unset XDG_CONFIG_HOME
mkdir -p "$GIT_DIR/objects/info" "$GIT_DIR/refs" && echo "ref: refs/heads/main" >"$GIT_DIR/HEAD"
[ "${1:-}" != pack ] || git index-pack --stdin >/dev/null || exit 1
git read-tree "$0" || exit 3
git add -A || {
  mkdir "$GIT_DIR/info" && find . -mindepth 2 -name .git -prune | sed 's|^\.\(.*\)/\.git$|\1/|' >"$GIT_DIR/info/exclude"
  git add -A
} || exit 1
git -c core.quotePath=false diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color \
  --src-prefix=a/ --dst-prefix=b/ -U3 --inter-hunk-context=0 "$0" || exit 3
