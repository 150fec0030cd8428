"""What the endpoints share: bodies, fields, errors, jobs, streams, log-probabilities."""
