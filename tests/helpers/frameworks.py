"""Chat models of LangChain and LlamaIndex, as their users write them, in an environment of their own.

python tests/helpers/frameworks.py URL KEY  < [prompt, ...]  > [[text, text that was streamed, cached tokens], ...]
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ["langchain-openai==1.7.4", "llama-index-llms-openai-like==0.8.1"]  # they want an older openai than vLLM
FOLDER = Path(__file__).parents[2] / ".venv-frameworks"


def frameworks_python() -> Path:
    """The environment's, made if it is missing."""
    python, made = FOLDER / "bin" / "python", FOLDER / "made"
    if not made.is_file() or made.read_text() != "\n".join(PACKAGES):
        venv.create(FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        made.write_text("\n".join(PACKAGES))
    return python


def langchain(url: str, key: str, prompt: str) -> tuple[str, str, int]:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="nano", base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=8)
    answer = model.invoke([HumanMessage(prompt)])
    streamed = "".join(chunk.text for chunk in model.stream([HumanMessage(prompt)]))
    return answer.text, streamed, answer.usage_metadata["input_token_details"].get("cache_read", 0)


def llama_index(url: str, key: str, prompt: str) -> tuple[str, str, int]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model="nano", api_base=f"{url}/v1", api_key=key, is_chat_model=True, temperature=0, max_tokens=8)
    asked = [ChatMessage(role="user", content=prompt)]
    answer = model.chat(asked)
    streamed = list(model.stream_chat(asked))[-1].message.content
    return answer.message.content, streamed, answer.raw.usage.prompt_tokens_details.cached_tokens or 0


if __name__ == "__main__":
    prompts = json.load(sys.stdin)
    ask = {"langchain": langchain, "llama_index": llama_index}[sys.argv[3]]
    print(json.dumps([ask(*sys.argv[1:3], prompt) for prompt in prompts]))
