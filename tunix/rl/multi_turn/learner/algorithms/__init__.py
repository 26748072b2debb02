"""Implements algorithms as small pure functions behind registries.

Five parts make a loss, each exchangeable by name:

* `advantages`: a group's rewards -> the advantage of each turn (host, numpy);
* `aggregation`: token counts -> each token's weight in the loss (host, numpy);
* `importance`: proximal and sampled log-probs -> the ratio's anchor, and a
  weight for tokens that other weights sampled;
* `objectives`: log-probs and advantages -> a loss a token;
* `kl`: policy and reference log-probs -> a penalty a token.

A user's part is registered with the registry of its module, e.g.
`advantages.ESTIMATORS.register("mine", my_function)`, or named by its path,
"package.module:my_function". `parts` resolves the names.
"""
