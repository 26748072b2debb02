"""The server: takes batches, keeps them, answers questions about them."""
