"""Processes that hold models, and the mathematics inside them."""
