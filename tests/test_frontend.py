"""Frontend programs choose an adapter per call, and get what /generate gives for that adapter."""
# A type checker reads the annotations of SGLang: @sgl.function makes a plain function there, without lora_path.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false

import asyncio
import re
import warnings
from itertools import pairwise
from typing import Any

import pytest
import requests
import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend

from scute_sglang.frontend import AdapterError

ADAPTERS = ("lora", "dora")
MODELS = (None, *ADAPTERS)
TOLERANCE = 1e-4  # of a log-probability in fp32 on the CPU, when the same tokens are batched otherwise


@pytest.fixture(scope="module")
def backend(server) -> sgl.RuntimeEndpoint:
    return sgl.RuntimeEndpoint(server.url)


@pytest.fixture(autouse=True)
def _default_backend(backend: sgl.RuntimeEndpoint):
    sgl.set_default_backend(backend)
    yield
    sgl.set_default_backend(None)  # pyright: ignore[reportArgumentType]


def generate(server: Any, text: str | list[str], lora_path: str | None, **fields: Any) -> Any:
    """The oracle: the same request without the frontend."""
    sampling = {"temperature": 0, "max_new_tokens": 8, **fields.pop("sampling_params", {})}
    body = {"text": text, "lora_path": lora_path, "return_logprob": True, "sampling_params": sampling, **fields}
    response = requests.post(server.url + "/generate", json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def assert_same_answer(meta_info: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = (info["output_token_logprobs"] for info in (meta_info, expected["meta_info"]))
    assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
    assert [logprob for logprob, _, _ in ours] == pytest.approx([logprob for logprob, _, _ in theirs], abs=TOLERANCE)


@sgl.function
def ask(s, prompt):
    s += prompt
    s += sgl.gen("answer", max_tokens=8, temperature=0, return_logprob=True)


@sgl.function
def ask_named(s, prompt, lora_path=None):
    s += prompt
    s += sgl.gen("answer", max_tokens=8, temperature=0, return_logprob=True, lora_path=lora_path)


def test_adapters_answer_differently(server):
    """What the other tests rest on: mistaking one model for another is seen."""
    first = [generate(server, "The quick brown", model)["meta_info"]["output_token_logprobs"][0] for model in MODELS]
    logprobs = sorted(logprob for logprob, _, _ in first)
    assert min(b - a for a, b in pairwise(logprobs)) > 100 * TOLERANCE


def test_each_call_has_its_own_adapter(server):
    @sgl.function
    def chain(s):
        s += "The quick brown"
        for name, model in zip("xyz", (ADAPTERS[0], None, ADAPTERS[1]), strict=True):
            s += sgl.gen(name, max_tokens=8, temperature=0, return_logprob=True, lora_path=model)
            s += " and then"

    state = chain.run()
    text = "The quick brown"
    for name, model in zip("xyz", (ADAPTERS[0], None, ADAPTERS[1]), strict=True):
        expected = generate(server, text, model)
        assert_same_answer(state.get_meta_info(name), expected)
        assert state[name] == expected["text"]
        text += expected["text"] + " and then"
    assert state.text() == text


@pytest.mark.parametrize("model", MODELS)
def test_default_of_a_run(server, model):
    state = ask.run("Adapters share", lora_path=model) if model else ask.run("Adapters share")
    assert_same_answer(state.get_meta_info("answer"), generate(server, "Adapters share", model))


def test_a_call_overrides_the_default_and_forks_inherit_it(server):
    @sgl.function
    def program(s):
        s += "Adapters share one base"
        forks = s.fork(2)
        forks[0] += sgl.gen("x", max_tokens=8, temperature=0, return_logprob=True)
        forks[1] += sgl.gen("x", max_tokens=8, temperature=0, return_logprob=True, lora_path=ADAPTERS[1])
        s["infos"] = [fork.get_meta_info("x") for fork in forks]
        forks.join()

    state = program.run(lora_path=ADAPTERS[0])
    for meta_info, model in zip(state["infos"], ADAPTERS, strict=True):
        assert_same_answer(meta_info, generate(server, "Adapters share one base", model))
    assert len(state["x"]) == 2


def test_a_parameter_of_the_program_stays_its_own(server):
    state = ask_named.run("yes no", lora_path=ADAPTERS[1])
    assert_same_answer(state.get_meta_info("answer"), generate(server, "yes no", ADAPTERS[1]))


@pytest.mark.parametrize("program", [ask, ask_named])
@pytest.mark.parametrize("num_threads", [1, "auto"])
def test_an_adapter_per_item_of_a_batch(server, program, num_threads):
    items = [{"prompt": f"item {i}", "lora_path": MODELS[i % 3]} for i in range(6)]
    before = [dict(item) for item in items]
    states = program.run_batch(items, num_threads=num_threads)
    for item, state in zip(before, states, strict=True):
        assert_same_answer(state.get_meta_info("answer"), generate(server, item["prompt"], item["lora_path"]))


@pytest.mark.parametrize("model", MODELS)
def test_streaming(server, model):
    expected = generate(server, "The lazy dog", model)
    assert "".join(ask_named.run("The lazy dog", model, stream=True).text_iter("answer")) == expected["text"]
    assert "".join(ask_named.run("The lazy dog", model, stream=True).text_iter()) == "The lazy dog" + expected["text"]

    async def stream() -> str:
        return "".join(
            [part async for part in ask_named.run("The lazy dog", model, stream=True).text_async_iter("answer")]
        )

    assert asyncio.run(stream()) == expected["text"]


@pytest.mark.parametrize("call", ["regex", "int", "choices"])
def test_constrained_calls(server, call):
    calls = {
        "regex": lambda model: sgl.gen("x", regex="(yes|no) [0-9]{3}", temperature=0, lora_path=model),
        "int": lambda model: sgl.gen_int("x", max_tokens=5, temperature=0, lora_path=model),
        "choices": lambda model: sgl.gen("x", choices=["true", "false", "yes"], lora_path=model),
    }
    pattern = {"regex": "(yes|no) [0-9]{3}", "int": r"[-+]?[0-9]+[ \n]*", "choices": "true|false|yes"}[call]

    @sgl.function
    def program(s, model):
        s += "Answer: "
        s += calls[call](model)

    for model in ADAPTERS:
        value = program.run(model)["x"]
        assert re.fullmatch(pattern, value)
        if call == "regex":
            assert value == generate(server, "Answer: ", model, sampling_params={"regex": pattern})["text"]


def assert_same_scores(ours: list[Any], theirs: list[Any]) -> None:
    """Tokens and log-probabilities; the first position of a request has none."""
    assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
    assert len(ours) > 2
    assert [lp for lp, _, _ in ours[1:]] == pytest.approx([lp for lp, _, _ in theirs[1:]], abs=TOLERANCE)


def test_select_scores_with_the_adapter(server):
    choices = ["the quick fox", "one model", "9 dogs"]

    @sgl.function
    def program(s, model):
        s += "Adapters name: "
        s += sgl.select("x", choices, lora_path=model)

    for model in MODELS:
        state = program.run(model)
        full = generate(
            server,
            ["Adapters name: " + choice for choice in choices],
            model,
            logprob_start_len=0,
            sampling_params={"max_new_tokens": 0},
        )
        for ours, answer in zip(state.get_meta_info("x")["input_token_logprobs"], full, strict=True):
            assert_same_scores(ours, answer["meta_info"]["input_token_logprobs"][-len(ours) :])
        assert state["x"] in choices


def test_prefixes_are_cached_for_the_adapter(server, backend):
    prefix = "Adapters share one base model; each request names the adapter that answers it. " * 2

    @sgl.function
    def forked(s):
        s += prefix
        forks = s.fork(2)
        forks += sgl.gen("x", max_tokens=1, lora_path=None)
        s["cached"] = [fork.get_meta_info("x")["cached_tokens"] for fork in forks]
        forks.join()

    @sgl.function
    def batched(s, question):
        s += prefix + question
        s += sgl.gen("answer", max_tokens=1)

    tokens = generate(server, prefix, None)["meta_info"]["prompt_tokens"]
    backend.flush_cache()
    assert min(forked.run(lora_path=ADAPTERS[0])["cached"]) >= tokens - 1
    # The cache is keyed by adapter: the prefix of one is not the prefix of another.
    assert generate(server, prefix, ADAPTERS[1], return_logprob=False)["meta_info"]["cached_tokens"] == 0

    backend.flush_cache()
    states = batched.run_batch([{"question": q, "lora_path": ADAPTERS[i]} for q, i in (("1", 0), ("2", 0), ("3", 1))])
    cached = [state.get_meta_info("answer")["cached_tokens"] for state in states]
    assert min(cached[:2]) >= tokens - 2  # two items share it
    assert cached[2] == 0  # not worth a request of its own


def refused(name: str, call: str = "gen") -> Any:
    return pytest.raises(AdapterError, match=rf'^{call}.*with the adapter "{name}" failed: .*{name}')


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("no_warnings")
def test_an_unknown_adapter_is_an_error_in_the_program(server, stream):
    @sgl.function
    def program(s, name):
        s += "The"
        s += sgl.gen("first", max_tokens=4, temperature=0, lora_path=ADAPTERS[0])
        s += sgl.gen("answer", max_tokens=4, lora_path=name)
        s += " and"
        s += sgl.gen("later", max_tokens=4)

    def run():
        return program.run("nobody", stream=stream)

    assert run()["first"] == generate(server, "The", ADAPTERS[0], sampling_params={"max_new_tokens": 4})["text"]
    for read in (
        lambda state: state["answer"],
        lambda state: state["later"],
        lambda state: state.text(),
        lambda state: state.messages(),
        lambda state: state.get_meta_info("answer"),
        lambda state: state.fork(2),
        lambda state: list(state.text_iter()),
        lambda state: list(state.text_iter("answer")) and state["answer"],
    ):
        with refused("nobody"):
            read(run())
    state = run()
    state.sync()
    assert isinstance(state.error(), AdapterError)


@pytest.mark.usefixtures("no_warnings")
def test_an_unknown_adapter_in_a_choice_a_fork_a_default_and_a_batch(server):
    @sgl.function
    def choose(s):
        s += "Is it? "
        s += sgl.select("x", ["yes", "no"], lora_path="nobody")

    @sgl.function
    def forked(s, names):
        s += "The"
        forks = s.fork(len(names))
        forks += [sgl.gen("x", max_tokens=4, lora_path=name) for name in names]
        forks.join()

    with refused("nobody", "select"):
        choose.run()["x"]
    with refused("nobody"):
        forked.run([ADAPTERS[0], "nobody", ADAPTERS[1]])
    with refused("nobody", "caching the prefix"):
        forked.run([None, None], lora_path="nobody")
    with refused("nobody"):
        ask.run("The", lora_path="nobody", use_thread=False)
    good, bad = ask.run_batch([{"prompt": "The", "lora_path": name} for name in (ADAPTERS[0], "nobody")])
    assert_same_answer(good.get_meta_info("answer"), generate(server, "The", ADAPTERS[0]))
    with refused("nobody"):
        bad["answer"]


@pytest.mark.parametrize("name", ["", 3, ["lora"]])
def test_what_is_no_name_is_refused(name):
    for call in (
        lambda: sgl.gen("x", lora_path=name),
        lambda: sgl.gen_string("x", lora_path=name),
        lambda: sgl.select("x", ["a", "b"], lora_path=name),
        lambda: ask.run("The", lora_path=name),
    ):
        with pytest.raises(ValueError, match="name of an adapter"):
            call()


def test_other_backends_serve_no_adapters():
    with pytest.raises(AdapterError, match="failed: BaseBackend serves no adapters"):
        ask.run("The", lora_path=ADAPTERS[0], backend=BaseBackend())["answer"]
