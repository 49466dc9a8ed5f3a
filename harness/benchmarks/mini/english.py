"""English documents of longbench_mini: question answering, summaries, counting and finding paragraphs."""

from collections.abc import Sequence
from random import Random

from harness.benchmarks.mini.text import Draft, Scene, insert_at_depth, paragraphs, weave
from harness.benchmarks.mini.words import (
    BIOGRAPHY,
    MEETING,
    NEWS,
    REPORT,
    SCIENCE,
    SOCIETY,
    STORY,
    TOWN,
    WORDS,
)

NUM_RETRIEVAL_PARAGRAPHS = 30


def narrativeqa(rng: Random, num_chars: int, depth: float) -> Draft:
    """A story in which somebody hides something."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("Before dawn {person} hid the {material} {object} in the {hideout} and told nobody.")
    texts = weave(paragraphs(rng, STORY, WORDS, num_chars), evidence, depth)
    question = scene.fill("Where did {person} hide the {material} {object}?")
    answers = (scene.fill("In the {hideout}"), scene.fill("the {hideout}"))
    return Draft("\n\n".join(texts), question, answers, evidence, "en")


def qasper(rng: Random, num_chars: int, depth: float) -> Draft:
    """A paper in sections; one sentence names the corpus."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("All models are trained on the {corpus} corpus, which has {amount} records of {topic}.")
    texts = weave(paragraphs(rng, SCIENCE, WORDS, num_chars), evidence, depth)
    titles = [
        "Introduction",
        "Related Work",
        "Data",
        "Model",
        *(f"Experiment {index + 1}" for index in range(len(texts))),
    ]
    sections = [f"{title}\n{text}" for title, text in zip(titles, texts, strict=False)]
    answers = (scene.fill("{corpus} corpus"), scene.fill("the {corpus} corpus"))
    return Draft("\n\n".join(sections), "Which corpus are the models trained on?", answers, evidence, "en")


def multifieldqa_en(rng: Random, num_chars: int, depth: float) -> Draft:
    """Minutes of an office; one sentence says who opened a building."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("The new {building} of {town} was opened on {number} {month} {year} by a {trade}.")
    texts = weave(paragraphs(rng, REPORT, WORDS, num_chars), evidence, depth)
    question = scene.fill("Who opened the new {building} of {town}?")
    return Draft("\n".join(texts), question, (scene.fill("A {trade}."),), evidence, "en")


def hotpotqa(rng: Random, num_chars: int, depth: float) -> Draft:
    """Two hops: society -> founder -> birthplace."""
    person, society, town = _one_of_each(rng)
    evidence = _biography(rng, person, town)
    founding = _society(rng, society, person)
    context = _passages(rng, num_chars, depth, (society, founding), (person, evidence))
    return Draft(context, f"In which town was the founder of the {society} born?", (town,), evidence, "en")


def two_wiki_mqa(rng: Random, num_chars: int, depth: float) -> Draft:
    """A comparison of two people by year of birth."""
    older, younger = rng.sample(WORDS["person"], 2)
    town, town2 = rng.sample(WORDS["town"], 2)
    year = rng.randrange(1810, 1900)
    evidence = _biography(rng, older, town, year)
    other = _biography(rng, younger, town2, year + rng.randrange(1, 60))
    context = _passages(rng, num_chars, depth, (younger, other), (older, evidence))
    pair = rng.sample((older, younger), 2)
    return Draft(context, f"Who was born first, {pair[0]} or {pair[1]}?", (older,), evidence, "en")


def musique(rng: Random, num_chars: int, depth: float) -> Draft:
    """Three hops: society -> founder -> birthplace -> river."""
    person, society, town = _one_of_each(rng)
    river = rng.choice(WORDS["river"])
    evidence = _town(rng, town, river)
    hops = ((person, _biography(rng, person, town)), (society, _society(rng, society, person)))
    context = _passages(rng, num_chars, depth, *hops, (town, evidence))
    question = f"Which river flows through the birthplace of the founder of the {society}?"
    return Draft(context, question, (river, f"the {river}"), evidence, "en")


def gov_report(rng: Random, num_chars: int, depth: float) -> Draft:
    """A report with one paragraph of findings, which is the summary."""
    scene = Scene(rng, WORDS)
    findings = (
        "This review found that the {programme} programme spent {amount} crowns in {year} without a written plan.",
        "Only {percent} percent of the projects along the {river} were inspected.",
        "The review recommends that the office of {town} publish its costs every {season}.",
    )
    evidence = " ".join(scene.fill(sentence) for sentence in findings)
    texts = insert_at_depth(paragraphs(rng, REPORT, WORDS, num_chars), evidence, depth)
    return Draft("\n\n".join(texts), "", (evidence,), evidence, "en")


def qmsum(rng: Random, num_chars: int, depth: float) -> Draft:
    """A transcript; the query asks for one speaker's opinion."""
    speakers = ("Project Manager", "Marketing", "Industrial Designer", "User Interface")
    scene = Scene(rng, WORDS)
    speaker = rng.choice(speakers)
    evidence = scene.fill("The {feature} has to go, because it costs {amount} crowns and breaks in {weather}.")
    turns = paragraphs(rng, MEETING, WORDS, num_chars, sentences=(1, 3))
    spoken = insert_at_depth([f"{rng.choice(speakers)}: {turn}" for turn in turns], f"{speaker}: {evidence}", depth)
    answer = scene.fill(
        f"{speaker} wanted to drop the {{feature}}, because it costs {{amount}} crowns and breaks in {{weather}}."
    )
    query = scene.fill(f"What did {speaker} say about dropping the {{feature}}?")
    return Draft("\n".join(spoken), query, (answer,), evidence, "en")


