"""The monitor's database: 13 tables, their rules, and connections."""
