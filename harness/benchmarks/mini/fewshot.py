"""English few-shot tasks of longbench_mini: solved examples as the context, one unsolved example as the input."""

from random import Random

from harness.benchmarks.mini.text import Draft, Scene, insert_at_depth
from harness.benchmarks.mini.words import BIOGRAPHY, WORDS

QUESTIONS: dict[str, tuple[str, ...]] = {
    "Animal": ("What kept {person} company in the {building} ?", "Which {animal} guard the seal of {town} ?"),
    "Date": ("When was the {building} of {town} rebuilt ?", "In which year did {person} leave {town} ?"),
    "Food": ("What is served with {food} in {town} ?", "What did the {trade} of {town} eat in {season} ?"),
    "Reason": ("Why did the {trade} of {town} close the shop ?", "Why does {food} taste better in {weather} ?"),
    "River": ("What is the longest river near {town} ?", "Which water flows behind the {building} of {town} ?"),
    "Person": ("Who founded the {society} ?", "Who lent the {trade} a {material} {object} ?"),
    "Distance": ("How far is {town} from {town2} ?", "How far can a {trade} walk in {weather} ?"),
    "Price": ("How much does a {material} {object} cost ?", "What did {person} pay for {food} in {year} ?"),
    "Number of things": ("How many {animal} live near {town} ?", "How many people read about {topic} ?"),
    "Manner of an action": ("How do you mend a {object} ?", "How does a {trade} prepare {food} ?"),
    "Definition": ("What is a {object} ?", "What does a {trade} mean by {topic} ?"),
    "Town": ("What town has the oldest {building} ?", "Which town sells {food} every {weekday} ?"),
}

DIALOGUES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hi, do you still have my {material} {object}?",
            "Yes, it is in the {building} :)",
            "Could you bring it on {weekday}? I promised it to a {trade}.",
            "Sure, if you bring some {food}",
            "Deal!",
        ),
        "{second} will bring {first} the {material} {object} on {weekday} in exchange for {food}.",
    ),
    (
        (
            "Are we still going to {town}?",
            "I'd rather wait, they expect {weather}",
            "Oh no. {weekday} then?",
            "{weekday} is fine, meet me at the {building}",
            "ok, I'll tell {friend}",
        ),
        "{first} and {second} put off their trip to {town} until {weekday} because of {weather}.",
    ),
    (
        (
            "Guess what, {friend} won the prize for {topic}",
            "No way!! How much is it?",
            "{amount} crowns",
            "Then {friend} should pay for the {food}",
            "haha, I'll say so",
        ),
        "{friend} won {amount} crowns in a contest about {topic}.",
    ),
    (
        (
            "I lost the key of the {building} again",
            "Did you look in the {hideout}?",
            "Yes, only {animal} there",
            "Ask the {trade}, there is a second one",
            "You saved my {weekday}, thanks",
        ),
        "{first} lost the key of the {building}. {second} suggests asking the {trade} for the second one.",
    ),
)
CALLERS = ("Lena", "Ruben", "Ayla", "Milo", "Noor", "Edda", "Piet", "Suri")


def trec(rng: Random, num_chars: int, depth: float) -> Draft:
    """Questions with their class; an example of the asked class lies at `depth`."""
    classes = tuple(QUESTIONS)
    asked = rng.choice(classes)
    others = [name for name in classes if name != asked]
    evidence = _question(rng, asked) + f" {asked}"
    examples: list[str] = []
    while sum(map(len, examples)) < num_chars:
        name = rng.choice(others)
        examples.append(f"{_question(rng, name)} {name}")
    context = "\n".join(insert_at_depth(examples, evidence, depth))
    return Draft(context, _question(rng, asked), (asked,), evidence, "en", tuple(rng.sample(classes, len(classes))))


def _question(rng: Random, name: str) -> str:
    return f"Question: {Scene(rng, WORDS).fill(rng.choice(QUESTIONS[name]))}\nType:"


def triviaqa(rng: Random, num_chars: int, depth: float) -> Draft:
    """Passages with question and answer; the passage of the last question is part of the input."""
    people = rng.sample(WORDS["person"], len(WORDS["person"]))
    examples: list[str] = []
    while sum(map(len, examples)) < num_chars:
        passage, town = _passage(rng, people.pop())
        examples.append(f"{passage}{town}\n")
    passage, town = _passage(rng, people.pop())
    return Draft("".join(examples), passage, (town, town.lower()), passage, "en")


def _passage(rng: Random, person: str) -> tuple[str, str]:
    scene = Scene(rng, WORDS, person=person)
    sentences = ("{person} was born in {town} in {year}.", *rng.sample(BIOGRAPHY, 4))
    text = " ".join(scene.fill(sentence) for sentence in sentences)
    return f"Passage:\n{text}\nQuestion:\nWhere was {person} born?\nAnswer:\n", scene["town"]


def samsum(rng: Random, num_chars: int, depth: float) -> Draft:
    """Chats with their summary, lines ended by CR LF as in the published rows; the last chat is the input."""
    examples: list[str] = []
    while sum(map(len, examples)) < num_chars:
        dialogue, summary = _dialogue(rng)
        examples.append(f"{dialogue}{summary}\n")
    dialogue, summary = _dialogue(rng)
    return Draft("".join(examples), dialogue, (summary,), dialogue, "en")


def _dialogue(rng: Random) -> tuple[str, str]:
    lines, summary = rng.choice(DIALOGUES)
    first, second = rng.sample(CALLERS, 2)
    scene = Scene(rng, WORDS, first=first, second=second)
    turns = [f"{(first, second)[index % 2]}: {scene.fill(line)}" for index, line in enumerate(lines)]
    return "Dialogue: " + "\r\n".join(turns) + "\nSummary: ", scene.fill(summary)
