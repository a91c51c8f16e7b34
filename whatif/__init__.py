"""Measure what each technique would buy in your own PyTorch training script, before you change it.

    python whatif my_train.py ITS OWN ARGUMENTS

This folder is a program. It needs only torch: copy it anywhere.
"""
