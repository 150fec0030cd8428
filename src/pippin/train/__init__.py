"""Training: one loop, its optimisers and schedules, and how it spreads over processes."""
