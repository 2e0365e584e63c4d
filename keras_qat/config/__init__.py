"""Recipes, specifications and targets: a user's choices as data."""
