"""What users choose, as data: recipes, specs, targets."""
