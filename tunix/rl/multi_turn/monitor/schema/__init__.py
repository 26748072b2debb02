"""The database: 13 tables, their rules, and how to open them."""
