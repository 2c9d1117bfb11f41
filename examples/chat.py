"""A conversation over documents: each turn goes on from the cache of the one before, and may bring more documents.

python examples/chat.py [MODEL] [METHOD]     # smollm2-135m primed
"""

import sys

from comb import Document, PICEngine

VELL = Document("The harbour of Vell was dredged in 1911. Ships of eight metres' draught enter it.", id="vell")
MARTA = Document("Marta Osk has piloted ships into Vell since 1998. Before that she fished for herring.", id="marta")


def main(model: str = "smollm2-135m", method: str = "primed") -> None:
    chat = PICEngine.from_pretrained(model, method=method).conversation([VELL])
    for question, more in (("When was the harbour dredged?", []), ("Who pilots the ships there?", [MARTA])):
        answer = chat.ask(question, more, max_new_tokens=24)
        report = answer.report
        states = {document.id: document.state for document in report.documents}
        print(f"{question}\n  {answer.text}\n  {states}, {report.continued_tokens} tokens were there already")


if __name__ == "__main__":
    main(*sys.argv[1:])
