# Recipes of the repository. `./just` at the root works on a bare machine; an installed `just` works too.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

[private]
default:
    @just --list --unsorted

# Install the four packages into .venv (other recipes call it themselves); `setup openhands`, `mini`, `vllm`: a Python of their own for these; `setup hub`: datasets by name
[group('start here')]
setup *what:
    @tools/setup {{ what }}

# The whole loop on a CPU: tasks, SFT, evaluation, RL, evaluation, report
[group('start here')]
demo *overrides: setup
    @test -d tasks/nano || nanoswe-harbor convert nano --out tasks/nano
    @nanoswe-trainer run demo --allowlist-fallback {{ overrides }}

# What this machine can do, and how to get what is missing
[group('start here')]
doctor:
    @python tools/doctor.py

# Dataset to Harbor tasks: nano, verified, swegym, a .parquet or .jsonl file
[group('tasks')]
tasks source="nano" out="": setup
    @case {{ quote(source) }} in verified|lite|swegym) tools/setup hub ;; esac
    @nanoswe-harbor convert {{ quote(source) }} --out {{ if out == "" { "tasks/" + file_stem(source) } else { out } }}

# Gold patch scores 1, nothing scores 0, for every task; names the liars
[group('tasks')]
verify dir *options: setup
    @for d in $(dirname {{ dir }}/dataset.toml {{ dir }}/*/dataset.toml); do \
        test ! -f $d/dataset.toml || nanoswe-evalkit verify $d {{ options }} || exit $?; done

# The environment images of nano, verified, swegym or a source of rows; --print shows the graph, --check asks the registry
[group('tasks')]
images source *options: setup
    @nanoswe-harbor images {{ quote(source) }} {{ options }}

# avg@k and pass@k by recipes/eval/NAME.yaml; run it again to resume; --in-images: proxy and evalkit as containers
[group('run')]
eval name *overrides: setup
    @{{ if overrides =~ '(^| )--in-images( |$)' { "tools/in-images" } else { "nanoswe-evalkit run" } }} {{ name }} {{ replace(overrides, "--in-images", "") }}

# SFT and its evaluation by recipes/sft/NAME.yaml
[group('run')]
sft name *overrides: setup
    @nanoswe-trainer sft {{ name }} {{ overrides }}

# RL by recipes/train/NAME.yaml; run it again to resume
[group('run')]
train name *overrides: setup
    @nanoswe-trainer run {{ name }} {{ overrides }}

# Serve the proxy: chat in, tokens out
[group('run')]
serve *options: setup
    @nanoswe-proxy serve {{ options }}

# The paired difference of two runs over the same tasks, with its interval and the tasks that differ
[group('run')]
compare a b: setup
    @nanoswe-evalkit compare {{ a }} {{ b }}

# Write report.html of a run folder
[group('run')]
report run: setup
    @nanoswe-evalkit report {{ run }}

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
    @tools/task-image {{ quote(task) }} {{ quote(mirror) }}

# Build the wheel of a package (harbor, proxy, evalkit, trainer)
[group('release')]
build package:
    @python -m pip wheel --quiet --no-deps --wheel-dir dist packages/{{ package }} && ls dist/nanoswe_{{ package }}-*.whl

# Set a package's version and open its CHANGELOG entry
[group('release')]
bump package version:
    @python tools/bump.py {{ package }} {{ version }}
