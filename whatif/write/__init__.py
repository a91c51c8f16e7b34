"""--write: techniques as lines of the user's own files, the proof of them, and --compare."""
