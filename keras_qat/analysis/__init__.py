"""Reports on models: plan, summary, verification, sensitivity."""
