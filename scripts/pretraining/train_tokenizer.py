"""Trains the tokenizer of the small policies. A maintainer's command.

    python scripts/pretraining/train_tokenizer.py --out DIR

A byte-level BPE with Qwen's special tokens, split rule (with one change), NFC
and ChatML template, over a vocabulary small enough for a policy of two million
parameters. The differences, and their reasons:

- Every integer 0..999 is exactly one token, and their ids are consecutive. A
  coordinate on the 0..999 grid is then one decision, and the policy can give
  number tokens the geometry of the screen.
- The fixed parts of a `computer_use` call are single tokens ("scaffold"), so
  a click costs 8 sampled tokens instead of 33. The text is unchanged: it is
  the JSON that Qwen writes.

Promises: deterministic for one corpus and one version of `tokenizers`; every
string round-trips up to NFC. Does not import JAX.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
from typing import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import trainers
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen as qwen_parser

# Qwen's rule, except that numbers are cut every three digits, and that the
# separator of two numbers is one piece.
SPLIT_REGEX = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
  r"|, (?=\p{N})"
  r"|[^\r\n\p{L}\p{N}]?\p{L}+"
  r"|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<|object_ref_start|>",
  "<|object_ref_end|>",
  "<|box_start|>",
  "<|box_end|>",
  "<|quad_start|>",
  "<|quad_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|vision_pad|>",
  "<|image_pad|>",
  "<|video_pad|>",
)

# Markup that a decoded completion must still show, hence not "special".
MARKUP_TOKENS = (
  "<tool_call>",
  "</tool_call>",
  "<tool_response>",
  "</tool_response>",
  "<think>",
  "</think>",
)

_CALL = '\n{"name": "computer_use", "arguments": {"action": "'
SCAFFOLD_TOKENS = (
  *(
    f'{_CALL}{action}", "coordinate": ['
    for action in (
      "left_click",
      "right_click",
      "middle_click",
      "double_click",
      "triple_click",
      "mouse_move",
      "left_click_drag",
      "scroll",
    )
  ),
  f'{_CALL}type", "text": "',
  f'{_CALL}answer", "text": "',
  f'{_CALL}key", "keys": ["',
  f'{_CALL}wait"',
  f'{_CALL}terminate", "status": "',
  '], "pixels": ',
  '], "pixels": -',
  f'{_CALL}left_click_drag", "start_coordinate": [',
  '], "coordinate": [',
  "]}}\n",
  '"}}\n',
  '"]}}\n',
  "}}\n",
  '", "',
)

_TOOLS_BEFORE, _TOOLS_AFTER = (
  json.dumps(words, ensure_ascii=False)
  for words in qwen_parser.QwenToolParser()
  .get_tool_prompt("$schemas")
  .split("\n$schemas\n")
)

# ChatML as Qwen writes it, tools included. Content is a string or a list of
# parts; an image part is one placeholder here, which the renderer expands to
# the image's run.
CHAT_TEMPLATE = (
  """\
{%- macro render(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set leading = tools and messages and messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if leading -%}
{%- set content = render(messages[0].content) -%}
{{- content -}}{%- if content -%}{{- '\\n\\n' -}}{%- endif -%}
{%- endif -%}
{{- """
  + _TOOLS_BEFORE
  + """ -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n' + """
  + _TOOLS_AFTER
  + """ + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if leading and loop.first -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + render(message.content) \
+ '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- set content = render(message.content) -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

VOCAB_SIZE = 2560  # A multiple of 128, so that any mesh can split it.
LEAST_VOCABULARY = 2000
_NUMBERS = tuple(str(n) for n in range(1000))


def train(
  corpus: Iterable[str], vocab_size: int = VOCAB_SIZE
) -> tokenizers.Tokenizer:
  """Trains the tokenizer.

  Args:
    corpus: texts; digits in them are ignored, numbers have their own tokens.
    vocab_size: total entries, added tokens included.

  Returns:
    A tokenizer with exactly `vocab_size` entries. Ids: bytes, the numbers
    0..999 in order, learned pieces, special tokens, markup, scaffold.

  Raises:
    ValueError: the corpus is too small to learn that many pieces.
  """
  added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS) + len(SCAFFOLD_TOKENS)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  fixed = [c for c in alphabet if c not in "0123456789"]
  fixed += [*_NUMBERS, ",Ġ"]
  pieces = vocab_size - added - len(fixed)

  learner = _bare(models.BPE())
  learner.train_from_iterator(
    _without_digits(corpus),
    trainers.BpeTrainer(
      # Ask for a few more: ",Ġ" may be learned too and is kept once.
      vocab_size=len(alphabet) + pieces + 1,
      initial_alphabet=alphabet,
      special_tokens=[],
      show_progress=False,
    ),
  )
  model = json.loads(learner.to_str())["model"]
  by_id = sorted(model["vocab"].items(), key=lambda item: item[1])
  learned = [p for p, _ in by_id[len(alphabet) :] if p != ",Ġ"][:pieces]
  if len(learned) < pieces:
    raise ValueError(
      f"the corpus yields {len(learned)} pieces, {pieces} are needed for a"
      f" vocabulary of {vocab_size}; give more text or a smaller vocab_size"
    )
  vocab = {piece: i for i, piece in enumerate([*fixed, *learned])}
  merges = [tuple(m) for m in model["merges"] if "".join(m) in vocab]
  # ignore_merges: a pre-token that is an entry is that entry. Numbers need no
  # merges then, and cannot be cut differently.
  tokenizer = _bare(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(t, normalized=False, special=True)
      for t in SPECIAL_TOKENS
    ]
  )
  tokenizer.add_tokens(
    [
      tokenizers.AddedToken(t, normalized=False, special=False)
      for t in (*MARKUP_TOKENS, *SCAFFOLD_TOKENS)
    ]
  )
  return tokenizer


def save(tokenizer: tokenizers.Tokenizer, out: str | pathlib.Path) -> None:
  """Writes files for `transformers.AutoTokenizer.from_pretrained(out)`."""
  from transformers import PreTrainedTokenizerFast  # pylint: disable=g-import-not-at-top

  fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    model_max_length=32768,
    clean_up_tokenization_spaces=False,
    chat_template=CHAT_TEMPLATE,
  )
  fast.save_pretrained(str(out))


def check(tokenizer: tokenizers.Tokenizer) -> None:
  """Raises ValueError unless the tokenizer keeps its promises."""
  start = tokenizer.token_to_id("0")
  for n in range(1000):
    ids = tokenizer.encode(str(n), add_special_tokens=False).ids
    if ids != [start + n]:
      raise ValueError(f"number {n} is tokens {ids}, expected [{start + n}]")
  for x, y in ((0, 0), (512, 300), (999, 7)):
    text = f"<tool_call>{SCAFFOLD_TOKENS[0]}{x}, {y}]}}}}\n</tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 7:
      raise ValueError(f"a click is {len(ids)} tokens, expected 7: {text!r}")
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
      raise ValueError(f"{text!r} does not round-trip")


def _bare(model: models.Model) -> tokenizers.Tokenizer:
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(SPLIT_REGEX), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _without_digits(corpus: Iterable[str]) -> Iterator[str]:
  table = {ord(d): "\n" for d in "0123456789"}
  for text in corpus:
    yield text.translate(table)


# --- the corpus ------------------------------------------------------------

_SYSTEM_LINES = (
  "You are a helpful assistant.",
  "You are a GUI agent. You see a screenshot and control the computer.",
  "You control a computer through screenshots. The screen's coordinates"
  " run from 0 to 999 on both axes.",
  "# Tools",
  "You may call one or more functions to assist with the user query.",
  "You are provided with function signatures within <tools></tools> XML tags:",
  "For each function call, return a json object with function name and"
  " arguments within <tool_call></tool_call> XML tags:",
  "Use a mouse and keyboard to interact with a computer, and take screenshots.",
  "The screen's resolution is 1000x1000.",
  "Whenever you intend to move the cursor to click on an element like an"
  " icon, you should consult a screenshot to determine the coordinates of"
  " the element before moving the cursor.",
  "Tool returned result: Error: Screenshot after the action. Done.",
  "The tool call could not be parsed: unknown action, missing argument,"
  " invalid JSON. Answer with exactly one tool call.",
  "Action: Thought: Observation: Instruction: Task: Screenshot: Result:",
  "system\nuser\nassistant\ntool\n",
)
_TEMPLATES = (
  'Click the "{a}" button.',
  'Click on the "{a}" link.',
  'Press the button labelled "{a}".',
  'Double-click the "{a}" icon.',
  'Right-click the "{a}" item.',
  "Click the {c} square.",
  "Click the {c} circle.",
  "Select the {c} {s}.",
  'Check the "{a}" box.',
  'Uncheck the "{a}" check box.',
  'Select "{a}" and "{b}", then click Submit.',
  'Choose the radio button "{a}".',
  'Choose "{a}" from the drop-down.',
  'Select "{a}" from the "{b}" menu.',
  'Type "{a}" into the "{b}" field.',
  'Enter "{a}" into the text field and press Enter.',
  'Focus the "{a}" text field.',
  "Drag the {c} {s} onto the {s} target.",
  'Drag the "{a}" file into the "{b}" folder.',
  'Scroll to "{a}" and click it.',
  'Set the slider "{a}" to 50.',
  'Close the dialog "{a}".',
  "Close the window.",
  'Open the "{a}" tab.',
  'Answer the question: what is written below "{a}"?',
  'Expand the "{a}" section and click "{b}".',
)
_COLOURS = (
  "red green blue yellow orange purple pink brown black white gray cyan"
  " magenta teal gold navy lime olive maroon silver"
).split()
_SHAPES = (
  "square circle triangle rectangle star diamond box shape icon button ball"
  " tile block cell dot"
).split()
_WORDS = (
  "ok yes no save open send next stop cancel close submit apply delete copy"
  " paste cut undo redo edit view help file home back forward search find"
  " replace print share upload download login logout sign in out up down"
  " left right top bottom start finish continue accept decline agree retry"
  " ignore add remove new create rename move select clear reset refresh"
  " reload update install settings options preferences account profile user"
  " name email password address phone city country date time day month year"
  " title subject message comment note reply inbox draft archive trash spam"
  " folder document image picture photo music video game book page menu tab"
  " window dialog field form list table row column item order price total"
  " cart buy sell pay card bank map car train plane bus ship bike house"
  " garden tree flower river lake sea mountain island forest sun moon star"
  " cloud rain snow wind storm spring summer autumn winter apple banana"
  " cherry lemon mango peach pear plum grape melon orange bread butter"
  " cheese milk egg fish meat rice soup tea coffee water juice cat dog bird"
  " horse cow sheep goat lion tiger bear wolf fox rabbit mouse snake frog"
  " alpha beta gamma delta omega one two three four five six seven eight"
  " nine ten first second third last north south east west small large big"
  " little long short high low hot cold warm cool fast slow old young good"
  " bad happy sad easy hard light dark open closed empty full true false on"
  " off enabled disabled public private local remote daily weekly monthly"
  " report budget invoice meeting agenda project team client contract"
  " manager office paper pencil key lock door window table chair lamp bed"
  " desk floor wall roof volume brightness speed size color zoom quality"
  " level mode theme language sound camera printer keyboard screen network"
  " wifi bluetooth battery memory disk backup restore sync cloud server"
  " enter tab escape space backspace shift ctrl alt pageup pagedown end"
  " hello world thanks please welcome today tomorrow yesterday morning"
  " evening night week hour minute success failure error warning info"
).split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corpus(
  words: Sequence[str] = (), instructions: Sequence[str] = (), seed: int = 0
) -> list[str]:
  """The project's own text: instructions, prompts, calls, words, ASCII.

  Args:
    words: labels and words to type that the gyms use, beside the built-in
      ones; each becomes frequent enough to be one token if it is one word.
    instructions: instructions as the gyms write them.
    seed: Seed of the draws.
  """
  rng = random.Random(seed)
  names = list(dict.fromkeys([*_WORDS, *words]))
  lines = list(_SYSTEM_LINES) * 20 + list(instructions)
  for template in _TEMPLATES:
    for _ in range(150):
      a, b = (_cased(rng.choice(names), rng) for _ in range(2))
      lines.append(
        template.format(a=a, b=b, c=rng.choice(_COLOURS), s=rng.choice(_SHAPES))
      )
  for _ in range(300):
    x, y = rng.randrange(1000), rng.randrange(1000)
    for scaffold in SCAFFOLD_TOKENS:
      lines.append(f"<tool_call>{scaffold}{x}, {y}]}}}}\n</tool_call>")
    lines.append(
      json.dumps(
        {
          "type": "function",
          "function": {
            "name": "computer_use",
            "description": rng.choice(_SYSTEM_LINES),
            "parameters": {
              "type": "object",
              "properties": {
                "action": {"type": "string", "enum": ["left_click"]},
                "coordinate": {"type": "array"},
              },
              "required": ["action"],
            },
          },
        }
      )
    )
  # A word is written bare in a call ("hello"), after a space in a sentence.
  for name in _WORDS:
    for form in (name, name.capitalize(), f" {name}"):
      lines.extend([form] * 10)
  for name in words:
    for form in (name, f" {name}"):
      lines.extend([form] * 60)
  # Random strings are typed too: common letter pairs, all of ASCII.
  for _ in range(400):
    lines.append("".join(rng.choices(_LETTERS, k=rng.randint(2, 6))))
  lines.append("".join(chr(c) for c in range(32, 127)))
  return lines


def _cased(word: str, rng: random.Random) -> str:
  return word.capitalize() if rng.random() < 0.5 else word


def gym_texts() -> tuple[list[str], list[str]]:
  """(words, instructions) of the gyms, from their own tables."""
  # Imported here: the tokenizer must load without the environments.
  from tunix.rl.multi_turn import prompts  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.environments.gyms import desktop  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.environments.gyms.desktop import words  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.parser import tool_parser  # pylint: disable=g-import-not-at-top

  compact = tool_parser.make_tool_parser("computer_use_compact")
  system = prompts.insert_tools(
    prompts.get_prompt("desktop_compact"), compact.get_tool_prompt()
  )
  tasks = desktop.DesktopTasks()
  sentences = [system] * 150 + [
    tasks.task(family, seed, level).instruction
    for family in tasks.families()
    for level in (0, 1, 2)
    for seed in range(60)
  ]
  gym = desktop.DesktopGym()
  for family in tasks.families():
    for seed in range(30):
      gym.start_sync(tasks.task(family, seed))
      for phrase, _, _ in gym.referring_expressions():
        sentences += [f"Click {phrase}.", f'answer", "text": "{phrase}']
  # MiniWoB++ tasks with a fixed wording.
  sentences += [
    "Click the button.",
    "Click button ONE.",
    'Close the dialog box by clicking the "x".',
    "Focus into the textbox.",
    'Click on the "Submit" button.',
    'Enter "Name" into the text field and press Submit.',
    "What is at ?",
  ] * 20
  parts = [part for name in words.all_words() for part in name.split()]
  return sorted({part for part in parts if part.isalpha()}), sentences


def refuse_folder(
  parser: argparse.ArgumentParser, option: str, folder: str | pathlib.Path
) -> None:
  """Ends the command with status 2 if the folder cannot be made."""
  try:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    parser.error(
      f"{option}={folder} cannot be made ({error.strerror}); give a folder"
      " that can be written"
    )


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python scripts/pretraining/train_tokenizer.py",
    description=(
      "Trains the tokenizer of the small policies. A maintainer's command."
    ),
  )
  out.add_argument("--out", required=True, help="directory to write")
  out.add_argument(
    "--vocab-size", type=int, default=VOCAB_SIZE, help="entries (%(default)s)"
  )
  out.add_argument(
    "--seed", type=int, default=0, help="of the corpus (%(default)s)"
  )
  return out


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  if args.vocab_size < LEAST_VOCABULARY:
    parser().error(
      f"--vocab-size={args.vocab_size} must be {LEAST_VOCABULARY} or more:"
      " bytes, numbers and fixed tokens come first"
    )
  if args.seed < 0:
    parser().error(f"--seed={args.seed} must be 0 or more")
  refuse_folder(parser(), "--out", args.out)
  words, instructions = gym_texts()
  tokenizer = train(corpus(words, instructions, args.seed), args.vocab_size)
  check(tokenizer)
  save(tokenizer, args.out)
  print(f"{tokenizer.get_vocab_size()} entries written to {args.out}")


if __name__ == "__main__":
  main()
