# The diff against commit $0. The agent may have written .git/config and hooks: what could run or alter a diff is overridden.
exec 2>/dev/null
rm -f .git/index.lock
g() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false \
  -c core.quotePath=false -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null "$@"; }
g add -A && g diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color "$0"
