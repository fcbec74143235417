"""system_sizes.py: KiB of the Debian packages that environments ask for, by apt itself.

In: nanoswe/base:dev, the plans of verified and swegym, a daemon. Out, on stdout: JSON, for each set
of packages all that apt would install for it on the base, with its Installed-Size. It counts
manuals, which images leave out (docker/base/slim.cfg), so it is a little too much: 253 MiB for
build-essential, whose layer has 229.
"""

import json
import subprocess

from nanoswe_harbor.images import plan

SCRIPT = r"""
apt-get update -qq
while read -r names; do
  echo "set $names"
  apt-get install -s --no-install-recommends $names | sed -n 's/^Inst \([^ ]*\) .*/\1/p' > /tmp/all
  apt-cache show --no-all-versions $(cat /tmp/all) | grep -E '^(Package|Installed-Size): '
done
"""


def main() -> None:
    wanted = {t.system for source in ("verified", "swegym") for t in plan(source) if t.system}
    lines = "".join(f"{' '.join(names)}\n" for names in sorted(wanted))
    argv = ["docker", "run", "--rm", "-i", "nanoswe/base:dev", "bash", "-ec", SCRIPT]
    said = subprocess.run(argv, input=lines, capture_output=True, text=True, check=True).stdout
    sizes: dict[str, dict[str, int]] = {}
    for line in said.splitlines():
        key, _, value = line.partition(" ")
        match key:
            case "set":
                packages = sizes.setdefault(value, {})
            case "Package:":
                package = value
            case "Installed-Size:":
                packages[package] = int(value)
    print(json.dumps(sizes, indent=0, sort_keys=True))


if __name__ == "__main__":
    main()
