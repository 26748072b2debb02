"""The run service: plays whole episodes for programs that ask over HTTP."""
