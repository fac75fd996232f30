"""Checks and measurements on a real GPU; `scripts/gpu_check` runs them."""
