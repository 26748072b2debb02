"""Vision-language and text policies in flax nnx; importing this imports JAX."""

from tunix.rl.multi_turn.policy.base import PatchedImage
from tunix.rl.multi_turn.policy.base import Policy
from tunix.rl.multi_turn.policy.base import PolicyInputs
from tunix.rl.multi_turn.policy.base import Processor
from tunix.rl.multi_turn.policy.checkpoint import create_policy
from tunix.rl.multi_turn.policy.checkpoint import load_policy
from tunix.rl.multi_turn.policy.checkpoint import load_tokenizer
from tunix.rl.multi_turn.policy.checkpoint import save_policy
