"""What can be wrong after a clean merge: rules about the user's own statements, each with a code.

A rule is a pattern of a statement as Python's syntax tree has it: on one line, without comments,
with single quotes. Of a compound statement it is the first line. Rules that are about names see
no text of strings. `# noqa: C101` on a line of the statement silences the rule C101.
"""

import ast
import copy
import dataclasses
import functools
import re
import sys


@dataclasses.dataclass(frozen=True)
class Rule:
    """A hazard. `techniques` are words: "amp DDP" is any of them, "amp+fused" both, "amp!fused" amp
    without fused. `unless` is a pattern of the user's lines that shows that it is handled."""

    code: str
    techniques: str
    pattern: str
    sentence: str
    unless: str | None = None
    strings: bool = False  # the pattern needs the text of strings
    guarded: bool = False  # harmless under an `if` that asks for the rank
    below: str | None = None  # harmless unless a statement above it has this pattern

    def joined(self, techniques):
        """Return the words that hold for a set of techniques."""
        return [
            name
            for name, *without in (each.split("!") for each in self.techniques.split())
            if {*name.split("+")} <= techniques and not techniques.intersection(without)
        ]


DDP = r"(DistributedDataParallel|\bDDP)\("
OPTIMIZER = r"^ *(?!optimizer\b)\w+ = (torch\.)?optim\.(?!lr_sch|swa)\w+\("
# fmt: off
RULES = [
    Rule("C101", "amp", r"^(?!.*lambda).*(clip_grad|\.grad\b)|\bregister_hook\(",
         "it sees gradients that amp has multiplied: call scaler.unscale_(optimizer) first",
         "unscale_"),
    Rule("C102", "amp+fused", r"register_\w+_hook\(",
         "fused divides the gradients after it: call scaler.unscale_(optimizer) first", "unscale_"),
    Rule("C103", "amp", r"\.backward\(", "amp does not scale this loss: scaler.scale(loss).backward()",
         r"scaler\.scale\("),
    Rule("C104", "amp", OPTIMIZER, "amp steps only the optimizer that is called optimizer",
         r"scaler\.step\((?!optimizer\))"),
    Rule("C201", "fused", OPTIMIZER, "only the optimizer that is called optimizer becomes fused"),
    Rule("C202", "fused", r"\badd_param_group\b",
         "give the new group fused=True, or amp does not unscale it", r"[\"']?fused[\"']?[:=]"),
    Rule("C203", "fused", r"\bdampening\b",
         "the first step differs, since momentum starts from zeros"),
    Rule("C204", "fused", r"\bforeach=True", "foreach goes before fused: remove it, or nothing is "
         "fused and the first step with float16 raises"),
    Rule("C205", "channels_last!fused", r"\bfused=True", "a fused step is wrong if a checkpoint has "
         "its momentum in another layout: add fused too, whose block mends that"),
    Rule("C211", "channels_last", "= .*" + DDP, "the layout has to be "
         "set before this line: after it gradients are permuted"),
    Rule("C301", "DDP", r"\b(net|ddp\w*|\w+\.module)\.to\(.*channels_last", "after "
         "DistributedDataParallel this permutes gradients: call model.to(...) before net is made"),
    Rule("C302", "DDP",
         r"(?<!correct )\+= .*(len\(|\.size\(|\.shape|\.sum\(|\.item\(|\.numel|_loss|\.tolist\()"
         r"|\bcat\(\[?\w*(out|logit|label|target|pred|score|hit|loss)"
         r"|\.(append|extend|update)\(.*(output|logits|label|target|pred|\.item\(|cpu\()",
         "each process has only its share of the images: add up with dist.all_reduce or all_gather",
         r"all_reduce|all_gather"),
    Rule("C303", "DDP",
         r"sched\w*\.step\((?!\)|loss\b|top\b|top\d|epoch)|\bpatience\b(?! ?=[^=])",
         "the processes must decide by the same value: dist.all_reduce it first", "all_reduce"),
    Rule("C304", "DDP", r"^ {12,}.*requires_grad(_\((True)?\)| = (?!False))",
         "DDP averages only what needs gradients when net is made: leave requires_grad on, and set "
         ".grad to None instead"),
    Rule("C305", "DDP", r"reduction=.sum", "each process sums its share: multiply by world_size",
         "world_size", strings=True),
    Rule("C306", "DDP", r"AveragedModel|\bema\b|deepcopy\(model",
         "only the buffers of model become equal in all processes: broadcast those of the copy too",
         r"broadcast\("),
    Rule("C307", "DDP",
         r"open\(.*['\"][wax]b?\+?['\"]|torch\.save\(|\.write_\w+\(|np\.save|savetxt|savefig"
         r"|to_csv|json\.dump\(|SummaryWriter|FileHandler|wandb\.|mlflow\.",
         "every process writes it: put it under `if rank == 0:`", strings=True, guarded=True),
    Rule("C308", "DDP DP compile", r"\bnet\.(?!parameters|train\(|eval\(|zero_grad|named_par"
         r"|broadcast_b)\w", "net is a wrapper, with other names inside: use model"),
    Rule("C309", "DDP", r"\bmodel\.to\(.*channels_last", "after DistributedDataParallel this permutes "
         "gradients: move it above the line that makes net", below=DDP),
    Rule("C401", "compile", r"\bdrop_last=False", "a smaller last batch is compiled for itself"),
    Rule("C402", "profile", r"^ {12,}(if .*: )?continue\b", "the profiler counts a step at its end"),
    Rule("C403", "graphs", r"\bdrop_last=False", "a smaller last batch has graphs of its own, which "
         "take memory"),
    Rule("C404", "graphs", r"set_to_none=False|\.backward\(|^ {12,}if .*\+ 1\) % |\baccum",
         "a gradient that is kept, by a second backward() or set_to_none=False, is written over: the "
         "last one counts twice"),
    Rule("C405", "graphs",
         r"\.append\((output|logits)(\.detach\(\))?\)|= \[?(output|logits)(\.detach\(\))?\]?$",
         "the next step writes over output: keep output.clone()"),
    Rule("C406", "graphs", r"\bregister_(full_|forward_|backward_|module_)\w*hook\(",
         "a hook of a module does not run in replayed steps"),
    Rule("C407", "graphs", r"^ {12,}.*requires_grad(_\(| = )",
         "graphs train what needed gradients in the first step: set it before"),
    Rule("C408", "graphs", r"(?<!output = )\bnet\(",
         "a second net(...) before backward() writes over what the first one keeps for it"),
    Rule("C409", "graphs", r"\.register_hook\(", "a hook of a weight runs twice, in the graph and "
         "after it: change .grad before optimizer.step()"),
    Rule("C501", "DALI LMDB", r"\bloader=(?!load_image)", "the technique does not call this loader"),
    Rule("C502", "DALI", r"ImageOps\.|\.convert\(|\.point\(|Image\.open",
         "DALI does not call load_image"),
    Rule("C503", "DALI cache LMDB", r"class \w+\(.*Dataset\)",
         "a Dataset of your own: DALI and LMDB read the files in `samples` (and need root, targets, "
         "classes), the cache keeps uint8 images (3, size, size) and numbers"),
    Rule("C504", "DALI LMDB", r"\b(Subset|random_split|TensorDataset|ConcatDataset)\(",
         "the technique reads the `samples` of an ImageFolder"),
    Rule("C505", "DALI", r"def __getitem__\b", "DALI does not call it"),
    Rule("C506", "LMDB", r"def __getitem__\b", "LMDB takes the place of `loader`, which this has to "
         "call", r"super\(\).__getitem__|\.loader\("),
    Rule("C507", "cache", r"def __getitem__\b", "it is called once for each image"),
    Rule("C508", "DALI LMDB cache",
         r"(return|dict\(|\{).*['\"]?(image|label|pixel|target)\w*['\"]?[:=]",
         "the loader gives (images, labels) and no dicts", strings=True),
    Rule("C509", "DALI cache", r"collate_fn|worker_init_fn|batch_sampler",
         "the technique's loader does not call it"),
    Rule("C510", "DALI cache", r"(Resize|Crop)\([\[(]", "images have to be squares"),
    Rule("C511", "DALI cache", r"(?<!Random)Grayscale|convert\(.L|Conv2d\(1\b",
         "its images have three channels; train_LMDB.py's have as many as yours", strings=True),
    Rule("C512", "DALI", r"transforms\.(?!Normalize|ToDtype|Compose|CutMix|MixUp)\w+\(",
         "DALI does not run it: do the same in image_pipeline", r"\bfn\.\w"),
    Rule("C513", "cache", r"transforms\.(Random|Auto|Trivial|Aug|ColorJ|Gauss|Elastic)\w*\(",
         "with --augment the technique's own takes the place of crop; all else is done once for "
         "each image"),
    Rule("C514", "cache", r"(?<!PIL)ToTensor\(|ToImage\(|torch\.float",
         "the cache holds bytes: make floats in normalize"),
]
# fmt: on


