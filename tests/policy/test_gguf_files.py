"""GGUF files become policies with the file's numbers and token ids."""

import dataclasses
import io
import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers
import transformers
import trials
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import policy_settings
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import checkpoint_names
from tunix.rl.multi_turn.policy.checkpoints import gguf_files
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

gguf = pytest.importorskip("gguf")

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 4, 2, 32
ARCHITECTURES = {
  "llama": "llama",
  "qwen2": "qwen2",
  "qwen3": "qwen3",
  "gemma3_text": "gemma3",
}
TEXTS = (
  "Add 12 and 3456.",
  " two  spaces\n\nand lines\t.",
  "l'été, it's DON'T 7",
  "日本 — ok?",
  "<|im_start|>user\nhi<|im_end|>",
  "",
  "   ",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokenizer_fields():
  """The metadata of tiny_vl's vocabulary, merges and special tokens."""
  raw = json.loads(
    (policy_files.resolve("tiny_vl") / "tokenizer.json").read_text()
  )
  vocabulary = dict(raw["model"]["vocab"])
  added = {t["content"]: t for t in raw["added_tokens"]}
  vocabulary |= {content: t["id"] for content, t in added.items()}
  tokens = sorted(vocabulary, key=vocabulary.get)
  kinds = [
    1 if token not in added else 3 if added[token]["special"] else 4
    for token in tokens
  ]
  merges = raw["model"]["merges"]
  joined = [m if isinstance(m, str) else " ".join(m) for m in merges]
  return {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": tokens,
    "token_type": kinds,
    "merges": joined,
    "eos_token_id": tokens.index("<|im_end|>"),
    "padding_token_id": tokens.index("<|endoftext|>"),
  }


TOKENIZER = tokenizer_fields()


def config_of(family, **text):
  sizes = {
    "vocab_size": len(TOKENIZER["tokens"]),
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS if family == "qwen2" else HEAD_DIM,
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
  }
  sizes["mrope_section"] = qwen_text_config.plain_rotary(sizes["head_dim"])
  if family == "gemma3_text":
    sizes |= {
      "num_hidden_layers": 6,
      "full_attention_layers": (5,),
      "sliding_window": 8,
      "local_rope_theta": 1e4,
      "query_pre_attn_scalar": float(HEAD_DIM),
    }
  return qwen_text_config.QwenTextConfig(
    family=family,
    text=qwen_config.TextConfig(**(sizes | text)),
    tie_word_embeddings=family != "llama",
  )


def stored(model):
  """Key -> a parameter as a checkpoint has it."""
  values = {}
  for tensor in checkpoint_names.tensors_of(model):
    value = np.asarray(tensor.variable[...])
    values[tensor.keys[0]] = value.T if tensor.transposed else value
  return values


def write(
    path, model, kind="F32", tokenizer=TOKENIZER, architecture=None,
    changed=None, extra=None, raw=None,
):  # fmt: skip
  """Writes a GGUF file as llama.cpp's conversion does.

  Args:
    path: The file.
    model: Ours.
    kind: Of its matrices.
    tokenizer: Metadata below tokenizer.ggml; None = none.
    architecture: In place of the family's own.
    changed: Metadata below the architecture in place of the model's.
    extra: Further tensors.
    raw: (name, bytes, kind) of a tensor that is already quantized.
  """
  config, text = model.config, model.config.text
  own = ARCHITECTURES[config.family]
  name = architecture or own
  writer = gguf.GGUFWriter(path, name)
  values = {
    "block_count": text.num_hidden_layers,
    "context_length": 4096,
    "embedding_length": text.hidden_size,
    "feed_forward_length": text.intermediate_size,
    "attention.head_count": text.num_attention_heads,
    "attention.head_count_kv": text.num_key_value_heads,
    "attention.key_length": text.head_dim,
    "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
    "rope.freq_base": text.rope_theta,
  }
  if own == "gemma3":
    values["attention.sliding_window"] = text.sliding_window
  for key, value in (values | (changed or {})).items():
    add = {str: writer.add_string, float: writer.add_float32}.get(
      type(value), writer.add_uint32
    )
    add(f"{name}.{key}", value)
  for key, value in (tokenizer or {}).items():
    add = {list: writer.add_array, str: writer.add_string}.get(
      type(value), writer.add_uint32
    )
    if isinstance(value, bool):
      add = writer.add_bool
    add(f"tokenizer.ggml.{key}", value)
  if tokenizer:
    writer.add_chat_template("{{ messages[0].content }}")
  kinds = {n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}
  names = gguf.get_tensor_name_map(kinds[own], text.num_hidden_layers)
  type_ = gguf.GGMLQuantizationType[kind]
  for key, value in stored(model).items():
    if own == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
      halves = value.reshape(-1, 2, text.head_dim // 2, value.shape[1])
      value = halves.swapaxes(1, 2).reshape(value.shape)
    if own == "gemma3" and key.endswith("norm.weight"):
      value = value + 1
    there = names.get_name(key, (".weight", ".bias"))
    value = np.ascontiguousarray(value, np.float32)
    if raw and raw[0] == there:
      writer.add_tensor(there, raw[1], raw_dtype=raw[2])
    elif value.ndim == 2 and kind != "F32":
      data = gguf.quantize(value, type_)
      writer.add_tensor(there, data, raw_dtype=type_)
    else:
      writer.add_tensor(there, value)
  for there, value in (extra or {}).items():
    writer.add_tensor(there, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(scope="module")
def policy():
  """Family -> a policy whose norms are not all alike."""
  models = {}

  def make(family, **text):
    key = family, *text
    if key not in models:
      model = qwen_checkpoint.random_model(config_of(family, **text), seed=1)
      rng = np.random.default_rng(0)
      for tensor in checkpoint_names.tensors_of(model):
        if tensor.variable[...].ndim == 1:
          shape = tensor.variable[...].shape
          tensor.variable.set_value(rng.normal(size=shape).astype(np.float32))
      models[key] = model
    return models[key]

  return make


# --- numbers ------------------------------------------------------------------


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_has_the_policys_numbers(family, policy, tmp_path):
  model = policy(family)
  file = write(tmp_path / "policy.gguf", model)
  loaded, processor, encoder = checkpoint.load_policy(file)
  assert processor.policy and encoder.get_vocab_size() == len(
    TOKENIZER["tokens"]
  )
  banned = loaded.config.banned_token_ids
  assert loaded.config == dataclasses.replace(
    model.config, banned_token_ids=banned
  )
  got, want = stored(loaded), stored(model)
  assert got.keys() == want.keys()
  for key, value in want.items():
    # 1 is added to Gemma's norms and taken off again.
    atol = 1e-6 if family == "gemma3_text" and value.ndim == 1 else 0
    np.testing.assert_allclose(got[key], value, rtol=0, atol=atol, err_msg=key)


@pytest.mark.parametrize(
  "kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]
)
def test_quantized_tensors_are_the_packages(kind, policy, tmp_path):
  model = policy("qwen3")
  file = write(tmp_path / "policy.gguf", model, kind)
  directory = policy_files.resolve(file)
  loaded, _, _ = checkpoint.load_policy(file)
  type_ = gguf.GGMLQuantizationType[kind]
  got = stored(loaded)
  for key, value in stored(model).items():
    if value.ndim == 2:
      value = gguf.dequantize(gguf.quantize(value, type_), type_)
    np.testing.assert_array_equal(got[key], value, err_msg=key)
  size = (directory / "model.safetensors").stat().st_size
  wide = 4 * sum(value.size for value in got.values())
  assert size < wide * 0.6 if kind == "BF16" else size > wide


@pytest.mark.parametrize("kind, block", [("Q4_K", 144), ("Q6_K", 210)])
def test_blocks_of_256_are_read(kind, block, policy, tmp_path):
  type_ = gguf.GGMLQuantizationType[kind]
  rng = np.random.default_rng(2)
  # Bytes of which no scale is infinite.
  data = rng.integers(0, 0x30, (HEADS * HEAD_DIM, block)).astype(np.uint8)
  name = "blk.0.attn_q.weight"
  file = write(
    tmp_path / "policy.gguf", policy("qwen3"), raw=(name, data, type_)
  )
  loaded, _, _ = checkpoint.load_policy(file)
  want = gguf.dequantize(data, type_)
  assert np.isfinite(want).all() and want.std() > 0
  got = stored(loaded)["model.layers.0.self_attn.q_proj.weight"]
  np.testing.assert_array_equal(got, want)


def test_llama_3s_factors_are_its_scaling(policy, tmp_path):
  scaling = rope_scaling.RopeScaling("llama3", 32.0, 8192)
  model = policy("llama", rope_scaling=scaling)
  theta = model.config.text.rope_theta
  plain = 1 / theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
  factors = (plain / scaling.scaled(plain, theta)).astype(np.float32)
  file = write(
    tmp_path / "policy.gguf", model, extra={"rope_freqs.weight": factors}
  )
  assert checkpoint.load_config(file).text.rope_scaling == scaling
  file = write(
    tmp_path / "other.gguf",
    model,
    extra={"rope_freqs.weight": factors[::-1].copy()},
  )
  with pytest.raises(ValueError, match="no factors of Llama 3's"):
    checkpoint.load_config(file)


def test_scaled_positions_are_the_metadatas(policy, tmp_path):
  file = write(
    tmp_path / "policy.gguf",
    policy("qwen3"),
    changed={
      "rope.scaling.type": "yarn",
      "rope.scaling.factor": 4.0,
      "rope.scaling.original_context_length": 1024,
    },
  )
  scaling = checkpoint.load_config(file).text.rope_scaling
  assert (scaling.kind, scaling.factor) == ("yarn", 4.0)
  assert scaling.original_max_position_embeddings == 1024


def test_it_is_unpacked_once_and_saved_as_safetensors(policy, tmp_path):
  file = write(tmp_path / "policy.gguf", policy("llama"))
  directory = policy_files.resolve(file)
  before = (directory / "model.safetensors").stat().st_mtime_ns
  assert policy_files.resolve(str(file)) == directory
  assert (directory / "model.safetensors").stat().st_mtime_ns == before
  assert [d.name for d in directory.parent.iterdir()] == [directory.name]
  model, _, _ = checkpoint.load_policy(file)
  checkpoint.save_policy(tmp_path / "saved", model, file)
  again, _, _ = checkpoint.load_policy(tmp_path / "saved")
  for key, value in stored(again).items():
    np.testing.assert_array_equal(value, stored(model)[key])
  written = json.loads((tmp_path / "saved" / "config.json").read_text())
  assert written["eos_token_id"] == TOKENIZER["eos_token_id"]
  template = policy_files.chat_template(tmp_path / "saved")
  assert template.source == "{{ messages[0].content }}"


# --- tokens -------------------------------------------------------------------


def test_token_ids_are_the_tokenizers_own(policy, tmp_path):
  file = write(tmp_path / "policy.gguf", policy("qwen2"))
  got = policy_files.load_tokenizer(file)
  plain = zip(TOKENIZER["tokens"], TOKENIZER["token_type"])
  want = transformers.Qwen2Tokenizer(
    vocab={t: i for i, (t, kind) in enumerate(plain) if kind == 1},
    merges=[tuple(merge.split(" ")) for merge in TOKENIZER["merges"]],
  ).backend_tokenizer
  for token, kind in zip(TOKENIZER["tokens"], TOKENIZER["token_type"]):
    if kind != 1:
      added = tokenizers.AddedToken(token, special=kind == 3, normalized=False)
      want.add_tokens([added])
  for text in TEXTS:
    ids = want.encode(text).ids
    assert got.encode(text).ids == ids, text
    assert got.decode(ids, False) == want.decode(ids, False)


def write_tokenizer(tmp_path, **fields):
  metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
  gguf_files.write_tokenizer(metadata, tmp_path)
  return policy_files.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
  "pre, pieces",
  [
    ("smollm", ["Ġa", "1", "2", "3", "4", "'s", "Ġb"]),
    ("gpt-2", ["Ġa", "1234", "'s", "Ġb"]),
    ("llama-bpe", ["Ġa", "123", "4", "'s", "Ġb"]),
    ("qwen2", ["Ġa", "1", "2", "3", "4", "'s", "Ġb"]),
  ],
)
def test_text_is_split_by_the_named_rule(pre, pieces, tmp_path):
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  encoder = write_tokenizer(
    tmp_path, model="gpt2", pre=pre, tokens=alphabet, merges=[]
  )
  split = encoder.pre_tokenizer.pre_tokenize_str(" a1234's b")
  assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces_are_sentencepieces(prefix, tmp_path):
  sentencepiece = pytest.importorskip("sentencepiece")
  model = io.BytesIO()
  words = ["the quick brown fox", "jumps over 12 lazy dogs", "the lazy the"]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(words * 20),
    model_writer=model,
    vocab_size=320,
    model_type="bpe",
    byte_fallback=True,
    add_dummy_prefix=prefix,
    remove_extra_whitespaces=False,
    normalization_rule_name="identity",
  )
  processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  ids = range(processor.vocab_size())
  kind = lambda i: (
    6
    if processor.is_byte(i)
    else 3
    if processor.is_control(i)
    else 2
    if processor.is_unknown(i)
    else 1
  )
  encoder = write_tokenizer(
    tmp_path,
    model="llama",
    tokens=[processor.id_to_piece(i) for i in ids],
    scores=[processor.get_score(i) for i in ids],
    token_type=list(map(kind, ids)),
    unknown_token_id=processor.unk_id(),
    bos_token_id=processor.bos_id(),
    add_space_prefix=prefix,
    add_bos_token=True,
  )
  for text in ("the lazy fox  jumps", "over 121 dogs é", "t", " quick"):
    want = processor.encode(text)
    assert encoder.encode(text).ids == [processor.bos_id(), *want], text
    assert encoder.decode(want) == processor.decode(want) == text


# --- wrong files --------------------------------------------------------------


def refused(file):
  with pytest.raises(ValueError) as error:
    policy_files.resolve(file)
  assert "\n" not in str(error.value)
  assert not list(file.parent.glob("cache/tunix-multi-turn/gguf/*"))
  return str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.999])
