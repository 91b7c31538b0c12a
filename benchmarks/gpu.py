"""GPT-2 small on one GPU: our step in bfloat16, and PyTorch's, in turn in one run, beside the GPU's
own matrix rate.

    python benchmarks/gpu.py [--batch 32] [--rounds 5]
    python benchmarks/gpu.py --smoke      # our side alone, tiny, on the CPU

Needs a GPU and `pip install -U "jax[cuda12]"`; to compare, also PyTorch with CUDA. Each has a
process of its own, so that their CUDA libraries do not meet, and they take turns. See
benchmarks/README.md for the columns.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import measure

NEEDS = (
    "benchmarks/gpu.py needs a GPU that JAX can use: a driver, and "
    'pip install -U "jax[cuda12]" (or "jax[rocm]"). JAX {version} '
    "found {devices}. To see our side work without one, run: python benchmarks/gpu.py --smoke"
)
PRODUCT = 8192  # the size of the matrices whose product gives the GPU's rate


class Task(NamedTuple):
    """GPT-2's sizes, and the steps to time."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int  # padded
    batch: int
    steps: int  # in a round

    @property
    def parameters(self) -> int:
        """All of them; the embedding is the head too."""
        D = self.width
        return (self.vocabulary + self.context) * D + self.layers * (12 * D * D + 13 * D) + 2 * D

    @property
    def operations(self) -> float:
        """A token's: 6 for each parameter, and attention's, of which the causal half counts.
        Positions multiply nothing."""
        products = self.parameters - self.context * self.width
        return 6.0 * products + 6.0 * self.layers * self.context * self.width

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.context


SMALL = Task(layers=12, heads=12, width=768, context=1024, vocabulary=50304, batch=32, steps=10)
SMOKE = Task(layers=2, heads=2, width=32, context=16, vocabulary=128, batch=2, steps=2)


def main():
    arguments = parse()
    task = (SMOKE if arguments.smoke else SMALL)._replace(
        **{"batch": arguments.batch} if arguments.batch else {}
    )
    if arguments.serve:
        serve(*SIDES[arguments.serve](task, arguments.smoke))
        return
    if not arguments.smoke:
        check_gpu()
    absent = missing_torch() if not arguments.smoke else "Left out of the smoke run."
    names = ["ours", *([] if absent else ["PyTorch"])]
    with contextlib.ExitStack() as running:
        sides = {name: running.enter_context(Side(name, arguments)) for name in names}
        rounds = [
            {name: side.turn() for name, side in sides.items()} for _ in range(arguments.rounds)
        ]
    report(task, rounds, absent)


