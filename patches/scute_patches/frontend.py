"""Lets every call of a frontend program (``sglang.lang``) name the adapter that answers it.

``gen``, ``gen_int``, ``gen_string`` and ``select`` take ``lora_path``, the name that SGLang's ``/generate`` has for it.
``program.run(..., lora_path="a")``, or an item ``{"question": ..., "lora_path": "a"}`` of ``run_batch``, sets the
adapter of all calls that name none, in forks too; a program with a parameter ``lora_path`` of its own gets it as its
argument, as ever. Every request of a call carries the adapter, also those that only fill the prefix cache, because the
cache is keyed by adapter.

A call with an adapter that fails (unknown adapter, server without adapters) is never answered by the base model.
Nothing after it in its program is executed, and reading what it should have produced raises ``AdapterError``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from copy import copy
from functools import cache
from itertools import takewhile
from types import NoneType
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import ProgramState, ProgramStateGroup, StreamExecutor
from sglang.lang.ir import (
    SglArgument,
    SglCommitLazy,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglFunction,
    SglGen,
    SglSamplingParams,
    SglSelect,
    SglSeparateReasoning,
    SglVarScopeBegin,
    SglVarScopeEnd,
)
from sglang.lang.tracer import StopTracing, TracerProgramState, TracingScope
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scute_patches.signatures import require


class AdapterError(RuntimeError):
    """A call that named an adapter failed; the message says which call, which adapter, and what the server said."""


# --- Choosing the adapter -------------------------------------------------------------------------------------------


def _call(original: Callable[..., SglExpr], *args: Any, lora_path: str | None = None, **kwargs: Any) -> SglExpr:
    """``sgl.gen``, ``gen_int``, ``gen_string``, ``select``: the expression remembers the adapter."""
    expr = original(*args, **kwargs)
    _check(lora_path)
    expr.lora_path = lora_path  # pyright: ignore[reportAttributeAccessIssue]
    return expr


def _check(lora_path: object) -> None:
    # An SglExpr stands for a value that is not known while SGLang traces a program.
    if lora_path == "" or not isinstance(lora_path, (str, SglExpr, NoneType)):
        raise ValueError(f"lora_path must be the name of an adapter, or None for the base model, not {lora_path!r}")


def _run_program(
    original: Callable[..., ProgramState],
    program: SglFunction,
    backend: Any,
    func_args: tuple[Any, ...],
    func_kwargs: dict[str, Any],
    default_sampling_para: SglSamplingParams,
    *args: Any,
    **kwargs: Any,
) -> ProgramState:
    """``lora_path`` becomes a default beside the default sampling parameters, which forks inherit."""
    if "lora_path" in func_kwargs and not _has_parameter(program):
        func_kwargs = dict(func_kwargs)
        default_sampling_para = copy(default_sampling_para)  # one object serves all items of a batch
        lora_path = func_kwargs.pop("lora_path")
        _check(lora_path)
        default_sampling_para.lora_path = lora_path  # pyright: ignore[reportAttributeAccessIssue]
    return original(program, backend, func_args, func_kwargs, default_sampling_para, *args, **kwargs)


def _has_parameter(program: SglFunction) -> bool:
    parameters = inspect.signature(program.func).parameters.values()
    return any(p.name == "lora_path" or p.kind is p.VAR_KEYWORD for p in parameters)


def _add_images(original: Callable[..., None], self: RuntimeEndpoint, s: StreamExecutor, data: dict[str, Any]) -> None:
    """Called with the body of every ``/generate`` request that an executor makes."""
    original(self, s, data)
    if (lora_path := getattr(s, "lora_path", None)) is not None:
        data["lora_path"] = lora_path


# --- Executing ------------------------------------------------------------------------------------------------------


def _execute(original: Callable[..., None], self: StreamExecutor, other: SglExpr | str) -> None:
    if isinstance(other, SglExprList):  # comes back here with each of its members
        original(self, other)
        return
    if _failure(self) is not None:
        _skip(self, other)
        return
    lora_path = getattr(other, "lora_path", None) or getattr(self.default_sampling_para, "lora_path", None)
    self.lora_path = lora_path  # pyright: ignore[reportAttributeAccessIssue]
    if lora_path is None:
        original(self, other)
        return
    try:
        if not isinstance(self.backend, RuntimeEndpoint):
            raise RuntimeError(
                f"{type(self.backend).__name__} serves no adapters, use sgl.RuntimeEndpoint or sgl.Runtime"
            )
        original(self, other)
    except Exception as error:
        message = f'{_describe(other)} with the adapter "{lora_path}" failed: {_reason(self, error)}'
        if not self.use_thread:
            raise AdapterError(message) from error
        # Not raised: SGLang's worker would end, and a later wait for this executor would never return.
        self.error_ = AdapterError(message)
        self.adapter_error = self.error_  # pyright: ignore[reportAttributeAccessIssue]
        _skip(self, other)


def _describe(expr: SglExpr | str) -> str:
    if isinstance(expr, (SglGen, SglSelect)):
        return f'{"gen" if isinstance(expr, SglGen) else "select"}("{expr.name}")'
    return "caching the prefix" if isinstance(expr, SglCommitLazy) else str(expr)


def _reason(executor: StreamExecutor, error: Exception) -> str:
    if executor.stream and isinstance(error, KeyError):
        # SGLang streams an error as an event without "text", and its client drops the message. Ask without streaming.
        try:
            executor.backend.commit_lazy_operations(executor)
        except Exception as answer:
            return _server_message(answer)
    return _server_message(error)


def _server_message(error: Exception) -> str:
    """``RuntimeEndpoint`` raises ``RuntimeError`` with the body of the response."""
    if not isinstance(error, RuntimeError):
        return f"{type(error).__name__}: {error}"
    body = error.args[0] if error.args else None
    if isinstance(body, dict) and isinstance(body.get("error"), dict) and "message" in body["error"]:
        return str(body["error"]["message"])
    return str(error)


def _skip(executor: StreamExecutor, expr: SglExpr | str) -> None:
    """Wake up whoever waits for the variable of ``expr``, which has no value."""
    if isinstance(expr, (SglGen, SglSelect, SglVarScopeBegin, SglVarScopeEnd, SglSeparateReasoning)):
        executor.variables.pop(expr.name, None)
        executor.meta_info.pop(expr.name, None)
        executor.variable_event[expr.name].set()
        if executor.stream_var_event is not None:
            executor.stream_var_event[expr.name].set()


def _end(original: Callable[..., None], self: StreamExecutor) -> None:
    """The destructors come here. The traceback of a refused request leaves the executor to the garbage collector; if
    that runs while a thread starts, ``original`` waits forever for a lock of ``threading`` which its caller holds."""
    if self.is_finished:
        self.backend.end_program(self)
    else:
        original(self)


# --- Reading results ------------------------------------------------------------------------------------------------


def _failure(executor: StreamExecutor) -> AdapterError | None:
    """The first failure, which stays: SGLang's worker puts what ends it into ``error_``."""
    return getattr(executor, "adapter_error", None)


