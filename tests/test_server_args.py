"""Modes of the server in which adapters are not served: refused at start, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from scute_patches import sgl_kernel

sgl_kernel.install()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from scute_patches.server_args import refuse_unsupported  # noqa: E402


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match="--lora-backend scute does not serve adapters with") as caught:
        refuse_unsupported(ServerArgs(model_path="none", **fields))
    assert option in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_served_is_not() -> None:
    refuse_unsupported(ServerArgs(model_path="none", tp_size=2, chunked_prefill_size=7, enable_mixed_chunk=True))
