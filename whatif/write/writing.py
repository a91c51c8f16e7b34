"""--write: from a measured set to a proved patch, its part of the report and of the record."""

import os
import shlex
import shutil

from whatif import report

from . import patch, proof


class Writing(proof.Prover):
    """A Prover with the file that it may write, and what is told of it."""

    stopped = False  # by Ctrl-C

    @property
    def path(self):
        return self.session.args.write

    def is_proved(self):
        return bool(self.verdict and self.verdict["proved"]) and not self.stopped

    def save(self):
        """Write the file, if there is a proved patch. OSError says why it cannot be written."""
        if self.is_proved() and self.patch.diff:
            part = f"{self.path}.part"
            with open(part, "wb") as file:
                file.write(self.patch.diff)
            shutil.move(part, self.path)

    def best(self, best):
        """Return the techniques that are still advised."""
        found, without = self.verdict, {*self.reasons}
        if found and found["kind"] == proof.CHANGES:
            return ()
        if found and (found["high"] or 2) < 1:  # slower; what could not be written was not in it
            without |= {*found["techniques"]}
        return tuple(name for name in best if name not in without)

    def written(self):
        """Return the techniques for which no advice in words is needed."""
        return self.verdict["techniques"] if self.is_proved() else ()

    def new_command(self):
        session = self.session
        words = patch.new_command(
            session.args.command, session.args.kind, self.patch, self.facts.get("options", ())
        )
        return shlex.join(
            [
                "python" if word == words[0] and session.args.kind != "command" else word
                for word in words
            ]
        )

    def apply(self):
        return patch.command_to_apply(self.patch, self.path, self.session.source)

    # ---- the report
    def lines(self):
        """Return the lines at the end of the report."""
        found, one, lines = self.verdict, self.patch, []
        if told := self.not_written():
            lines += ["", "Not in the patch", *report.grouped(told)]
        if found is None or self.stopped:
            why = (
                "stopped"
                if self.stopped
                else "nothing of it could be written"
                if self.names
                else "nothing is faster for certain"
            )
            return [*lines, "", f"No patch: {why}", *self.older()]
        if not found["proved"]:
            name = report.name_of(found["techniques"])
            return [
                *lines,
                "",
                "Not proved",
                report.paragraph(f"{name}: {found['why']}. No patch is handed out."),
                *self.older(),
            ]
        if one.diff:
            added, removed = one.size()
            lines += [
                "",
                f"The patch, {self.path}: +{added} -{removed} lines in {', '.join(one.changed)}",
                "",
                one.diff.decode(errors="replace").rstrip("\n"),
                "",
            ]
        name = report.name_of([*found["techniques"], *found["extras"]])
        speedup = found["speedup"], found["low"], found["high"]
        lines += [
            *[""] * (not one.diff),
            report.paragraph(
                f"{name}: {report.times(*speedup)} (n={found['n']}) in whole runs of the script and of "
                "its changed copy, with nothing but a clock; each loaded the other's states. "
                + found["off"]
            ),
            report.paragraph(
                report.loss_line(found["losses"])
                + ". This finds a broken training, not a slightly worse one."
            ),
        ]
        if one.diff:
            lines.append(f"  Apply it: {self.apply()}")
        if one.options:
            lines.append(
                f"  {'Then start' if one.diff else 'No line has to change: start'}: "
                f"{self.new_command()}"
            )
        return lines

    def older(self):
        """Return the line about a file of an earlier call."""
        return [f"  {self.path} is of an earlier call."] if os.path.exists(self.path) else []

    # ---- the record
    def record(self):
        """Return {patch, proof, reasons} for --json."""
        one, (added, removed), is_handed_out = self.patch, self.patch.size(), self.is_proved()
        return dict(
            patch=dict(
                file=str(self.path) if is_handed_out and one.diff else None,
                diff=one.diff.decode(errors="replace") if is_handed_out else None,
                files=one.changed,
                added=added,
                removed=removed,
                options=one.options,
                command=self.new_command() if one.options else None,
                apply=self.apply() if is_handed_out and one.diff else None,
                techniques=one.techniques(),
                extras=one.extras,
            )
            if not one.is_empty()
            else None,
            proof=self.verdict,
            reasons=self.not_written(),
        )