def _raise_failure(executor: StreamExecutor) -> None:
    if (failure := _failure(executor)) is not None:
        raise AdapterError(*failure.args)


def _get_var(original: Callable[..., Any], self: StreamExecutor, name: str) -> Any:
    try:
        return original(self, name)
    except KeyError:
        _raise_failure(self)
        raise


def _get_meta_info(original: Callable[..., Any], self: StreamExecutor, name: str, timeout: float | None = None) -> Any:
    meta_info = original(self, name, timeout)
    if meta_info is None:
        _raise_failure(self)
    return meta_info


def _read_all(original: Callable[..., Any], self: StreamExecutor) -> Any:
    """``StreamExecutor.text`` and ``messages``."""
    result = original(self)
    _raise_failure(self)
    return result


def _text_iter(
    original: Callable[..., Iterator[str]], self: ProgramState, var_name: str | None = None
) -> Iterator[str]:
    executor = self.stream_executor
    try:
        yield from original(self, var_name)
    except KeyError:
        _raise_failure(executor)
        raise
    if var_name is None or var_name not in executor.variables:
        _raise_failure(executor)


async def _text_async_iter(
    original: Callable[..., AsyncIterator[Any]],
    self: ProgramState,
    var_name: str | None = None,
    return_meta_data: bool = False,
) -> AsyncIterator[Any]:
    executor = self.stream_executor
    try:
        async for item in original(self, var_name, return_meta_data):
            yield item
    except KeyError:
        _raise_failure(executor)
        raise
    if var_name is None or var_name not in executor.variables:
        _raise_failure(executor)


