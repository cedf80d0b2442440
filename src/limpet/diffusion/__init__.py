"""What every sampler stands on: channel, supports, counted randomness, selector, how a step is drawn, a path."""