class WithoutStrings(ast.NodeTransformer):
    """Take the text out of all strings."""

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) else node


class Statement:
    """A statement of a script: its lines, counted from 1, and its code, with and without strings.

    The lines of a compound one are those above its body.
    """

    def __init__(self, node):
        self.node, self.first, self.last = node, node.lineno, node.end_lineno
        if body := getattr(node, "body", getattr(node, "cases", None)):
            first_inside = getattr(body[0], "pattern", body[0])  # of a match it is a case
            self.last = max(node.lineno, first_inside.lineno - 1)

    @functools.cached_property
    def code(self):
        return told(self.node)

    @functools.cached_property
    def names(self):
        return told(WithoutStrings().visit(copy.deepcopy(without_body(self.node))))


@functools.lru_cache(maxsize=64)
def statements(text):
    """Return the Statements of a text, by their lines."""
    tree = ast.parse(text.encode("utf-8", "replace"))
    found = [Statement(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sorted(found, key=lambda each: (each.first, each.last, each.node.col_offset))


def without_body(node):
    """Return a statement, of a compound one a copy whose body is `pass`."""
    if hasattr(node, "body") or hasattr(node, "cases"):
        node = copy.copy(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if hasattr(node, name):
                setattr(node, name, [ast.Pass()] if name == "body" else [])
    return node


def told(node):
    """Return the code of a statement on one line, indented; of a compound one without its body."""
    code = ast.unparse(without_body(node)).removesuffix("pass")
    return " " * node.col_offset + " ".join(code.split())


@dataclasses.dataclass
class Line:
    """A line of a script that Python cannot parse, in place of a Statement."""

    first: int
    last: int
    code: str
    names: str


def lines(text):
    """Return the Lines of a text."""
    return [Line(k, k, line, line) for k, line in enumerate(text.split("\n"), 1)]


def silenced(texts):
    """Return the codes in the `# noqa: C101, C102` comments of some lines."""
    found = re.findall(r"# noqa: *([A-Z]\d+(?:[, ]+[A-Z]\d+)*)", "\n".join(texts))
    return {code for each in found for code in re.findall(r"[A-Z]\d+", each)}


def is_guarded(lines, number):
    """Return whether a line, counted from 1, is under an `if` that asks for the rank."""
    indent = sys.maxsize
    for line in lines[number - 1 :: -1]:  # this line, then those above it
        here = len(line) - len(line.lstrip())
        if line.strip() and here < indent:
            if re.search(r"\bif\b.*rank", line):
                return True
            indent = here
    return False


def is_below(pattern, one, found):
    """Return whether a statement stands below one that has a pattern."""
    return any(each.first < one.first and re.search(pattern, each.code) for each in found)


def hazards(text, others, techniques):
    """Return a sentence for each rule that the user's own statements in `text` break.

    `others` are the scripts whose lines are not the user's.
    """
    known = {line.strip() for each in others for line in each.split("\n")}
    all_lines = text.split("\n")
    own = {
        number: line
        for number, line in enumerate(all_lines, 1)
        if line.strip() not in known and line.strip()[:1] != "#"
    }
    try:
        found = statements(text)
    except (SyntaxError, ValueError):
        found = lines(text)
    mine = [each for each in found if any(k in own for k in range(each.first, each.last + 1))]
    said = []
    for rule in RULES:
        joined = rule.joined(techniques)
        if not joined or rule.unless and re.search(rule.unless, "\n".join(own.values())):
            continue
        for each in mine:
            its_lines = all_lines[each.first - 1 : each.last]
            if (
                re.search(rule.pattern, each.code if rule.strings else each.names)
                and (not rule.below or is_below(rule.below, each, found))
                and rule.code not in silenced(its_lines)
                and not (rule.guarded and is_guarded(all_lines, each.first))
            ):
                shown = next(k for k in range(each.first, each.last + 1) if k in own)
                said.append(
                    f"line {shown} with {', '.join(joined)}: `{own[shown].strip()}`: "
                    f"{rule.sentence} ({rule.code})"
                )
                break
    return said