def test_a_cut_file_is_refused(share, policy, tmp_path):
  file = write(tmp_path / "policy.gguf", policy("llama"))
  data = file.read_bytes()
  file.write_bytes(data[: int(share * len(data))])
  assert f"{file} cannot be read as GGUF" in refused(file)


def test_another_file_is_refused(tmp_path):
  file = tmp_path / "policy.gguf"
  file.write_text("no weights" * 100)
  assert "cannot be read as GGUF" in refused(file)


def test_an_unknown_quantization_is_refused(policy, tmp_path):
  file = write(tmp_path / "policy.gguf", policy("llama"), "Q8_0")
  name = b"blk.0.attn_q.weight"
  data = bytearray(file.read_bytes())
  at = data.index(name) + len(name) + 4 + 2 * 8
  assert struct.unpack_from("<I", data, at) == (8,)
  struct.pack_into("<I", data, at, 99)
  file.write_bytes(data)
  assert "99) is not a valid GGMLQuantizationType" in refused(file)


def test_what_the_package_cannot_restore_is_refused(policy, tmp_path):
  type_ = gguf.GGMLQuantizationType.Q8_K
  block, size = gguf.GGML_QUANT_SIZES[type_]
  data = np.zeros((HEADS * HEAD_DIM, size * WIDTH // block), np.uint8)
  name = "blk.0.attn_q.weight"
  file = write(
    tmp_path / "policy.gguf", policy("qwen3"), raw=(name, data, type_)
  )
  assert f"tensor {name} is of Q8_K, which the package" in refused(file)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"architecture": "mamba"}, "'mamba' has no policy here; GGUF files"),
    ({"tokenizer": None}, "hold no tokenizer (tokenizer.ggml.tokens)"),
    ({"tokenizer": TOKENIZER | {"pre": "chatglm"}}, "pre='chatglm' is no"),
    ({"tokenizer": TOKENIZER | {"model": "bert"}}, "model='bert' is no"),
    ({"changed": {"expert_count": 8}}, "expert_count=8, mixtures"),
    ({"changed": {"rope.dimension_count": 8}}, "dimension_count=8, heads"),
    ({"changed": {"block_count": 3}}, "blk.2.attn_norm.weight is missing"),
    ({"changed": {"block_count": 1}}, "blk.1.attn_k.weight is unexpected"),
    ({"changed": {"feed_forward_length": 512}}, "say (256, 512)"),
    ({"changed": {"attention.sliding_window": 9}}, "has no windows here"),
  ],
)
def test_what_would_be_computed_wrongly_is_refused(
  changes, message, policy, tmp_path
):
  file = write(tmp_path / "policy.gguf", policy("llama"), **changes)
  assert f"{file}: " in refused(file)
  assert message in refused(file)


