"""Code tasks of longbench_mini: Python that breaks off before a line that earlier lines tell."""

from random import Random

from harness.benchmarks.mini.text import Draft, Scene, insert_at_depth

WORDS: dict[str, tuple[str, ...]] = {
    "thing": ("lantern", "parcel", "barge", "orchard", "ticket", "beehive", "kettle", "sluice", "wagon", "anchor"),
    "field": ("weight", "length", "price", "depth", "age", "height", "volume", "distance", "charge", "width"),
    "helper": ("rounded", "clamped", "halved", "doubled", "shifted", "scaled", "smoothed", "trimmed"),
    "limit": tuple(str(limit) for limit in range(12, 900, 13)),
    "word": ("open", "late", "sealed", "spare", "broken", "sold", "rented", "painted", "empty", "urgent"),
}

FUNCTIONS = (
    (
        "def total_{field}_of_{thing}s({thing}s: list[dict]) -> int:",
        '    """Add up the {field} of every {thing} below {limit}."""',
        "    total = 0",
        "    for {thing} in {thing}s:",
        '        if {thing}["{field}"] < {limit}:',
        '            total += {thing}["{field}"]',
        "    return total",
    ),
    (
        "def {word}_{thing}s({thing}s: list[dict]) -> list[dict]:",
        '    """Return the {thing}s marked as {word}, the largest {field} first."""',
        '    marked = [{thing} for {thing} in {thing}s if {thing}["{word}"]]',
        '    return sorted(marked, key=lambda {thing}: -{thing}["{field}"])',
    ),
    (
        "def {field}_by_{thing}(rows: list[str]) -> dict[str, int]:",
        '    """Read lines like "name;{field}"."""',
        "    table = {{}}",
        "    for row in rows:",
        '        name, {field} = row.split(";")',
        "        table[name] = min(int({field}), {limit})",
        "    return table",
    ),
    (
        "def describe_{thing}({thing}: dict) -> str:",
        '    {field} = {thing}["{field}"]',
        "    if {field} > {limit}:",
        '        return f"{word} {thing} of {{{field}}}"',
        '    return "plain {thing}"',
    ),
)


def lcc(rng: Random, num_chars: int, depth: float) -> Draft:
    """One file; the helper that the last function has to call is defined at `depth`."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("def {helper}_{field}({field}: int) -> int:\n    return max(0, {field} - {limit}) // 2\n\n\n")
    last = scene.fill("def {helper}_{field}_of_{thing}({thing}: dict) -> int:\n")
    context = "".join((*insert_at_depth(_functions(rng, num_chars), evidence, depth), last))
    answer = scene.fill('    return {helper}_{field}({thing}["{field}"])')
    return Draft(context, "", (answer,), evidence, "python")


def repobench_p(rng: Random, num_chars: int, depth: float) -> Draft:
    """Files of a repository as context, the file to complete as input; the called function lies at `depth`."""
    scene = Scene(rng, WORDS)
    body = (
        "def put_{word}({thing}: dict, {field}: int) -> bool:\n"
        '    {thing}["{word}"] = {field} < {limit}\n    return {thing}["{word}"]\n\n\n'
    )
    evidence = scene.fill("yard/{thing}_store.py\n" + body)
    files = [
        f"yard/{name}.py\n{code}" for name, code in zip(_file_names(rng), _functions(rng, num_chars), strict=False)
    ]
    last = scene.fill(
        "from yard import {thing}_store\n\n\ndef receive({thing}: dict, {field}: int) -> bool:\n"
        '    """Put a {thing} into the store as {word}."""\n'
    )
    answer = scene.fill("    return {thing}_store.put_{word}({thing}, {field})")
    return Draft("".join(insert_at_depth(files, evidence, depth)), last, (answer,), evidence, "python")


def _functions(rng: Random, num_chars: int) -> list[str]:
    texts: list[str] = []
    while sum(map(len, texts)) < num_chars:
        scene = Scene(rng, WORDS)
        texts.append("\n".join(scene.fill(line) for line in rng.choice(FUNCTIONS)) + "\n\n\n")
    return texts


def _file_names(rng: Random) -> list[str]:
    names = [f"{word}_{helper}" for word in WORDS["word"] for helper in WORDS["helper"]]
    return rng.sample(names, len(names))
