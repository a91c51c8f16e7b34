"""torch.compile, with the default mode or with CUDA graphs (reduce-overhead)."""

from .. import advice

NAMES = "compile", "compile reduce-overhead"


def why_not(name, facts):
    """Return why it cannot be tried, or ""."""
    if not advice.models_of(facts):
        return "no torch.nn.Module is called in a step"
    if advice.is_seen(name, facts):
        return "already there"
    if "several GPUs" in facts["seen"]:
        return "DataParallel on several GPUs cannot be compiled"
    return advice.needs_gpu(facts) if name != "compile" else ""


def write(name, facts, extra):
    """Return what to write: an option, or the line that compiles the model."""
    note = ("watch: it compiles in the first step, and again for a new shape" if name == "compile"
            else "watch: shapes must not change; it takes memory")
    mode = f'mode="{name.split()[1]}"' if name != "compile" else ""
    if option := advice.by_option(name, facts, extra):
        return advice.paragraphs(option, note)
    driver, entry = advice.driven(facts)
    if option := advice.by_library(name, [driver], extra, entry):
        return advice.paragraphs(option, note)
    models = advice.models_of(facts)
    model = models[0]
    if entry:
        own = advice.fitted(entry)
        words = ", ".join(filter(None, [own, mode]))
        return advice.paragraphs(
            f"above {advice.line(entry)}{advice.INDENT}{own} = torch.compile({words})", note)
    place, called = advice.before_use(model, facts)
    text = advice.paragraphs(f"{place}{advice.INDENT}{called}.compile({mode})",
                             advice.likewise(advice.other_models(models)), note,
                             advice.example(name))
    return advice.inside(model["library"], text) if model.get("library") else text
