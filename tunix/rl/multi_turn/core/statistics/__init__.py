"""Success rates, their intervals, pass@k, comparisons of evaluations."""
