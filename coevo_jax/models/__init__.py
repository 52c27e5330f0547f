"""Models: the spec of an architecture, one forward pass, log-probabilities, weights in and out."""
