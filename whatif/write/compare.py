"""--compare old.json new.json: whether the same script became slower, beyond its interval."""

import json
import math
import statistics
import sys

from whatif import stats

SLOWER, WRONG = 5, 2
SAME = "script", "arguments", "unit"


def read(path):
    """Return a record. ValueError says, in one line, what is wrong with it."""
    try:
        with open(path) as file:
            found = json.load(file)
        rates = [each["rate"] for each in found["windows"] if not each["names"]]
        if missing := {*SAME, "machine"} - {*found}:
            raise KeyError(*missing)
        return found | dict(plain=[rate for rate in rates if rate and math.isfinite(rate)])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no record of --json") from None


def same(old, new):
    """Return what two records do not share, which makes their rates unlike; or ""."""
    for key in SAME:
        if old[key] != new[key]:
            return f"{key}: {old[key]} and {new[key]}"
    for key in "gpu", "device", "cores", "processes":
        if old["machine"].get(key) != new["machine"].get(key):
            return f"{key}: {old['machine'].get(key)} and {new['machine'].get(key)}"
    return ""


def estimate(old, new):
    """Return the Estimate of how many times as fast the new windows are, or None if too few."""
    if min(len(old), len(new)) < 3:
        return None
    quotients = sorted(b / a for a in old for b in new)
    out = stats.rank_sum_out(len(new), len(old))
    low, high = (None, None) if out < 0 else (quotients[out], quotients[-1 - out])
    return stats.Estimate(statistics.median(quotients), low, high, min(len(old), len(new)))


def main(args):
    """Print the comparison of the script as it is. Return the exit status."""
    try:
        old, new = map(read, args.compare)
        if unlike := same(old, new):
            raise ValueError(f"the records cannot be compared; {unlike}")
        found = estimate(old["plain"], new["plain"])
        if found is None or found.low is None:
            raise ValueError("the records have too few windows of the script as it is")
    except ValueError as error:
        print(f"whatif: error: --compare: {error}", file=sys.stderr)
        return WRONG
    least = 1 - args.fail_above / 100
    is_slower = found.high < least
    told = f"{found.speedup:.3f}x ({found.low:.3f} to {found.high:.3f}, n={found.n})"
    middle = [statistics.median(each["plain"]) for each in (old, new)]
    print(f"{old['script']}: {middle[0]:.4g} {old['unit']}/s before, {middle[1]:.4g} now: {told}")
    print(
        "slower beyond the interval"
        if is_slower
        else "slower, but not by more than allowed"
        if found.high < 1
        else "faster"
        if found.low > 1
        else "not slower for certain"
    )
    rates = [(each.get("loader") or {}).get("rate") for each in (old, new)]
    if all(rates):
        print(
            f"the loader by itself: {rates[0]:.4g} batches/s before, {rates[1]:.4g} now (one "
            "measurement each, so no verdict)"
        )
    return SLOWER if is_slower else 0
