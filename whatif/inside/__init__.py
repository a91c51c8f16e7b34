"""What is loaded into a process of the script after it has imported torch."""


def install(spec):
    """Watch this process; hold what it writes if another process of the run does."""
    from whatif.inside import files
    if files.is_holding(spec):
        files.hold_everything(spec)
