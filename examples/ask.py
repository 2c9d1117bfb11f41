"""Ask over documents that come again in another order: each is compiled once, and linked wherever it stands.

python examples/ask.py [MODEL] [METHOD]     # smollm2-135m legolink:16; any Hub id, folder or GGUF file works
"""

import sys

from comb import Document, PICEngine

DOCUMENTS = [
    Document(
        "The harbour of Vell was dredged in 1911. Since then ships of eight metres' draught can enter it.", id="vell"
    ),
    Document("Marta Osk has piloted ships into Vell since 1998. Before that she fished for herring.", id="marta"),
    Document(
        "Herring is salted in the long shed behind the harbour, and sold in barrels of a hundred kilograms.",
        id="herring",
    ),
]


def main(model: str = "smollm2-135m", method: str = "legolink:16") -> None:
    engine = PICEngine.from_pretrained(model, method=method)
    for question, documents in (
        ("When was the harbour dredged?", DOCUMENTS),
        ("Who pilots the ships?", DOCUMENTS[::-1]),  # another order: nothing is compiled again
    ):
        answer = engine.ask(question, documents, max_new_tokens=24)
        print(f"{question}\n  {answer.text}")
        states = {document.id: document.state for document in answer.report.documents}
        print(f"  {states}, first token after {1000 * answer.report.ttft_s:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
