"""The configuration of a training run: settings nested, layered, checked.

`load_config(argv)` gives a `TrainConfig`, or a `ConfigError` that lists every
problem. Imports no JAX and builds nothing.
"""

from tunix.rl.multi_turn.config.evaluate_config import EvaluationConfig
from tunix.rl.multi_turn.config.loader import ConfigError
from tunix.rl.multi_turn.config.resolution import changed
from tunix.rl.multi_turn.config.resolution import from_dict
from tunix.rl.multi_turn.config.resolution import from_yaml
from tunix.rl.multi_turn.config.resolution import load_config
from tunix.rl.multi_turn.config.resolution import load_evaluation
from tunix.rl.multi_turn.config.resolution import load_first
from tunix.rl.multi_turn.config.resolution import parse_yaml
from tunix.rl.multi_turn.config.resolution import reference
from tunix.rl.multi_turn.config.sealed import is_sealed
from tunix.rl.multi_turn.config.sealed import seal
from tunix.rl.multi_turn.config.train_config import ALIASES
from tunix.rl.multi_turn.config.train_config import TrainConfig
