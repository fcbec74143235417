# Static image targets. `just images SOURCE` adds one `env-…` target for each environment of a source of rows.

variable "REGISTRY" { default = "nanoswe" }

variable "TAG" { default = "dev" }

# Where CPythons come from: a folder of prefixes (3.9, 3.9.18, …), or the target that fetches them.
variable "PYTHONS" { default = "target:pythons" }

# The time of layers and images that are to be the same whenever they are built.
variable "EPOCH" { default = "315532800" }

group "default" {
  targets = ["base", "agent", "proxy", "evalkit", "trainer-cpu"]
}

# What every image starts from: Debian with git, what a CPython links to, and an unprivileged user.
target "base" {
  context = "docker/base"
  args    = { SOURCE_DATE_EPOCH = EPOCH }
  tags    = ["${REGISTRY}/base:${TAG}"]
}

# CPythons of the interpreters' public builds, for machines that reach them.
target "pythons" {
  context  = "docker/pythons"
  contexts = { base = "target:base" }
}

# One CPython on the base, the same layer below everything that needs it.
target "python" {
  name     = "python-${replace(minor, ".", "_")}"
  matrix   = { minor = ["3.5", "3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12"] }
  context  = "docker/python"
  contexts = { base = "target:base", pythons = PYTHONS }
  args     = { PYTHON = minor, SOURCE_DATE_EPOCH = EPOCH }
}

# What the generated targets inherit.
target "env" {
  context  = "docker/env"
  contexts = { base = "target:base", python = "target:python-3_11" }
  args     = { SOURCE_DATE_EPOCH = EPOCH }
}

# What plays the network for tests that expect one (psf/requests).
target "fixture" {
  context = "docker/fixture"
  tags    = ["${REGISTRY}/fixture:${TAG}"]
}

# The OpenHands runner: its own Python and pins; nothing of ours.
target "agent" {
  context  = "docker/agent"
  contexts = { python = "target:python-3_12" }
  tags     = ["${REGISTRY}/agent:${TAG}"]
}

# Our own commands, from the wheels that `just build` leaves in dist/.
target "service" {
  name     = package
  matrix   = { package = ["proxy", "evalkit"] }
  context  = "docker/service"
  contexts = { python = "target:python-3_11", dist = "dist" }
  args = {
    PACKAGE  = package
    SIBLINGS = package == "evalkit" ? "harbor" : ""
    EXTRA    = package == "evalkit" ? "[bwrap]" : ""
  }
  tags     = ["${REGISTRY}/${package}:${TAG}"]
}

target "trainer-cpu" {
  context  = "docker/trainer"
  target   = "cpu"
  contexts = { python = "target:python-3_11", dist = "dist", service = "docker/service" }
  args     = { TORCH = "2.13.0" }
  tags     = ["${REGISTRY}/trainer:${TAG}-cpu"]
}

# Needs the vendor's CUDA image, so a registry; CI prints and lints it.
target "trainer-cuda" {
  inherits = ["trainer-cpu"]
  target   = "cuda"
  args     = { CUDA = "nvidia/cuda:12.8.1-runtime-ubuntu24.04" }
  tags     = ["${REGISTRY}/trainer:${TAG}-cuda"]
}
