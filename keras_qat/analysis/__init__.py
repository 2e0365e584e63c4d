"""Reports on models: plan, summary, verification, diagnosis, tuning."""
