"""Gyms for computer-using agents: the web, Linux desktops, remote machines.

Each folder with a `GYM` declares one gym; the entry points
`tunix.rl.multi_turn.gyms` of this package name them. `gym_server` serves gyms
over HTTP, and `genv` is its client.

Promises: importing this runs neither google-tunix nor JAX.
"""

import tunix_multi_turn

tunix_multi_turn.light()
