"""Measure what each technique would buy in your own PyTorch training script, before you change it.

`python whatif my_train.py ITS OWN ARGUMENTS` starts __main__.py. docs/whatif.md describes it.
"""
