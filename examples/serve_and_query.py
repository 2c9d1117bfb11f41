"""Query a server with the official `openai` client: documents beside the messages, the encoder on and off.

comb serve OUTPUT_DIR --port 8000 &
python examples/serve_and_query.py [http://localhost:8000] [API_KEY]
"""

import sys

from openai import OpenAI

DOCUMENTS = [
    "Anna Bell works at Solara Foods. Her home is in Rome.",
    {"title": "Firms", "text": "Solara Foods makes chairs."},
]


def main(url: str = "http://localhost:8000", key: str = "none") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id
    for encoder in (True, True, False):  # encoded, then from the cache, then the plain backbone
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Where does Anna Bell live?"}],
            max_tokens=24,
            temperature=0,
            extra_body={"documents": DOCUMENTS, "comb": {"encoder": encoder}},
        )
        states = [document["state"] for document in answer.comb["documents"]]
        print(f"encoder {'on ' if encoder else 'off'} {states}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
