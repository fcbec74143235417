# Recipes of the repository. `./just` at the root works on a bare machine; an installed `just` works too.

set positional-arguments # "$@" below: an argument is never read by a shell again

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

[private]
default:
    @just --list --unsorted

# Install the four packages into .venv (other recipes call it themselves); `setup openhands`, `mini`, `vllm`: a Python of their own for these; `setup hub`: datasets by name
[group('start here')]
setup *what:
    @tools/setup "$@"

# The whole loop on a CPU: tasks, SFT, evaluation, RL, evaluation, report
[group('start here')]
demo *overrides: setup
    @test -d tasks/nano || nanoswe-harbor convert nano --out tasks/nano
    @nanoswe-trainer run demo --allowlist-fallback "$@"

# What this machine can do, and how to get what is missing
[group('start here')]
doctor:
    @python tools/doctor.py

# Dataset to Harbor tasks: nano, verified, swegym, a .parquet or .jsonl file
[group('tasks')]
tasks source="nano" out="": setup
    @case "$1" in verified|lite|swegym) tools/setup hub ;; esac
    @nanoswe-harbor convert "$1" --out {{ quote(if out == "" { "tasks/" + file_stem(source) } else { out }) }}

# Gold patch scores 1, nothing scores 0, for every task; names the liars
[group('tasks')]
verify dir *options: setup
    @shift; for file in {{ quote(dir) }}/dataset.toml {{ quote(dir) }}/*/dataset.toml; do \
        test ! -f "$file" || nanoswe-evalkit verify "$(dirname "$file")" "$@" || exit $?; done

# The environment images of nano, verified, swegym or a source of rows; --print shows the graph, --check asks the registry
[group('tasks')]
images source *options: setup
    @nanoswe-harbor images "$@"

# avg@k and pass@k by recipes/eval/NAME.yaml; run it again to resume; --in-images: proxy and evalkit as containers
[group('run')]
eval name *overrides: setup
    @case " $* " in *" --in-images "*) exec tools/in-images "$@" ;; *) exec nanoswe-evalkit run "$@" ;; esac

# SFT and its evaluation by recipes/sft/NAME.yaml
[group('run')]
sft name *overrides: setup
    @nanoswe-trainer sft "$@"

# RL by recipes/train/NAME.yaml; run it again to resume
[group('run')]
train name *overrides: setup
    @nanoswe-trainer run "$@"

# Serve the proxy: chat in, tokens out
[group('run')]
serve *options: setup
    @nanoswe-proxy serve "$@"

# The paired difference of two runs over the same tasks, with its interval and the tasks that differ
[group('run')]
compare a b: setup
    @nanoswe-evalkit compare "$@"

# Write report.html of a run folder
[group('run')]
report run: setup
    @nanoswe-evalkit report "$@"

# The fast checks: lint, types, tests
[group('develop')]
test:
    @nox --session lint types tests repo

# All that CI runs: test, interop, wheels, a small demo
[group('develop')]
ci:
    @.ci/run

# What CI does not run or runs in part: all forgeries, all agents, templates, the trainer killed, on Ray and through vLLM
[group('develop')]
interop:
    @nox --session "interop(evalkit)" "interop(trainer)" agents clients openhands templates ray vllm

# Full counts and benchmarks, by hand
[group('develop')]
soak:
    @nox --session soak

# Rewrite the code in house style
[group('develop')]
fmt:
    @nox --session fmt

# Check style
[group('develop')]
lint:
    @nox --session lint

# Check types
[group('develop')]
types:
    @nox --session types

# Generate docs/recipes.md from the recipe classes
[group('develop')]
docs:
    @python tools/docs.py

# The image of one converted task, with its checkout from a folder of bare repositories
[group('tasks')]
task-image task mirror: setup
    @tools/task-image "$@"

# Build the wheel of a package (harbor, proxy, evalkit, trainer)
[group('release')]
build package:
    @python -m pip wheel --quiet --no-deps --wheel-dir dist "packages/$1" && ls "dist/nanoswe_$1"-*.whl

# Set a package's version and open its CHANGELOG entry
[group('release')]
bump package version:
    @python tools/bump.py "$@"
