"""`just bump PACKAGE VERSION`: a new version in pyproject.toml, `__version__` and CHANGELOG.md.

In: a package (harbor, proxy, evalkit, trainer) and X.Y.Z. Out: the files, edited. Refuses an
unknown package, a version that is not newer, and a changelog without headings.
"""

import re
import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"


def bump(package: str, version: str) -> str:
    """The old version. ValueError, one line, when it cannot be done; then nothing is written."""
    folder = PACKAGES / package
    project, changelog = folder / "pyproject.toml", folder / "CHANGELOG.md"
    init = folder / f"src/nanoswe_{package}/__init__.py"
    if not project.is_file():
        known = ", ".join(sorted(path.name for path in PACKAGES.iterdir()))
        raise ValueError(f"no package {package!r}; there are {known}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"version {version!r}: want X.Y.Z")
    text, history = project.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")
    old = tomllib.loads(text)["project"]["version"]
    if [*map(int, version.split("."))] <= [*map(int, old.split("."))]:
        raise ValueError(f"version {version} is not newer than {old}")
    head, heading, rest = history.partition("\n## ")
    if not heading:
        raise ValueError(f"{changelog}: has no heading `## {old}` to put the new one above")
    project.write_text(text.replace(f'version = "{old}"', f'version = "{version}"', 1))
    changelog.write_text(f"{head}\n## {version}\n\n- \n\n## {rest}", encoding="utf-8")
    source = init.read_text(encoding="utf-8")
    init.write_text(source.replace(f'__version__ = "{old}"', f'__version__ = "{version}"'))
    return str(old)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("bump: want two arguments: just bump PACKAGE VERSION")
    try:
        before = bump(*sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"bump: {error}")
    name, after = sys.argv[1:]
    print(f"{name} {before} → {after}. Fill in packages/{name}/CHANGELOG.md, commit, then tag:")
    print(f"  git tag {name}-v{after}")
