"""Words and sentence patterns of the closed world.

Everything the generator can say stands here, so that the tokenizer can keep these words whole and a reader can see
at a glance what the nano backbone has been taught. Patterns are format strings: `{s}` is the subject (a name or a
pronoun), `{p}` its possessive form, `{v}` the value of the fact.
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words(
    "Mary Sandra Anna Clara Emma Grace Helen Irene Julia Karen Laura Maria Nora Olive Paula Rosa Sarah "
    "Tessa Vera Wendy Alice Beth Diana Fiona Gloria Hannah Isabel Jane Linda Monica"
)
MEN = _words(
    "John Daniel Adam Brian Carl David Eric Frank George Henry Ivan James Kevin Leo Martin Oscar Peter "
    "Robert Simon Victor Albert Bruce Colin Dennis Edgar Felix Gordon Hugo Ian Jacob"
)
FIRST_NAMES = tuple(name for pair in zip(WOMEN, MEN, strict=True) for name in pair)
LAST_NAMES = _words(
    "Bell Carter Dixon Ellis Fisher Grant Harper Ingram Jensen Keller Lambert Morgan Nolan Osborne Palmer "
    "Quinn Reed Sutton Turner Vance Walker Young Abbott Brooks Cole Dawson Evans Foster Gibson Hayes "
    "Irwin Joyce Knight Lawson Mason Norton Parker Rhodes Stone Tucker"
)
COMPANY_HEADS = _words(
    "Solara Norvik Altona Brightwell Calder Delmar Everest Fairmont Glenbrook Halcyon Ivory Juniper "
    "Kestrel Lumina Meridian Nimbus Orchard Pinnacle Quartz Riverside Summit Tamarind Umber Vertex "
    "Westport Zenith Amber Beacon Cobalt Dorado Ember Falcon Granite Harbor Indigo Jasper Kingston Laurel "
    "Maple Nova"
)
COMPANY_TAILS = _words("Foods Works Group Labs Trading Brothers Partners Systems Supply Holdings Goods Industries")
CITIES = _words(
    "Rome Paris London Berlin Madrid Vienna Lisbon Dublin Prague Warsaw Oslo Athens Cairo Tokyo Delhi "
    "Lima Boston Chicago Denver Seattle Toronto Sydney Geneva Milan Naples Munich Hamburg Krakow Budapest "
    "Helsinki Stockholm Zurich Brussels Porto Seville Florence Glasgow Oxford Kyoto Nairobi"
)
INSTRUMENTS = _words(
    "cello violin piano flute guitar harp trumpet drums clarinet banjo organ oboe viola tuba lute horn"
)
DISHES = _words(
    "pasta rice soup bread cheese salad curry pizza noodles apples fish beans pancakes mushrooms dumplings tomatoes"
)
PRODUCTS = _words(
    "chairs lamps boats clocks shoes bicycles carpets candles bottles engines toys mirrors tents ladders "
    "pianos gloves windows kettles tractors umbrellas"
)
YEARS = tuple(str(year) for year in range(1950, 2010))

PLACES = _words(
    "bathroom hallway garden office bedroom kitchen library cellar attic basement garage school park "
    "market museum station"
)
MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")


@dataclass(frozen=True)
class Relation:
    """One kind of fact: how documents state it, how questions ask for it and how the answer says it."""

    values: tuple[str, ...]
    statements: tuple[str, ...]
    queries: tuple[str, ...]
    answer: str


EMPLOYER = "employer"
PERSON_RELATIONS: dict[str, Relation] = {
    EMPLOYER: Relation(
        (),
        ("{s} works at {v}.", "{s} has a job at {v}.", "{p} employer is {v}."),
        ("Where does {s} work?", "Who is the employer of {s}?"),
        "{s} works at {v}.",
    ),
    "home": Relation(
        CITIES,
        ("{s} lives in {v}.", "{p} home is in {v}.", "{s} has a flat in {v}."),
        ("Where does {s} live?", "In which city does {s} live?"),
        "{s} lives in {v}.",
    ),
    "instrument": Relation(
        INSTRUMENTS,
        ("{s} plays the {v}.", "{s} is learning the {v}.", "{p} instrument is the {v}."),
        ("What does {s} play?", "Which instrument does {s} play?"),
        "{s} plays the {v}.",
    ),
    "dish": Relation(
        DISHES,
        ("{s} likes to eat {v}.", "{p} favourite food is {v}.", "{s} often cooks {v}."),
        ("What does {s} like to eat?", "What is the favourite food of {s}?"),
        "{s} likes {v}.",
    ),
}
COMPANY_RELATIONS: dict[str, Relation] = {
    "seat": Relation(
        CITIES,
        ("{s} is based in {v}.", "{p} main office is in {v}.", "{s} has its headquarters in {v}."),
        ("Where is {s} based?", "In which city is {s} based?"),
        "{s} is based in {v}.",
    ),
    "product": Relation(
        PRODUCTS,
        ("{s} makes {v}.", "{s} is known for its {v}.", "{p} main product is {v}."),
        ("What does {s} make?", "What is the main product of {s}?"),
        "{s} makes {v}.",
    ),
    "year": Relation(
        YEARS,
        ("{s} was founded in {v}.", "{s} opened its doors in {v}.", "{p} first year was {v}."),
        ("When was {s} founded?", "In which year was {s} founded?"),
        "{s} was founded in {v}.",
    ),
}
# A two-document question names a person and asks for a fact of the employer; its answer spells the bridge out.
BRIDGE_QUERIES: dict[str, tuple[str, ...]] = {
    "seat": ("Where is the employer of {s} based?", "In which city is the company of {s} based?"),
    "product": ("What does the employer of {s} make?", "What is the main product of the company of {s}?"),
    "year": ("When was the employer of {s} founded?", "In which year was the company of {s} founded?"),
}
PLACE_QUERY = "Where is {s}?"
PLACE_ANSWER = "{s} is in the {v}."
