"""limpet: the laboratory and the fast sampler for uniform-state discrete diffusion language models."""
