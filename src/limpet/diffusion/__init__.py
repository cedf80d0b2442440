"""The diffusion process and one reverse step: schedules, posterior, truncation, randomness, selection, backends."""
