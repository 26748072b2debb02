#!/usr/bin/env bash
# Collects the wheels that a machine with JAX, torch and transformers on Python
# 3.12 still lacks, for a machine without a network:
#
#   benchmarks/gpu/wheels.sh FOLDER
#
# There: python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
# and PYTHONPATH=SITE. About 5 MB. pydantic takes exactly the pydantic-core named
# beside it; flax before 0.12.10 does not run with JAX 0.11.2.
set -euo pipefail
folder=${1:?the folder for the wheels}
platforms=()
for tag in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" --dest "$folder" \
  annotated-types cloudpickle farama-notifications flax==0.12.12 gymnasium \
  orjson pydantic==2.14.4 pydantic-core==2.50.5 tenacity tensorboardX \
  typing-inspection
du -sh "$folder"
