"""English words and sentences of longbench_mini. All people, towns and societies are invented."""

WORDS: dict[str, tuple[str, ...]] = {
    "person": tuple(
        f"{first} {last}"
        for first in ("Mara", "Tobin", "Ilse", "Corin", "Petra", "Osric", "Wenna", "Jory", "Sable", "Anselm", "Brida")
        for last in ("Fenwick", "Harrow", "Quill", "Ashdown", "Merrow", "Tolland", "Vance", "Greaves", "Pell", "Iveson")
    ),
    "friend": ("Dorothea", "old Matthias", "Yannick", "Ursula", "young Clement", "Henrike", "Bartholomew", "Sunniva"),
    "town": tuple(
        head + tail
        for head in ("Bracken", "Old", "Thorn", "Winter", "Gull", "Amber", "Stone", "Lark")
        for tail in ("ford", "mere", "wick", "haven", "bury", "combe")
    ),
    "river": ("Issel", "Tarn Beck", "Lowen", "Marrow Water", "Sill", "Ardle", "Quern", "Fossway", "Yarrow Leat"),
    "society": tuple(
        f"{kind} of {what}"
        for kind in ("Guild", "Society", "Academy", "League")
        for what in ("Night Gardeners", "Patient Clockmakers", "Harbour Singers", "Map Menders", "Quiet Astronomers")
    ),
    "trade": ("baker", "surveyor", "weaver", "ferryman", "glazier", "beekeeper", "printer", "schoolteacher", "cooper"),
    "object": ("lantern", "compass", "ledger", "violin", "telescope", "teapot", "loom", "barometer", "music box"),
    "material": ("brass", "walnut", "blue glass", "pewter", "silver", "pine", "horn", "painted tin"),
    "building": ("bell tower", "town hall", "customs house", "old mill", "lighthouse", "library", "corn exchange"),
    "hideout": ("bell tower", "flour chest", "hollow elm", "organ loft", "dry well", "boathouse", "clock case"),
    "animal": ("goats", "herons", "hounds", "swans", "donkeys", "bees", "magpies", "otters"),
    "food": ("rye bread", "plum dumplings", "smoked trout", "barley soup", "pear cake", "goat cheese"),
    "topic": ("tides", "moths", "bridge building", "fog signals", "church bells", "river ice", "apple grafting"),
    "weather": ("thin rain", "a hard frost", "warm wind", "low cloud", "bright snow", "a sudden hailstorm"),
    "season": ("spring", "summer", "autumn", "winter"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": ("January", "March", "April", "May", "June", "August", "September", "October", "November"),
    "ordinal": ("first", "second", "third", "fourth", "fifth", "sixth", "seventh"),
    "number": ("two", "three", "five", "eight", "eleven", "fourteen", "nineteen", "twenty-six", "forty"),
    "year": tuple(str(year) for year in range(1801, 1990)),
    "amount": tuple(f"{amount},000" for amount in range(12, 96, 7)),
    "percent": tuple(str(percent) for percent in range(4, 90, 3)),
    "programme": ("harbour dredging", "rural bus", "school roof", "flood barrier", "street lighting", "well testing"),
    "sensor": ("tide gauge", "infrared camera", "salt probe", "wind vane", "acoustic buoy", "moth trap"),
    "corpus": ("Lindqvist", "Oberholt", "Marchetti", "Saltmarsh", "Tveit", "Kessler"),
    "feature": ("window seat", "battery", "back gate", "timer", "carry strap", "menu", "welcome desk", "night tariff"),
}

BIOGRAPHY = (
    "{person} kept a notebook on {topic} and filled {number} volumes before the age of thirty.",
    "For several years {person} worked as a {trade} in {town2} and was paid partly in {food}.",
    "Neighbours remembered {person} for walking to the {building} in {weather} without a coat.",
    "In {year2} {person} married a {trade2} from {town3}, and the couple kept {number2} {animal} behind the house.",
    "A {material} {object} that belonged to {person} is still shown at the {building2} of {town4} every {weekday}.",
    "Letters of {person} to the council about {topic2} were printed in {year3} and are dry but exact.",
    "The only known portrait of {person} shows a {material2} {object2} on the table and {animal2} in the background.",
    "After a quarrel over {topic3}, {person} moved to {town5} and did not come back until the {season} of {year4}.",
    "{person} disliked speeches, but once spoke for {number3} hours about {topic4} at the {building3}.",
)
TOWN = (
    "The market of {town} is held on {weekday} and is known for {food} and for its one {trade}.",
    "The {building} of {town} burned down in {year} and was rebuilt in {material} and brick within {number} years.",
    "About {amount} people live in {town}, fewer than in {year2}, when the {object} workshops were busy.",
    "Every {season} the children of {town} race paper boats while a {trade2} keeps the time.",
    "A bridge of {number2} arches was planned near {town} in {year3}, but only {number3} were ever finished.",
    "Travellers who reach {town} in {weather} are given {food2} at the {building2}, an old custom.",
    "The seal of {town} shows a {object2} between two {animal}.",
    "The road from {town} to {town2} was paved in {year4} with the money of a retired {trade3}.",
)
SOCIETY = (
    "The {society} meets every {weekday} in the {building} of {town} and serves {food} to guests.",
    "Members of the {society} pay for their seat with a {material} {object} of their own making.",
    "In {year} the {society} had {number} members; half a century later there were {number2} times as many.",
    "A dispute about {topic} split the {society} in {year2}, and the two halves met on different days.",
    "The library of the {society} holds {amount} sheets on {topic2}, sorted by smell according to a visitor.",
)
STORY = (
    "That {season} there was {weather} for {number} days, and nobody in {town} spoke of anything else.",
    "{person} sat by the {building} and mended a {material} {object} with slow hands.",
    "“You never asked about the {object2},” said {friend}, and pushed the plate of {food} aside.",
    "The {animal} had come down from the hills again, which {person} took for a good sign.",
    "Nobody answered when {person} knocked at the {building2}; only the {trade}'s dog barked twice.",
    "In the evening {friend} read aloud from a book about {topic}, and the fire went out unnoticed.",
    "On {weekday} the ferry was late, and {person2} waited with a basket of {food2} on the landing.",
    "There was an old quarrel between {person} and {person2}, and it had begun with a {object3}.",
    "A letter came from {town2}, but the {trade2} who carried it had lost the second page.",
    "“Wait until {month},” {person2} whispered, “and then we shall see what the river leaves behind.”",
    "The lamps along the {river} were lit one by one, and the whole bank smelled of {food3}.",
)
SCIENCE = (
    "Earlier work on {topic} relied on a {sensor} near {town}, which failed in {weather}.",
    "We divide the recordings into {number} parts and keep the last {number2} for testing.",
    "The error falls by {percent} percent when the {sensor2} is read every {number3} minutes instead of hourly.",
    "A baseline that always predicts the value of the day before reaches {percent2} percent.",
    "Our second model adds the {season} as an input; it helps little for {topic2}.",
    "All {amount} measurements were checked by a {trade} and a student, who agreed in {percent3} percent of cases.",
    "Ablation shows that leaving out the {sensor3} costs more than leaving out {number4} of the layers.",
    "Following {person} ({year}), we treat missing values as zero and mark them with a flag.",
    "We leave the question of {topic3} to future work, because the data cover only {number5} months.",
    "The results in {town2} are worse than those in {town3}, probably owing to {weather2}.",
)
REPORT = (
    "The committee met on {weekday} in the {building} and heard a {trade} on {topic}.",
    "Repairs to the {building2} cost {amount} crowns, {percent} percent more than was planned in {year}.",
    "The {programme} programme served {number} villages along the {river} before {month}.",
    "Auditors found that {percent2} percent of the bills for {programme2} work had no date.",
    "The council of {town} asked for {number2} more inspectors, but only {number3} posts were filled.",
    "In {year2} the office began to count {animal} near the {building3}; the count was given up in {month2}.",
    "Complaints about {programme3} fell after a {trade2} was put in charge of the desk.",
    "The report of {year3} had recommended a {sensor} at every weir; so far {number4} have been bought.",
    "Staff in {town2} were trained for {number5} days, mostly in keeping a {object} and a ledger.",
    "Spending on {programme4} will be reviewed again in the {season} under the same rules.",
)
MEETING = (
    "I would like the {feature} to be cheaper, because {percent} percent of the testers never used it.",
    "My {trade} cousin says a {material} case would survive {weather}, so we should try one.",
    "Could we postpone the talk about the {feature2} until {weekday}?",
    "The survey from {town} has {number} answers, and most of them mention the {feature3}.",
    "I have written down {topic} as an open point, although it is not on the agenda.",
    "If we order {number2} samples now, they will be here in {month}.",
    "We spent {amount} crowns on the {object} prototype, which is within the plan.",
    "I disagree about the {feature4}; in {year} we had the same idea and dropped it.",
    "Let me show the next slide, it is about {topic2} and does not take long.",
    "Right, and somebody should bring {food} the next time, the room was cold.",
)
NEWS = (
    "Residents of {town} were told on {weekday} to keep away from the {building} until further notice.",
    "“I heard a noise like {animal} on the roof,” said {person}, a {trade} who lives nearby.",
    "The mayor thanked the volunteers, who had carried {food} and blankets through {weather}.",
    "A spokeswoman for the {society} said that it was too early to speak of a cause.",
    "Damage is put at {amount} crowns; the insurer asked for {number} more weeks.",
    "Similar events in {year} led to a rule about {programme}, which was never enforced.",
    "Traffic along the {river} was stopped for {number2} hours and then moved at walking pace.",
    "Experts on {topic} from {town2} are expected on {weekday2}.",
    "School was closed on {weekday3}, and the market moved to the {building2}.",
    "The {object} that stood in the hall was found unharmed under {material} boards.",
)
