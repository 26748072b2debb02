"""Checks a machine for a run, and says what to mend: `python -m … .doctor`."""
