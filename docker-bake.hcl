# Static image targets. `just images` prints them; `docker buildx bake base` builds one.

variable "REGISTRY" { default = "nanoswe" }

variable "TAG" { default = "dev" }

group "default" {
  targets = ["base"]
}

# What every image starts from: Debian with git, and an unprivileged user.
target "base" {
  context = "docker/base"
  tags    = ["${REGISTRY}/base:${TAG}"]
}

# What plays the network for tests that expect one (psf/requests).
target "fixture" {
  context = "docker/fixture"
  tags    = ["${REGISTRY}/fixture:${TAG}"]
}
