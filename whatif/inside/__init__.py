"""What is loaded into a process of the script after it has imported torch."""


def install(spec):
    """Watch this process."""
