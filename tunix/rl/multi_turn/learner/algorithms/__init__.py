"""Algorithms as small pure functions behind registries.

Five parts make a loss, each exchangeable by name:

* `advantages`: a group's rewards -> how much better than its group each turn
  was (host, numpy);
* `aggregation`: who weighs how much in the mean over a batch (host, numpy);
* `importance`: which earlier policy a token is compared with, and how much a
  token counts that other weights sampled;
* `objectives`: log-probs and advantages -> a loss a token;
* `kl`: the price of leaving a reference policy, a token.

A part is registered with the registry of its module, e.g.
`advantages.ESTIMATORS.register("mine", my_function)`.
"""
