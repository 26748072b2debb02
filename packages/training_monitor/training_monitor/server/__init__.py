"""The monitor's server: stores batches and answers queries."""
