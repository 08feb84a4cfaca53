"""Adapters through the OpenAI client: ``model`` is ``base:adapter``.

    python examples/openai_client.py --url http://localhost:30000/v1 --adapters writer critic

SGLang reads the adapter after the colon. A ``model`` without a colon is the base model, whatever it says.
"""

import argparse
import asyncio

from openai import AsyncOpenAI


async def main() -> None:
    parser = argparse.ArgumentParser(description="Adapters through the OpenAI client")
    parser.add_argument("--url", default="http://localhost:30000/v1")
    parser.add_argument("--adapters", nargs="+", required=True, help="names of adapters that the server has loaded")
    args = parser.parse_args()
    client = AsyncOpenAI(base_url=args.url, api_key="none")
    models = await client.models.list()
    base = next(model.id for model in models.data if not getattr(model, "parent", None))

    async def ask(model: str) -> str | None:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is a river?"}], max_tokens=32, temperature=0
        )
        return answer.choices[0].message.content

    # The requests are in flight together, and the server answers them in one batch.
    names = [base, *(f"{base}:{adapter}" for adapter in args.adapters)]
    for name, answer in zip(names, await asyncio.gather(*map(ask, names)), strict=True):
        print(f"{name}: {answer!r}")


if __name__ == "__main__":
    asyncio.run(main())
