"""Tasks played by a person, an oracle or a script, and recorded."""
