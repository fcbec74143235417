#!/usr/bin/env bash
# env_image.sh PYTHON_PREFIX IMAGE PINS: an environment image for running an instance by hand: a CPython and what PINS
# names, a lock of shared/data/specs/verified_env_locks.json.gz (.yml) or pip requirements (any other file; the base commit's
# own files in one). The repository is not in it; evalkit brings the checkout.
set -euo pipefail
prefix=$(realpath "$1") image=$2 pins=$3
skip='python|pip|ca-certificates|openssl|ncurses|readline|sqlite|tk|tzdata|xz|zlib|libffi|ld_impl_linux-64|bzip2|expat|libuuid'
deps="" text=$(grep -v "^-r " "$pins")  # `-r other.txt`: its lines are in PINS too
if [ "${pins##*.}" = yml ]; then
  deps=--no-deps
  text=$(sed -nE "s/^ +- ([A-Za-z0-9_.-]+)==?([^=]+)(=.*)?$/\1==\2/p" "$pins" | grep -vE "^(_lib|_openmp|lib|$skip)" || true)
fi
docker build -q -t "$image" -f - "$prefix" << END
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends git ca-certificates libssl3 libffi8 zlib1g \
 libbz2-1.0 liblzma5 libsqlite3-0 libreadline8 > /dev/null
COPY . $prefix
RUN echo $(base64 -w0 <<< "$text") | base64 -d > /pins.txt && echo 'cython<3' > /constraint.txt \
 && $prefix/bin/python3 -m venv /opt/testbed && PIP_CONSTRAINT=/constraint.txt /opt/testbed/bin/pip install -q $deps -r /pins.txt
RUN printf "/testbed/src\\n/testbed\\n" > "\$(/opt/testbed/bin/python -c "import site; print(site.getsitepackages()[0])")/testbed.pth"
RUN mkdir -p /opt/miniconda3/bin && echo 'export PATH=/opt/testbed/bin:\$PATH' > /opt/miniconda3/bin/activate
ENV PATH=/opt/testbed/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
STOPSIGNAL SIGKILL
WORKDIR /testbed
END
