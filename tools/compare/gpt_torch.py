"""The GPT of `ringtrain --model gpt:...` in PyTorch.

`check` compares one step of ringtrain with PyTorch: both compute the gradient of the same parameters. `train` trains the same
model from parameters of its own, to compare the perplexity. ringtrain must have been built with the feature `candle`.

    python gpt_torch.py check --ringtrain target/release/ringtrain
    python gpt_torch.py train --data book.txt --model gpt:4,4,128 --context 128 --batch-size 32 --epochs 5 --lr 0.001
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and a network with one hidden layer."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.hidden_output = nn.Linear(4 * width, width)
        for linear in [self.attention, self.attention_output, self.hidden, self.hidden_output]:
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for linear in [self.attention_output, self.hidden_output]:
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, context, width = x.shape
        parts = self.attention(self.attention_norm(x)).view(rows, context, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).reshape(rows, context, width))
        return x + self.hidden_output(functional.gelu(self.hidden(self.hidden_norm(x))))


class Embedding(nn.Module):
    """A vector for each token plus a vector for each position."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token_embedding = nn.Parameter(torch.normal(0, 0.02, (vocabulary, width)))
        self.position_embedding = nn.Parameter(torch.normal(0, 0.02, (context, width)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token_embedding[tokens] + self.position_embedding


class Output(nn.Module):
    """A layer norm and a linear layer without bias."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.normal(0, 0.02, (vocabulary, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(x), self.weight)


class Gpt(nn.Module):
    """The names of the parameters are those in a model file of ringtrain."""

    def __init__(self, sizes: str, vocabulary: int, context: int) -> None:
        super().__init__()
        layers, heads, width = (int(number) for number in sizes.removeprefix("gpt:").split(","))
        blocks = [Block(layers, heads, width) for _ in range(layers)]
        self.layers = nn.Sequential(Embedding(vocabulary, context, width), *blocks, Output(vocabulary, width))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss for each token, in nats. A window has one token more than the context."""
        outputs = self.layers(windows[:, :-1])
        return functional.cross_entropy(outputs.flatten(0, 1), windows[:, 1:].flatten())


def read_windows(path: Path, context: int, test_fraction: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the windows for training and for testing, and the number of characters in the vocabulary. Divides the text as
    ringtrain does: by bytes, at the start of a character."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    start = len(content) - math.floor(len(content) * test_fraction + 0.5)
    while start < len(content) and content[start] & 0xC0 == 0x80:
        start += 1
    tokens = {character: token for token, character in enumerate(sorted(set(content.decode())))}

    def windows(part: bytes) -> torch.Tensor:
        encoded = torch.tensor([tokens[character] for character in part.decode()])
        return encoded.unfold(0, context + 1, context) if len(encoded) > context else encoded.new_zeros(0, context + 1)

    return windows(content[:start]), windows(content[start:]), len(tokens)


def read_model_file(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Returns the tensors and the description in a model file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    description = json.loads(header.pop("__metadata__")["description"])
    values = np.frombuffer(content[8 + length :], dtype="<f4")
    tensors = {}
    for name, entry in header.items():
        start, end = (offset // 4 for offset in entry["data_offsets"])
        tensors[name] = torch.tensor(values[start:end].reshape(entry["shape"]))
    return tensors, description


def check(args: argparse.Namespace) -> None:
    """Takes one step of SGD with ringtrain, and compares its gradient with the gradient in PyTorch."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "text")
        data.write_text("It was the best of times – it was the worst of times. " * 20)

        def train(rate: float) -> dict[str, torch.Tensor]:
            model = Path(directory, "model")
            command = (
                f"{args.ringtrain} --data {data} --model gpt:2,2,16 --context 32 --epochs 1 --batch-size 1000 --optimizer sgd "
                f"--lr {rate} --save-model {model}"
            )
            subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
            return read_model_file(model)[0]

        # A step with this rate does not change a parameter.
        before, after = train(1e-30), train(1.0)
        windows, _, vocabulary = read_windows(data, 32, 0.2)
    model = Gpt("gpt:2,2,16", vocabulary, 32)
    model.load_state_dict(before)
    model.loss(windows).backward()
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        difference = (before[name] - after[name] - parameter.grad).abs().max().item() / largest
        worst = max(worst, difference)
        if difference > args.limit:
            sys.exit(f"{name}: the gradients of ringtrain and PyTorch differ by {difference:.1e} of the largest gradient")
    print(f"the gradients of ringtrain and PyTorch differ by at most {worst:.1e} of the largest gradient")


def train(args: argparse.Namespace) -> None:
    """Trains with Adam, as `ringtrain` does by default, and prints the perplexity of the test set."""
    torch.manual_seed(args.seed)
    train_windows, test_windows, vocabulary = read_windows(args.data, args.context, args.test_fraction)
    model = Gpt(args.model, vocabulary, args.context)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(train_windows)} training and {len(test_windows)} test windows, {count} parameters", flush=True)
    for epoch in range(1, args.epochs + 1):
        started = time.monotonic()
        for batch in torch.randperm(len(train_windows)).split(args.batch_size):
            optimizer.zero_grad()
            model.loss(train_windows[batch]).backward()
            optimizer.step()
        seconds = time.monotonic() - started
        with torch.no_grad():
            parts = test_windows.split(args.batch_size)
            loss = sum(model.loss(part).item() * len(part) for part in parts) / len(test_windows)
        print(
            f"epoch {epoch}/{args.epochs}: test loss {loss:.4f}, test perplexity {math.exp(loss):.4f}, "
            f"{len(train_windows) / seconds:.0f} samples/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    check_parser = commands.add_parser("check")
    check_parser.add_argument("--ringtrain", type=Path, required=True)
    check_parser.add_argument("--limit", type=float, default=1e-5)
    check_parser.set_defaults(run=check)
    train_parser = commands.add_parser("train")
    train_parser.add_argument("--data", type=Path, required=True)
    train_parser.add_argument("--model", default="gpt:4,4,128")
    train_parser.add_argument("--context", type=int, default=128)
    train_parser.add_argument("--batch-size", type=int, default=32)
    train_parser.add_argument("--epochs", type=int, default=10)
    train_parser.add_argument("--lr", type=float, default=0.001)
    train_parser.add_argument("--test-fraction", type=float, default=0.2)
    train_parser.add_argument("--seed", type=int, default=0)
    train_parser.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
