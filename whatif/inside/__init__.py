"""What is loaded into the processes of the script, as soon as they have imported torch."""

import atexit


def install(spec):
    """Watch this process, as `spec` says; called once, when `import torch` is complete."""
    if spec["mode"] == "proof":
        from whatif.inside import proving

        proving.install(spec)
        return
    from whatif.inside import files, seeds
    from whatif.inside.watch import Run

    if files.is_holding(spec):
        files.hold_everything(spec)
    if Run.active is None:
        run = Run(spec)
        run.install()
        if spec.get("seed") is not None:
            seeds.shift_seeds(spec["seed"])
        atexit.register(run.ended)
