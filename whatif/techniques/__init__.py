"""One module for each technique: when it applies, how to switch it, and what to write for it."""
