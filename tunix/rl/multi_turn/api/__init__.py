"""The Python API: what a notebook or a script does with runs.

    import tunix.rl.multi_turn as mt

    run = mt.train(steps=20, gym="desktop")
    run.plot()

Its names are those of `tunix.rl.multi_turn`, which imports them on first use.
"""
