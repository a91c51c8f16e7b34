"""Rules about the user's own statements; test_edits.py has what people write, and what is said."""

import re

import pytest

import compose
import hazards
from helpers import ROOT, TECHNIQUES


def said(*lines, techniques=("amp",)):
    """Return the codes of what is said of these lines at the end of the user's copy."""
    base = compose.script("train")
    told = hazards.hazards(base + "\n".join(lines) + "\n", [base], {*techniques})
    return [re.search(r"\((C\d+)\)$", each)[1] for each in told]


@pytest.mark.parametrize(
    "lines, codes",
    [
        (["nn.utils.clip_grad_norm_(model.parameters(), 1)"], ["C101"]),
        (["nn.utils.clip_grad_norm_(", "    model.parameters(),", "    1)"], ["C101"]),
        (["nn.utils . clip_grad_norm_(model.parameters(), 1)"], ["C101"]),
        (["log('no clip_grad here')  # nor loss.backward()"], []),
        (["'''", "loss.backward()", "'''"], []),
        (["if loss.backward():", "    pass"], ["C103"]),
        (["scaler.scale(loss).backward()"], []),
        (["loss = {'sum': loss}", "loss['sum'].backward()"], ["C103"]),
        (["loss.backward(", "it cannot be parsed"], ["C103"]),
    ],
)
def test_a_rule_looks_at_statements(lines, codes):
    assert said(*lines) == codes


@pytest.mark.parametrize(
    "line, codes",
    [
        ("torch.save(x, 'a.pt')", ["C307"]),
        ("torch.save(x, 'a.pt')  # noqa: C307", []),
        ("torch.save(x, 'a.pt')  # noqa: E501, C307", []),
        ("torch.save(x, 'a.pt')  # noqa: C30", ["C307"]),
        ("if rank == 0: torch.save(x, 'a.pt')", []),
        ("file = open('a.txt', mode=\"w\")", ["C307"]),
    ],
)
def test_a_code_behind_the_line_silences_its_rule(line, codes):
    assert said(line, techniques=["DDP"]) == codes


def test_the_layout_is_set_above_ddp():
    layout = "model = model.to(memory_format=torch.channels_last)"
    wrap = "net = nn.parallel.DistributedDataParallel(net)"
    assert said(wrap, layout, techniques=["DDP"]) == ["C309"]
    assert said(layout, wrap, techniques=["DDP"]) == []


@pytest.mark.parametrize(
    "line, codes",
    [
        ("                if (step + 1) % 4 == 0:", ["C404"]),
        ("                if epoch % 4 == 0:", []),
        ("                if step % 100 == 0:", []),
        ("                extra.backward()", ["C404"]),
        ("optimizer.zero_grad(set_to_none=False)", ["C404"]),
        ("kept.append(output.detach())", ["C405"]),
        ("kept.append(output.detach().cpu())", []),
        ("kept.append(output.argmax(1))", []),
        ("                before = output.detach()", ["C405"]),
        ("                flipped = net(images.flip(-1))", ["C408"]),
        ("weight.register_hook(halved)", ["C409"]),
        ("model[0].register_forward_hook(look)", ["C406"]),
        ("                model[0].requires_grad_(True)", ["C407"]),
        ("    model[0].requires_grad_(False)", []),
    ],
)
def test_what_replayed_graphs_do_not_see(line, codes):
    lines = ["    for epoch in range(2):", "        for step in range(2):", line]
    body = ["                    pass"] * line.endswith(":")
    assert said(*lines, *body, techniques=["graphs"]) == codes


def test_noqa_silences_one_line_of_a_statement_only():
    first = ["nn.utils.clip_grad_norm_(", "    model.parameters(), 1)  # noqa: C101"]
    assert said(*first) == [] and said(*first, "x = weight.grad") == ["C101"]


def test_each_rule_has_a_code_of_its_own_and_a_line_in_the_docs():
    codes = [rule.code for rule in hazards.RULES]
    assert codes == sorted({*codes})
    page = (ROOT / "docs" / "composing.md").read_text()
    for rule in hazards.RULES:
        assert f"| {rule.code} |" in page and {*re.findall(r"\w+", rule.techniques)} <= {
            *TECHNIQUES
        }
        re.compile(rule.pattern)
