"""Measure what each technique would buy in a PyTorch training script, before it is changed."""
