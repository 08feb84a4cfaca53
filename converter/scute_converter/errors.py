"""The one error of the package: an adapter that is not served exactly is refused with it."""


class AdapterError(ValueError):
    """An adapter that cannot be served exactly; the message is one line.

    ``adapter``: its name. ``where``: the tensor, config field or file. ``problem``: what is wrong with it.
    ``remedy``: what its owner can do.
    """

    def __init__(self, adapter: str, where: str, problem: str, remedy: str) -> None:
        super().__init__(" ".join(f"adapter {adapter!r}: {where}: {problem}; {remedy}".split()))
