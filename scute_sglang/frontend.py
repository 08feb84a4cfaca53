"""``import scute_sglang.frontend`` lets programs in SGLang's frontend language choose an adapter per call.

    import sglang as sgl
    import scute_sglang.frontend

    @sgl.function
    def review(s, text):
        s += sgl.user(text)
        s += sgl.assistant(sgl.gen("draft", lora_path="writer", max_tokens=64))
        s += sgl.user("Is it good?")
        s += sgl.assistant(sgl.select("verdict", ["yes", "no"], lora_path="judge"))

``scute_patches.frontend`` says what changes.
"""

from scute_patches.frontend import AdapterError, install

__all__ = ["AdapterError"]

install()
