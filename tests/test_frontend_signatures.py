"""Scute changes SGLang's frontend only if its symbols are the ones that Scute was written for."""

import pytest

from scute_patches import frontend, signatures


def test_installed_sglang_is_the_one_that_the_frontend_was_written_for():
    frontend.install()


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        ("sglang.lang.interpreter.StreamExecutor.fork", ("self", "size"), r"fork\(self, size, position_ids_offset\)"),
        ("sglang.lang.interpreter.StreamExecutor.branch", ("self",), r"no sglang.lang.interpreter.StreamExecutor.bran"),
        ("sglang.lang.adapters.gen", ("name",), r"no sglang.lang.adapters.gen"),
        ("sglang.lang.backend.runtime_endpoint.RuntimeEndpoint", ("self", "base_url"), r"RuntimeEndpoint\(base_url, "),
    ],
)
def test_other_symbols_are_refused_in_one_line(target: str, parameters: tuple[str, ...], message: str):
    with pytest.raises(signatures.IncompatibleSGLangError, match=message) as error:
        signatures.require(target, parameters)
    assert "\n" not in str(error.value)
    assert "install sglang==0.5.23" in str(error.value)


def test_install_changes_nothing_if_a_symbol_is_other_than_expected(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = {target: list(registered) for target, registered in HookRegistry._hooks.items()}
    monkeypatch.setitem(frontend._USED, "tracer.TracerProgramState", ("backend", "arguments"))
    with pytest.raises(signatures.IncompatibleSGLangError, match="TracerProgramState"):
        frontend.install.__wrapped__()
    assert {target: list(registered) for target, registered in HookRegistry._hooks.items()} == hooks
