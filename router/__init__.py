"""One URL in front of many rollout engines."""