def test_a_directory_is_one_checkpoint(policy, tmp_path):
  (tmp_path / "weights").mkdir()
  file = write(tmp_path / "weights" / "policy.gguf", policy("llama"))
  with pytest.raises(ValueError, match="holds policy.gguf; give .*gguf$"):
    policy_files.resolve(file.parent)
  (file.parent / "model.safetensors").write_bytes(b"")
  with pytest.raises(ValueError, match="policy.gguf beside safetensors; give"):
    policy_files.resolve(file.parent)
  with pytest.raises(FileNotFoundError, match="there is no file .*absent"):
    policy_files.resolve(tmp_path / "absent.gguf")


def test_a_run_takes_it_by_its_name():
  assert policy_settings.POLICIES.get("weights.gguf") == "weights.gguf"
  for name in ("weights.gguf", "smollm2_135m"):
    policy = by_name.resolve(policy_settings.POLICIES.get(name))
    assert policy.brings_weights and policy.weights == name
  assert "smollm2_135m" not in by_name.BUILT_IN


def test_an_absent_package_is_named(monkeypatch):
  monkeypatch.setitem(
    policy_settings.PRETRAINED, "smollm2_135m", ("llm_absent", "x.gguf")
  )
  with pytest.raises(ValueError, match=r"\[pretrained\]'.*no-deps llm-absent"):
    policy_files.resolve("smollm2_135m")


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind", trials.by_default(["cut"], ["cut", "architecture"])
)
def test_the_command_line_says_it_in_one_line(kind, policy, tmp_path):
  changes = {"architecture": "mamba"} if kind == "architecture" else {}
  file = write(tmp_path / "policy.gguf", policy("llama"), **changes)
  if kind == "cut":
    file.write_bytes(file.read_bytes()[:-1000])
  result = subprocess.run(
      [sys.executable, "-m", "tunix.rl.multi_turn.train", f"policy={file}",
       "environment=tool", "--dry-run"],
      capture_output=True, text=True, timeout=120, check=False,
  )  # fmt: skip
  assert result.returncode == 2
  (line,) = [x for x in result.stderr.splitlines() if "policy.gguf" in x]
  assert line.startswith("error: ")
