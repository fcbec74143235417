# The part of conda that evaluation scripts use, as a shell function.
# shellcheck shell=sh
conda() {
  case ${1:-} in
    activate)
      export CONDA_DEFAULT_ENV=testbed CONDA_PREFIX=/opt/miniconda3/envs/testbed
      case :$PATH: in
        :/opt/miniconda3/envs/testbed/bin:*) ;;
        *) export PATH="/opt/miniconda3/envs/testbed/bin:$PATH" ;;
      esac
      ;;
    deactivate) ;;
    *) /opt/miniconda3/bin/conda "$@" ;;
  esac
}
