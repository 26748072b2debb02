"""Policies, a folder a family: configuration, inputs, layers."""
