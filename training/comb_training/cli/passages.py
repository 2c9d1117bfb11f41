"""Ten passages with a question about each, written for `comb demo`: what they say is true, the wording is ours.

The questions were chosen among several a passage by what full recompute answers with smollm2-135m (a model of its size
can't be asked much); no other method was asked for the choice.
"""

from __future__ import annotations

from comb.documents.document import Document, Example

DOCUMENTS = 4
_OTHERS = (3, 5, 8)  # how many places further on the passages stand that a question gets beside its own

_PASSAGES = (
    (
        "The Suez Canal joins the Mediterranean with the Red Sea. It was dug in ten years by a company that the "
        "French diplomat Ferdinand de Lesseps had founded, and the first ships passed through it in November 1869. "
        "Both seas stand at nearly the same height, so the canal needs no locks. Before it was built, a ship from "
        "London to Bombay had to sail around the Cape of Good Hope.",
        "Which sea does the Suez Canal join with the Mediterranean?",
        "the Red Sea",
    ),
    (
        "Lake Baikal in southern Siberia is the deepest lake on Earth: its floor lies 1,642 metres below the surface. "
        "More than three hundred rivers run into the lake, but only one river, the Angara, flows out of it. In winter "
        "the ice is thick enough to carry lorries. The Baikal seal lives nowhere else, and it is the only seal that "
        "keeps to fresh water.",
        "How deep is Lake Baikal?",
        "1,642 metres",
    ),
    (
        "The Rosetta Stone is a slab of dark rock with one decree in three scripts: hieroglyphs, Demotic and Greek. "
        "French soldiers found it in July 1799 while they were repairing a fort near the town of Rashid in Egypt. The "
        "British Museum in London has shown it since 1802. Twenty years later Jean-François Champollion announced "
        "that he could read the hieroglyphs.",
        "Which museum has shown the Rosetta Stone since 1802?",
        "the British Museum",
    ),
    (
        "The volcano Krakatoa, between Java and Sumatra, blew itself apart on 27 August 1883. The explosion was heard "
        "on the island of Rodrigues, 4,800 kilometres away, where it was taken for the guns of a ship. Most of the "
        "36,000 people who died were killed by waves. For months the ash made red sunsets all over the world. In 1927 "
        "a new volcano, Anak Krakatau, rose from the sea at the same place.",
        "What is the name of the new volcano that rose from the sea?",
        "Anak Krakatau",
    ),
    (
        "In 1901 divers who were looking for sponges brought up a lump of bronze from an ancient wreck near the Greek "
        "island of Antikythera. Inside were at least thirty gears, whose teeth had been cut by hand two thousand "
        "years ago. Someone who turned the handle could read from its dials where the sun and the moon stood. The "
        "Antikythera mechanism is kept in the National Archaeological Museum in Athens.",
        "In which city is the Antikythera mechanism kept?",
        "Athens",
    ),
    (
        "The Øresund Bridge between Denmark and Sweden was opened in July 2000. From Malmö it leads over nearly eight "
        "kilometres to Peberholm, an island that was heaped up for this purpose. There the road goes down into a "
        "tunnel and comes up beside the airport of Copenhagen. A bridge over the whole strait would have stood in the "
        "way of aircraft. Nobody lives on Peberholm.",
        "Which two countries does the Øresund Bridge join?",
        "Denmark and Sweden",
    ),
    (
        "Alexander Fleming discovered penicillin at St Mary's Hospital in London in September 1928: mould had spoiled "
        "one of his dishes, and around the mould the bacteria were dead. He could not make enough of it. That took "
        "until the war, when Howard Florey and Ernst Chain led a team in Oxford. The three men shared the Nobel Prize "
        "for medicine in 1945.",
        "In which year was penicillin discovered?",
        "1928",
    ),
    (
        "Saffron comes from a purple crocus that flowers in autumn. Each flower has three red threads, which are "
        "picked by hand in the morning and dried the same day. About 150 flowers are needed for a single gram, and so "
        "no spice costs more. Most of the world's saffron is grown in Iran, and a good part of the rest in Kashmir "
        "and Spain.",
        "How many flowers are needed for a gram of saffron?",
        "150",
    ),
    (
        "The space probe Voyager 1 was launched on 5 September 1977. It flew past Jupiter in March 1979, where it "
        "found volcanoes on the moon Io, and past Saturn in November 1980. In August 2012 it became the first thing "
        "made by people to reach the space between the stars. Voyager 1 carries a gilded record with greetings in 55 "
        "languages, with music, and with the sounds of whales.",
        "In which year was Voyager 1 launched?",
        "1977",
    ),
    (
        "The Svalbard Seed Vault lies deep in a mountain near the town of Longyearbyen. Norway opened it in February "
        "2008 to keep seeds for the rest of the world. It has room for 4.5 million samples at eighteen degrees below "
        "zero. The first seeds were taken out in 2015, to replace a collection in Aleppo that the war in Syria had "
        "cut off.",
        "Near which town does the Svalbard Seed Vault lie?",
        "Longyearbyen",
    ),
)


def demo_questions() -> list[Example]:
    """A question about each passage, over it and three others; the right one stands at each place in turn."""
    passages = [Document(text, id=f"passage-{number}") for number, (text, _, _) in enumerate(_PASSAGES)]
    questions = []
    for number, (_, query, answer) in enumerate(_PASSAGES):
        documents = [passages[(number + further) % len(passages)] for further in _OTHERS]
        documents.insert(number % DOCUMENTS, passages[number])
        questions.append(Example(tuple(documents), query, answer, id=f"passage-{number}"))
    return questions
