"""Recipes and deployment files, shipped as package data."""
