"""An agent that knows nothing of comb: skills in its prompt come again in another order, under a header that changes.

    comb serve MODEL --method legolink:16 --comb-segments auto
    python examples/agent.py MODEL [http://localhost:8000/v1]

A prefix cache ends at the first line, which is another one in each turn. What the server found again stands behind "of
them there": tokens of skills that it had compiled, wherever they stood.
"""

import sys
import time

from openai import OpenAI

SKILLS = {
    "search": """Call search with a few words when a question needs facts that you don't have. It gives five results,
each with a title, an address and a summary. Read the summaries first, open a page only if they don't answer, and never
search for the same words twice. Say where an answer comes from.""",
    "files": """Call read with a path to see a file, and write with a path and its whole text to change it. Paths begin
at the project's folder. Read a file before you change it, change no more than was asked for, and say at the end which
files are other than before. Files of more than a thousand lines are read in parts.""",
    "tests": """Call test with the name of a test, or nothing to run them all, when something was changed. Look at the
first failure alone, find its cause before you change anything, and run the test again. A test that fails for another
reason than before is a step ahead. Never change a test to make it pass.""",
}
ORDERS = (("search", "files", "tests"), ("tests", "search", "files"), ("files", "tests", "search"), ("tests", "files"))


def main(model: str, url: str = "http://localhost:8000/v1", key: str = "none") -> None:
    client = OpenAI(base_url=url, api_key=key)
    for turn, order in enumerate(ORDERS, 1):
        skills = "\n\n".join(f"<document name={name}>\n{SKILLS[name]}\n</document>" for name in order)
        prompt = f"It is {time.strftime('%H:%M:%S')}, turn {turn}.\n{skills}\n\nWhat do you do first?"
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=16, temperature=0
        )
        found = (answer.model_extra or {}).get("comb", {})
        print(f"turn {turn}: {answer.usage.prompt_tokens} tokens, {found.get('linked_tokens', 0)} of them there")
        time.sleep(1)  # its tools run; the server compiles what it has seen twice


if __name__ == "__main__":
    main(*sys.argv[1:])
