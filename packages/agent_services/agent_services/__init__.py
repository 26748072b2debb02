"""Services around the framework: a policy's server, and agents elsewhere.

`serving` is the OpenAI-compatible server, with an image proxy beside it;
`run_service` plays whole episodes for programs that ask, and `runs` is the
client's side of it; `cua_workflow` is AReaL's workflow on such runs;
`rollout_buffer` keeps rollouts between generators and trainers, with slime's
API. `applications` is what the three servers share.

Promises: a run of the framework finds this package by the entry points
`tunix.rl.multi_turn.services`; importing this runs neither google-tunix nor
JAX.
"""

import tunix_multi_turn

tunix_multi_turn.light()