def _fork(original: Callable[..., list[StreamExecutor]], self: StreamExecutor, *args: Any, **kwargs: Any) -> Any:
    """A fork of a failed program would go on from a text that lacks the failed answer."""
    self.sync()
    _raise_failure(self)
    forks = original(self, *args, **kwargs)
    if _failure(self) is not None:  # while it filled the prefix cache
        for fork in forks:
            fork.end()
        _raise_failure(self)
    return forks


def _join(original: Callable[..., None], self: ProgramStateGroup, mode: str = "gather_variable") -> None:
    """Gathering would leave a failed fork out of the lists, and shift the answers of the others."""
    for state in self.states:
        state.sync()
    for state in self.states:
        if _failure(state.stream_executor) is not None:
            for s in self.states:
                s.stream_executor.end()
            _raise_failure(state.stream_executor)
    original(self, mode)


# --- The prefix that a batch has in common --------------------------------------------------------------------------

_batch: ContextVar[Sequence[dict[str, Any]]] = ContextVar("batch", default=())


def _run_program_batch(
    original: Callable[..., Any],
    program: SglFunction,
    backend: Any,
    batch_arguments: Sequence[dict[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    token = _batch.set(batch_arguments)
    try:
        return original(program, backend, batch_arguments, *args, **kwargs)
    finally:
        _batch.reset(token)


def _cache_program(original: Callable[..., None], program: SglFunction, backend: Any) -> None:
    """Fill the prefix cache for every adapter that at least two items of the batch begin with."""
    if hasattr(backend, "endpoint"):
        backend = backend.endpoint
    tracer = _BeginTracer.trace(program, backend)
    lora_path = getattr(tracer.first_call, "lora_path", None)
    if isinstance(lora_path, str):
        adapters = Counter({lora_path: len(_batch.get()) or 2})
    elif isinstance(lora_path, SglArgument):
        default = inspect.signature(program.func).parameters[lora_path.name].default
        default = default if isinstance(default, str) else None
        adapters = Counter(item.get(lora_path.name, default) for item in _batch.get())
    elif not _has_parameter(program):
        adapters = Counter(item.get("lora_path") for item in _batch.get())
    else:
        adapters = Counter()
    if set(adapters) <= {None}:
        original(program, backend)
        return
    if len(tracer.prefix) <= 64:  # as SGLang's cache_program
        return
    executors = []
    for adapter in [adapter for adapter, items in adapters.items() if items > 1]:
        params = SglSamplingParams()
        params.lora_path = adapter  # pyright: ignore[reportAttributeAccessIssue]
        executor = StreamExecutor(backend, {}, params, chat_template=None, stream=False)
        executor.text_ = tracer.prefix
        executor.submit(SglCommitLazy())
        executor.end()
        executors.append(executor)
    for executor in executors:
        executor.sync()  # an adapter that fails here fails again, and says so, in the items that name it


class _BeginTracer(TracerProgramState):
    """Traces a program up to its first call of the model; SGLang's own tracing of the prefix ends at an argument.

    ``prefix``: the constant text that the program begins with. ``first_call``: the call, or ``None``.
    """

    first_call: SglGen | SglSelect | None = None

    @classmethod
    def trace(cls, program: SglFunction, backend: Any) -> _BeginTracer:
        arguments = {name: SglArgument(name, None) for name in program.arg_names}  # pyright: ignore[reportArgumentType]
        arguments.update(program.bind_arguments)
        tracer = cls(backend, arguments, only_trace_prefix=True)
        try:
            with TracingScope(tracer):
                program.func(tracer, **arguments)
        except (StopTracing, TypeError, AttributeError):  # placeholders support little; as extract_prefix_by_tracing
            pass
        return tracer

    @property
    def prefix(self) -> str:
        constants = takewhile(lambda node: isinstance(node, SglConstantText), self.flatten_nodes())
        return "".join(node.value for node in constants)

    def _execute(self, other: SglExpr) -> _BeginTracer:
        if isinstance(other, (SglGen, SglSelect)):
            self.first_call = other
            raise StopTracing
        if isinstance(other, SglArgument):
            self._append_node(other)
        else:
            super()._execute(other)
        return self


# --- Installing -----------------------------------------------------------------------------------------------------

_GEN = (
    *("name", "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k"),
    *("min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "return_text_in_logprobs", "dtype", "choices", "choices_method", "regex", "json_schema"),
)
_GEN_TYPED = tuple(
    name for name in _GEN if name not in ("min_tokens", "dtype", "choices", "choices_method", "regex", "json_schema")
)

_HOOKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "api.gen": (_call, _GEN),
    "api.gen_int": (_call, _GEN_TYPED),
    "api.gen_string": (_call, _GEN_TYPED),
    "api.select": (_call, ("name", "choices", "temperature", "choices_method")),
    "interpreter.run_program": (
        _run_program,
        (
            *("program", "backend", "func_args", "func_kwargs", "default_sampling_para", "stream", "sync"),
            "use_thread",
        ),
    ),
    "interpreter.run_program_batch": (
        _run_program_batch,
        (
            *("program", "backend", "batch_arguments", "default_sampling_para", "num_threads", "progress_bar"),
            "generator_style",
        ),
    ),
    "interpreter.cache_program": (_cache_program, ("program", "backend")),
    "interpreter.StreamExecutor._execute": (_execute, ("self", "other")),
    "interpreter.StreamExecutor.end": (_end, ("self",)),
    "interpreter.StreamExecutor.get_var": (_get_var, ("self", "name")),
    "interpreter.StreamExecutor.get_meta_info": (_get_meta_info, ("self", "name", "timeout")),
    "interpreter.StreamExecutor.text": (_read_all, ("self",)),
    "interpreter.StreamExecutor.messages": (_read_all, ("self",)),
    "interpreter.StreamExecutor.fork": (_fork, ("self", "size", "position_ids_offset")),
    "interpreter.ProgramState.text_iter": (_text_iter, ("self", "var_name")),
    "interpreter.ProgramState.text_async_iter": (_text_async_iter, ("self", "var_name", "return_meta_data")),
    "interpreter.ProgramStateGroup.join": (_join, ("self", "mode")),
    "backend.runtime_endpoint.RuntimeEndpoint._add_images": (_add_images, ("self", "s", "data")),
}

# Used as they are.
_USED: dict[str, tuple[str, ...]] = {
    "interpreter.StreamExecutor": (
        *("backend", "arguments", "default_sampling_para", "chat_template", "stream", "num_api_spec_tokens"),
        "use_thread",
    ),
    "backend.runtime_endpoint.RuntimeEndpoint.commit_lazy_operations": ("self", "s"),
    "tracer.TracerProgramState": ("backend", "arguments", "only_trace_prefix"),
    "tracer.TracerProgramState._execute": ("self", "other"),
}


@cache
def install() -> None:
    """Change ``sglang.lang`` in this process; names that modules have already imported from it change too.

    Raises ``IncompatibleSGLangError``, before anything is changed, if a symbol is not as in the SGLang this was written
    for. More than once does no harm.
    """
    for name, parameters in _USED.items():
        require(f"sglang.lang.{name}", parameters)
    for name, (_, parameters) in _HOOKS.items():
        require(f"sglang.lang.{name}", parameters)
    for name, (hook, _) in _HOOKS.items():
        HookRegistry.register(f"sglang.lang.{name}", hook, HookType.AROUND)
    HookRegistry.apply_hooks()
