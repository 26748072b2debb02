"""Checkpoints and devices: each reads its part, and memory holds no more.

Devices are forced CPU devices of a subprocess: their number is decided when
JAX starts, and a process's peak of memory cannot be forgotten.
"""

import dataclasses
import json
import shutil
import struct
import sys
import tracemalloc

import forced_devices
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

from tests.policy import test_hf_checkpoint as checkpoints


def write_random(directory, config, dtype):
  """A checkpoint of random tensors, one at a time in memory."""
  directory.mkdir()
  (directory / "config.json").write_text(json.dumps(qwen_config.to_hf(config)))
  rng = np.random.default_rng(0)
  model = hf_checkpoint.abstract_model(config)
  header, end = {}, 0
  where = {k: t.shape for t in hf_checkpoint.tensors_of(model) for k in t.keys}
  size = np.dtype(dtype).itemsize
  for key, shape in where.items():
    start, end = end, end + int(np.prod(shape)) * size
    header[key] = {
      "dtype": {2: "BF16", 4: "F32"}[size],
      "shape": list(shape),
      "data_offsets": [start, end],
    }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with open(directory / hf_checkpoint.SINGLE, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for shape in where.values():
      values = rng.random(shape, dtype=np.float32).astype(dtype)
      file.write(values.view(np.uint8).data)
  return end


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_reading_a_slice_allocates_no_more_than_the_slice(tmp_path, dtype):
  value = np.arange(1 << 20).astype(dtype).reshape(1024, 1024)
  safetensors_numpy.save_file({"a": value}, tmp_path / hf_checkpoint.SINGLE)
  files = tensor_files.Reader(tmp_path)
  for index in (np.s_[:8], np.s_[:, 1000:1008], np.s_[5:9, 7:8]):
    index = index if isinstance(index, tuple) else (index, slice(None))
    tracemalloc.start()
    part = files.read("a", index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoints.same(part, value[index])
    assert peak < part.nbytes + 10_000


MESH_SCRIPT = """
import pathlib
import sys
import jax
import numpy as np
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy import sharding

def parameters(model):
  return {t.path: t.variable[...] for t in hf_checkpoint.tensors_of(model)}

assert len(jax.devices()) == 8
out, *directories = map(pathlib.Path, sys.argv[1:])
for directory in directories:
  want = {k: np.asarray(v)
          for k, v in parameters(hf_checkpoint.load_model(directory)).items()}
  for sizes in (dict(data=1, fsdp=8), dict(data=2, fsdp=2, tensor=2)):
    mesh = sharding.make_mesh(**sizes)
    model = hf_checkpoint.load_model(directory, mesh)
    split = 0
    for tensor in hf_checkpoint.tensors_of(model):
      array = tensor.variable[...]
      place = sharding.parameter_sharding(tensor.variable, mesh)
      assert array.sharding == place
      split += not array.is_fully_replicated
      for shard in array.addressable_shards:
        np.testing.assert_array_equal(
            shard.data, want[tensor.path][shard.index])
    assert split > 20
    # Saving compiles for each shape and place: not all pairs are tried.
    moe = directory.name.endswith("moe")
    for scan in (False, True) if moe and len(sizes) == 3 else (moe,):
      if scan:
        model = hf_checkpoint.load_model(directory, mesh, scan_layers=True)
      hf_checkpoint.save_model(out, model, max_file_bytes=50_000)
      files = sorted(p.name for p in directory.iterdir())
      assert files == sorted(p.name for p in out.iterdir())
      for file in files:
        assert (out / file).read_bytes() == (directory / file).read_bytes()
      # The arrays keep nothing of what was read for saving.
      assert all(a._npy_value is None for a in parameters(model).values()
                 if not a.is_fully_replicated)
print("equal")
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_eight_devices_load_and_save_what_one_does(tmp_path):
  directories = []
  for family in checkpoints.FAMILIES:
    directory = tmp_path / family
    directories.append(directory)
    hf_checkpoint.save_model(
      directory,
      checkpoints.policy(checkpoints.tiny(family)),
      max_file_bytes=50_000,
    )
  output = forced_devices.run("-c", MESH_SCRIPT, tmp_path / "out", *directories)
  assert "equal" in output


MEMORY_SCRIPT = """
import json
import sys
import jax
import numpy as np
import safetensors
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy import sharding

def memory(name):
  for line in open("/proc/self/status"):
    if line.startswith(name):
      return int(line.split()[1]) << 10

small, large, sizes, dtype, out = sys.argv[1:]
mesh = sharding.make_mesh(**json.loads(sizes))
# Libraries, threads and compilers are not the weights' memory.
hf_checkpoint.save_model(
    out, hf_checkpoint.load_model(small, mesh, param_dtype=dtype))
before = memory("VmRSS")
model = hf_checkpoint.load_model(large, mesh, param_dtype=dtype)
# Pages of the mapped file count: this is the process as the kernel sees it.
growth = memory("VmHWM") - before
before = memory("VmRSS")
hf_checkpoint.save_model(out, model)
saving = memory("VmHWM") - before

tensors = hf_checkpoint.tensors_of(model)
arrays = [t.variable[...] for t in tensors]
on_device = {d: 0 for d in mesh.devices.flat}
for array in arrays:
  for shard in array.addressable_shards:
    on_device[shard.device] += shard.data.nbytes
share = sum(a.nbytes for a in arrays) / (
    mesh.shape["fsdp"] * mesh.shape["tensor"])
with safetensors.safe_open(large + "/model.safetensors", "numpy") as file:
  mapped = memory("RssFile")
  file.get_slice("model.language_model.embed_tokens.weight")[:8]
  touched = memory("RssFile") - mapped
  for tensor, array in zip(tensors, arrays):
    want = file.get_tensor(tensor.keys[0])
    want = want.swapaxes(-1, -2) if tensor.transposed else want
    for shard in array.addressable_shards:
      np.testing.assert_array_equal(
          np.asarray(shard.data), want[shard.index].astype(array.dtype))
print(json.dumps(dict(
    growth=growth, saving=saving, devices=sum(on_device.values()), share=share,
    fullest=max(on_device.values()), touched=touched,
    largest=max(a.nbytes for a in arrays))))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  """A random checkpoint of 200 MiB, and a small one like it."""
  directory = tmp_path_factory.mktemp("large")
  small = checkpoints.tiny("qwen3_vl")
  config = dataclasses.replace(
    small,
    vision=dataclasses.replace(small.vision, out_hidden_size=512),
    text=dataclasses.replace(
      small.text,
      vocab_size=16384,
      hidden_size=512,
      intermediate_size=2048,
      num_hidden_layers=9,
      num_attention_heads=32,
      num_key_value_heads=8,
    ),
  )
  size = write_random(directory / "large", config, np.float32)
  assert 190 << 20 < size < 250 << 20
  write_random(directory / "small", small, np.float32)
  yield directory
  shutil.rmtree(directory)


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  "sizes,dtype",
  [
    ({"fsdp": 8, "data": 1}, "float32"),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "bfloat16"),
  ],
  ids=["fsdp", "mixed"],
)
@pytest.mark.slow
def test_a_sharded_load_takes_the_memory_of_the_shards(large, sizes, dtype):
  """Forced CPU devices hold their shards in this process's memory: all of
  them, and a replica for each device, are part of the bound."""
  report = forced_devices.report(
    "-c",
    MEMORY_SCRIPT,
    large / "small",
    large / "large",
    json.dumps(sizes),
    dtype,
    large / "out",
  )
  assert report["fullest"] <= 1.1 * report["share"], report
  assert report["growth"] <= 1.1 * report["devices"] + report["largest"], report
  # 16 KiB of a tensor of 32 MiB; the kernel maps a few pages around them.
  assert report["touched"] < 1 << 20, report
  # A stored tensor: on its devices, and in one piece.
  copies = 1 + sizes["data"]
  most = 0.3 * report["devices"] + copies * report["largest"]
  assert report["saving"] <= most, report
