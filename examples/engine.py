"""Offline: ``sglang.Engine`` in this process, one adapter per prompt, no server.

    python examples/engine.py --model-path BASE --adapters writer=DIR critic=DIR

On a machine without a GPU, with a small model:

    SGLANG_USE_CPU_ENGINE=1 python examples/engine.py --model-path BASE --adapters writer=DIR \\
        --device cpu --attention-backend torch_native
"""

import argparse

import sglang

from scute_patches import sgl_kernel


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with one adapter per prompt")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--adapters", nargs="+", required=True, metavar="NAME=DIR", help="PEFT adapters of any method")
    parser.add_argument("--device")
    parser.add_argument("--attention-backend")
    args = parser.parse_args()

    sgl_kernel.install()  # for the CPU: sglang.Engine needs sgl_kernel before it loads plugins

    engine = sglang.Engine(
        model_path=args.model_path,
        device=args.device,
        attention_backend=args.attention_backend,
        lora_backend="scute",
        lora_paths=args.adapters,
    )
    names = [None, *(adapter.partition("=")[0] for adapter in args.adapters)]  # None: the base model
    outputs = engine.generate(["A river is"] * len(names), {"max_new_tokens": 32, "temperature": 0}, lora_path=names)
    for name, output in zip(names, outputs, strict=True):
        print(f"{name or 'base'}: {output['text']!r}")
    engine.shutdown()


if __name__ == "__main__":  # the engine starts child processes, which import this file
    main()
