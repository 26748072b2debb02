"""GUI-action grammars, one a model family or benchmark."""