def multi_news(rng: Random, num_chars: int, depth: float) -> Draft:
    """Several articles on one event; the summary is one article's opening."""
    scene = Scene(rng, WORDS)
    opening = (
        "The {building} of {town} was closed on {weekday} after part of its roof fell into the {river}.",
        "Nobody was hurt, but {number} {animal} had to be led away.",
        "Repairs will take until {month} and cost {amount} crowns.",
    )
    evidence = " ".join(scene.fill(sentence) for sentence in opening)
    texts = weave(paragraphs(rng, NEWS, WORDS, num_chars, sentences=(6, 9)), evidence, depth)
    articles = [f"Passage {number}:\n{text}" for number, text in enumerate(texts, start=1)]
    return Draft("\n".join(articles), "", (evidence,), evidence, "en")


def passage_count(rng: Random, num_chars: int, depth: float) -> Draft:
    """Numbered paragraphs, some of them repeated; one repeated paragraph is the evidence."""
    unique = [_biography(rng, person, town) for person, town in _people(rng, max(4, num_chars // 700))]
    repeated = rng.sample(unique, rng.randint(1, len(unique) // 2))
    texts = rng.sample([*unique, *repeated[1:]], len(unique) + len(repeated) - 1)
    numbered = insert_at_depth(texts, repeated[0], depth)
    context = "\n\n".join(f"Paragraph {number}: {text}" for number, text in enumerate(numbered, start=1))
    return Draft(context, "", (str(len(unique)),), repeated[0], "en")


def passage_retrieval_en(rng: Random, num_chars: int, depth: float) -> Draft:
    """Thirty numbered paragraphs and the abstract of one of them."""
    people = _people(rng, NUM_RETRIEVAL_PARAGRAPHS)
    num_sentences = max(1, num_chars // NUM_RETRIEVAL_PARAGRAPHS // 150)
    texts = [_biography(rng, person, town, num_sentences=num_sentences) for person, town in people]
    gold = min(int(depth * len(texts)), len(texts) - 1)
    context = "\n\n".join(f"Paragraph {number}: {text}" for number, text in enumerate(texts, start=1))
    person, town = people[gold]
    abstract = f"The text tells the life of {person}, a native of {town}, and what was remembered of it later."
    return Draft(context, abstract, (f"Paragraph {gold + 1}",), texts[gold], "en")


def _one_of_each(rng: Random) -> tuple[str, str, str]:
    return rng.choice(WORDS["person"]), rng.choice(WORDS["society"]), rng.choice(WORDS["town"])


def _people(rng: Random, count: int) -> list[tuple[str, str]]:
    return list(zip(rng.sample(WORDS["person"], count), rng.choices(WORDS["town"], k=count), strict=True))


def _article(rng: Random, first: str, templates: Sequence[str], num_sentences: int, **known: str) -> str:
    scene = Scene(rng, WORDS, **known)
    return " ".join(scene.fill(template) for template in (first, *rng.sample(templates, num_sentences)))


def _biography(rng: Random, person: str, town: str, year: int | None = None, num_sentences: int = 4) -> str:
    first = "{person} was born in {town} in {year}, the {ordinal} child of a {trade}."
    known = {"person": person, "town": town} | ({} if year is None else {"year": str(year)})
    return _article(rng, first, BIOGRAPHY, num_sentences, **known)


def _town(rng: Random, town: str, river: str) -> str:
    first = "{town} is a small town in the hills; the river {river} flows through it."
    return _article(rng, first, TOWN, 4, town=town, river=river)


def _society(rng: Random, society: str, founder: str) -> str:
    first = "The {society} was founded in {year} by {person} with the gift of a {trade}."
    return _article(rng, first, SOCIETY, 4, society=society, person=founder)


def _passages(rng: Random, num_chars: int, depth: float, *hops: tuple[str, str]) -> str:
    """Number the passages of a many-document question: the last hop lies at `depth`, the others anywhere."""
    taken = {title for title, _ in hops}
    others: list[tuple[str, str]] = []
    people = [person for person in rng.sample(WORDS["person"], 60) if person not in taken]
    answer_free_towns = [town for town in WORDS["town"] if not any(town in text for _, text in hops)]
    while sum(len(text) for _, text in others) < num_chars or len(others) < 3:
        person = people.pop()
        others.append((person, _biography(rng, person, rng.choice(answer_free_towns))))
    for hop in hops[:-1]:
        others.insert(rng.randint(0, len(others)), hop)
    articles = insert_at_depth([f"{title}\n{text}" for title, text in others], "\n".join(hops[-1]), depth)
    return "\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(articles, start=1))
