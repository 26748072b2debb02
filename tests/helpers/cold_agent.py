"""An agent whose requests name temperatures of its own."""

import itertools

_EPISODES = itertools.count()


async def play(client, model, computer, **options):
  """Every second episode is greedy, the others are cold in turn 1."""
  greedy = next(_EPISODES) % 2
  messages = [{"role": "system", "content": "act"}, await computer.reset()]
  for turn in itertools.count():
    own = {}
    if greedy or turn == 1:
      own = {"temperature": 0.0 if greedy else 0.5}
    answer = await client.chat.completions.create(
      model=model, messages=messages, **{**options, **own}
    )
    text = answer.choices[0].message.content or ""
    observation = await computer.act(text)
    if observation is None:
      return
    messages += [{"role": "assistant", "content": text}]
    messages.append(observation)
