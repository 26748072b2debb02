"""The `osworld` gym: machines that run OSWorld's server."""
