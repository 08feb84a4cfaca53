"""Several adapters in one program of SGLang's frontend language: per call, in forks, in a choice, streamed.

    python examples/frontend_adapters.py --url http://localhost:30000 --adapters writer critic

The adapters are the names that the server knows (``--lora-paths writer=DIR critic=DIR``).
"""
# A type checker reads the annotations of SGLang: @sgl.function makes a plain function there, without lora_path.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false

import argparse

import sglang as sgl

import scute_sglang.frontend


@sgl.function
def discuss(s, topic, adapters):
    s += sgl.user("Write one sentence about " + topic)
    forks = s.fork(len(adapters))
    forks += [sgl.assistant(sgl.gen("draft", lora_path=adapter, max_tokens=32, temperature=0)) for adapter in adapters]
    forks.join()
    for adapter, draft in zip(adapters, s["draft"], strict=True):
        s += sgl.user(f"{adapter} wrote: {draft} Is that a good sentence?")
        s += sgl.assistant(sgl.select("verdict_" + adapter, ["yes", "no"], lora_path=adapters[-1]))
    s += sgl.user("How many drafts were there?")
    s += sgl.assistant(sgl.gen("count", regex="[0-9]", max_tokens=4, temperature=0))  # the base model


@sgl.function
def answer(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Several adapters in one frontend program")
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--adapters", nargs="+", required=True, help="names of adapters that the server has loaded")
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.url))

    state = discuss.run("rivers", args.adapters)
    for adapter, draft in zip(args.adapters, state["draft"], strict=True):
        print(f"{adapter}: {draft!r}, good: {state['verdict_' + adapter]}")
    print("count:", state["count"])

    print("streamed:", end=" ")
    for text in answer.run("What is a river?", lora_path=args.adapters[0], stream=True).text_iter("answer"):
        print(text, end="", flush=True)
    print()

    # One batch, an adapter per item.
    items = [{"question": "What is a river?", "lora_path": adapter} for adapter in args.adapters]
    for item, state in zip(items, answer.run_batch(items), strict=True):
        print(f"{item['lora_path']}: {state['answer']!r}")

    try:
        answer.run("What is a river?", lora_path="no-such-adapter")["answer"]
    except scute_sglang.frontend.AdapterError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
