"""What a model is and does: plan, summary, verification, sensitivity, drawings."""
