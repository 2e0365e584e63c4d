"""Recipes, specifications and targets: the user's choices as data."""
