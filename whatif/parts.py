"""Where the time of a run goes: shares, and a bar of text. The tools and whatif show the same."""

# each part, what a reader calls it, and its sign in a bar
PARTS = {
    "start": ("imports and start", "S"),
    "began": ("start to the end of the first step", "S"),  # whatif sees a script from there on
    "next": ("up to three more steps", "N"),
    "prepare": ("index or decoding, model", "P"),
    "first_step": ("first step, compiling", "F"),
    "steps": ("steps", "="),
    "waiting": ("waiting for data", "."),
    "validation": ("validation", "V"),
    "checkpoints": ("checkpoints", "C"),
    "between": ("between epochs", "B"),
    "end": ("end", "E"),
    "aside": ("validation, stalls, other work between steps", "V"),
}
WIDTH = 40
LONG = 4, 0.05  # more than so many typical steps, and seconds, is other work between two steps


def bar(parts, width=WIDTH):
    """Return `width` signs for {part: seconds}: "SS======...V"; the largest remainders round up."""
    total = sum(parts.values()) or 1
    exact = {name: width * seconds / total for name, seconds in parts.items()}
    signs = {name: int(each) for name, each in exact.items()}
    missing = width - sum(signs.values()) if sum(parts.values()) else 0
    for name in sorted(exact, key=lambda name: signs[name] - exact[name])[:missing]:
        signs[name] += 1
    return "".join(PARTS[name][1] * signs[name] for name in PARTS if name in parts)


def shares(parts):
    """Return {part: "12%"} of {part: seconds}, in their order."""
    total = sum(parts.values()) or 1
    return {name: f"{parts[name] / total:.0%}" for name in PARTS if name in parts}


def legend(parts, shares={}):
    """Return "S imports and start 12%, = steps 88%": the signs of these parts, and their shares."""
    return ", ".join(
        f"{sign} {told} {shares.get(name, '')}".rstrip()
        for name, (told, sign) in PARTS.items()
        if name in parts
    )


def is_long(gap, typical):
    """Return whether the seconds between two steps hold more than a step."""
    return gap > max(LONG[0] * typical, LONG[1])


def other_work(gaps, typical):
    """Return the seconds of `gaps`, from step to step, that are no step: of an evaluation, a stall.

    What happens again and again is in the mean of a typical step, and stays.
    """
    other = sum(gap - typical for gap in gaps if is_long(gap, typical))
    return max(0.0, min(other, sum(gaps) - len(gaps) * typical))


def only_steps(watched, compute):
    """Return what whatif has watched, with other work between steps under `other`.

    `compute` is what a step takes on kept batches. Beside workers of a loader each may take longer,
    so the fastest one counts.
    """
    gaps = watched["gaps"]
    typical = max(compute, min(gaps, default=0.0))
    first = 0.0 if watched["compiled"] else other_work(gaps[: watched["set_up"]], typical)
    later = min(other_work(gaps[watched["set_up"] :], typical), watched["seconds"])
    is_over = 2 * later > watched["seconds"]  # it was not done again
    return watched | dict(
        cycle=1 if is_over else watched["cycle"],
        next=watched["next"] - first,
        seconds=watched["seconds"] - later,
        whole=watched["whole"] - later,
        other=watched["other"] + first + later,
    )


def of_watched(watched, began):
    """Return {part: seconds} of what whatif has watched of a script that `began` at that time."""
    return (
        {}
        if "began" not in watched
        else dict(
            began=max(0, watched["began"] - began),
            next=watched["next"],
            steps=watched["seconds"] - watched["wait"],
            waiting=watched["wait"],
            aside=max(0, watched["whole"] - watched["seconds"] + watched["other"]),
        )
    )
