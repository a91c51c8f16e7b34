"""Measure what each technique gains in an unmodified PyTorch training script."""
