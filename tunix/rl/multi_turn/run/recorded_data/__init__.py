"""Episodes that the run does not play: a rollout buffer's, or recorded ones.

`rollout.via=buffer` (see `buffer_loop`) and `rollout.via=offline` (see
`offline_queue`).
"""