def check_gpu():
    """End with code 2, and what is needed, where JAX has no GPU. Asked in another process, which
    then holds none."""
    code = (
        "import jax, json; d = jax.devices(); print(json.dumps([jax.__version__, d[0].platform, "
        "str(d)]))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, platform, devices = json.loads(asked.stdout.splitlines()[-1])
    if platform != "gpu":
        print(NEEDS.format(version=version, devices=devices), file=sys.stderr)
        raise SystemExit(2)


def missing_torch() -> str:
    """Why PyTorch does not take part, or nothing."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install torch"
    code = "import torch; print(torch.cuda.is_available(), torch.__version__)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return (
        ""
        if asked.stdout.startswith("True")
        else f"This PyTorch has no CUDA: {asked.stdout.split()[1]}"
    )


class Side:
    """A process with one of the rivals, which runs when it is told to."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        flags = ["--smoke"] if arguments.smoke else []
        flags += [f"--batch={arguments.batch}"] if arguments.batch else []
        command = [sys.executable, __file__, f"--serve={name}", *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = name

    def __enter__(self):
        self.turn()  # compiles, and warms up
        return self

    def turn(self) -> dict[str, float]:
        """What one round measured."""
        with contextlib.suppress(BrokenPipeError):  # told below
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(
            f"The process of {self.name!r} ended with code {self.process.wait()}; what it said "
            "stands above."
        )

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(step: Callable[[int], float], extra: Callable[[], dict[str, float]], steps: int):
    """A line in, a round of `steps` steps, a line out: seconds a step, the loss, and what `extra`
    measures."""
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step(steps)
        seconds = (time.perf_counter() - start) / steps
        print(json.dumps({"seconds": seconds, "loss": loss} | extra()), flush=True)


def ours(task: Task, smoke: bool):
    """Our gradient: parameters and AdamW in float32, the model in bfloat16, cuDNN's attention, and
    no loop over the layers, as the rival has none."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the rival has memory on the same GPU
    if smoke:
        measure.virtual_devices(1)
    import jax
    import jax.numpy as jnp
    import optax

    from parallax import precision, step
    from parallax.models import gpt2

    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    attend = gpt2.attention if smoke else cudnn
    sizes = {
        name: getattr(task, name) for name in ("layers", "heads", "width", "context", "vocabulary")
    }
    config = gpt2.Config(**sizes)
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    loss = functools.partial(gpt2.loss, attend=attend, unroll=task.layers)
    grad = precision.mixed(jax.value_and_grad(loss), jnp.bfloat16)
    train = jax.jit(step.make(grad, optimizer), donate_argnums=0)

    @jax.jit
    def start():
        model = gpt2.GPT2(config, key=jax.random.key(0))
        return step.State(model, optimizer.init(model), jnp.zeros((), jnp.int32))

    windows = jax.random.randint(
        jax.random.key(1), (task.batch, task.context + 1), 0, task.vocabulary
    )
    held = [start()]

    def steps(count):
        for _ in range(count):
            held[0], info = train(held[0], (windows, None))
        return float(info.loss)

    size, count = (256, 2) if smoke else (PRODUCT, 20)
    x = jnp.full((size, size), 1 / size, jnp.bfloat16)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ x, x))

    def matrix_rate():
        jax.block_until_ready(product(x))
        begin = time.perf_counter()
        jax.block_until_ready(product(x))
        return {"rate": 2.0 * size**3 * count / (time.perf_counter() - begin)}

    return steps, matrix_rate, task.steps


def pytorch(task: Task, smoke: bool):
    """The same in PyTorch, as one writes it for speed: compiled, bfloat16 autocast, fused AdamW,
    its own attention."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    device = "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    class Block(nn.Module):
        """Pre-norm attention and MLP."""

        def __init__(self):
            super().__init__()
            D = task.width
            self.attention_norm, self.mlp_norm = nn.LayerNorm(D), nn.LayerNorm(D)
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x):
            B, T, D = x.shape
            heads = (
                self.qkv(self.attention_norm(x))
                .view(B, T, 3, task.heads, D // task.heads)
                .permute(2, 0, 3, 1, 4)
            )
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
            return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    class GPT2(nn.Module):
        """With the head tied to the embedding."""

        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(task.vocabulary, task.width)
            self.wpe = nn.Embedding(task.context, task.width)
            self.blocks = nn.ModuleList(Block() for _ in range(task.layers))
            self.norm = nn.LayerNorm(task.width)
            for weight in self.parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, windows):
            tokens, targets = windows[:, :-1], windows[:, 1:]
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.wte.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = GPT2().to(device)
    compiled = model if smoke else torch.compile(model)
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    windows = torch.randint(0, task.vocabulary, (task.batch, task.context + 1), device=device)

    def steps(count):
        for _ in range(count):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(windows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return steps, dict, task.steps


SIDES = {"ours": ours, "PyTorch": pytorch}


def report(task: Task, rounds: list[dict[str, dict[str, float]]], absent: str):
    """Print what was predicted, the table and the ratio."""
    rate = max(round_["ours"]["rate"] for round_ in rounds)
    work = task.operations * task.tokens
    print(
        f"{task.parameters / 1e6:.1f} M parameters, {task.batch} x {task.context} tokens a step, "
        f"bfloat16, one device: {work / 1e12:.3g} TFLOP a step;\nat the measured matrix rate, "
        f"{rate / 1e12:.3g} TFLOP/s (best round, bfloat16), a step takes {1e3 * work / rate:.4g} "
        f"ms, and {rate / task.operations:.4g} tokens/s are the limit\n"
    )
    seconds = {
        name: statistics.median(round_[name]["seconds"] for round_ in rounds) for name in rounds[0]
    }
    lines = [
        {
            "step": name,
            "ms": measure.milliseconds(time_),
            "tokens/s": f"{task.tokens / time_:.0f}",
            "of matrix rate": f"{work / time_ / rate:.1%}",
            "loss": f"{rounds[-1][name]['loss']:.3f}",
        }
        for name, time_ in seconds.items()
    ]
    print(measure.table(lines), "\n")
    print(
        f"ours to PyTorch: {seconds['ours'] / seconds['PyTorch']:.3f} of its time"
        if not absent
        else f"No PyTorch: {absent}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=None, help=f"sequences ({SMALL.batch})")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="our side alone, tiny, on the CPU: to see that it works",
    )
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
