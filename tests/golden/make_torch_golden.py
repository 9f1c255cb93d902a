"""Makes `torch_transformer.npz`: what PyTorch's own Transformer computes.

PyTorch is no dependency of the package. The file in the repository was made with
torch 2.13.0 (CPU) and numpy 2.4.6 on Python 3.11, in an environment of its own:

    python3.11 -m venv FOLDER
    FOLDER/bin/pip install torch numpy
    FOLDER/bin/python tests/golden/make_torch_golden.py

Layers, stacks, loss and Adam are PyTorch's. Written out here, from the paper, is what
it lacks: the embedding's scale, the sinusoids, the shift of the target, the schedule.
Weights are drawn by NumPy and stored in float32, everything is computed in float64, and
results are rounded to float32. In the file:

    batch/NAME               token ids and lengths, the same for every case
    CASE/names, CASE/shapes  [P] and [P, 2], PyTorch's parameters; vectors are [n, 0]
    CASE/weights             all parameters, one after the other in that order
    CASE/gradients           of loss / tokens, in the same order
    CASE/attention/MODULE    [B, H, T, S], each attention's weights
    CASE/encoder             [B, S, D], the encoder's output
    CASE/logits              [B, T, V]
    CASE/loss, nll, correct  sums over real target tokens; loss is the smoothed one
    post/adam/losses         [U], `loss` before each update of Adam
    post/adam/gradients      [U, all], of loss / tokens, before each update
    post/adam/weights        after the last update

Decoder rows at padding are not to be compared: in PyTorch they see no padding, here
they do, and nothing that counts depends on them.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

# All sizes differ, so that no two axes can be taken for one another.
BATCH, SOURCE, TARGET, VOCAB = 3, 7, 5, 23
D_MODEL, HEADS, D_FF, LAYERS = 12, 3, 17, 2
PAD, EOS, BOS, FIRST = 0, 1, 3, 4
SMOOTHING = 0.1
FACTOR, WARMUP, UPDATES = 0.05, 2, 3

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A variant of the model; `small` parameters are shrunk.

    Norms of large inputs do not show their epsilon. Behind a small norm and a small
    feed-forward layer the variance is about 1e-3, and they do.
    """

    seed: int
    norm_first: bool = False
    activation: str = "relu"
    epsilon: float = 1e-6
    final_norm: bool = False
    untied: bool = False  # three tables, and an output bias
    small: tuple[str, ...] = ()


BEFORE_NORM2 = ("encoder.layers.0.norm1.", "encoder.layers.0.linear2.")
CASES = {
    "post": Case(seed=1, small=BEFORE_NORM2),
    "pre": Case(seed=2, norm_first=True, final_norm=True),
    "gelu": Case(
        seed=3,
        activation="gelu",
        epsilon=1e-5,
        final_norm=True,
        untied=True,
        small=(*BEFORE_NORM2, "encoder.layers.1.norm2.", "decoder.layers.1.norm3."),
    ),
}


def make_batch() -> Arrays:
    """Draws ragged pairs; a target's input is BOS and then all but its last token."""
    rng = np.random.default_rng(0)
    lengths = {"source": (4, SOURCE, 2), "target": (TARGET, 3, 1)}
    batch = {
        "source": np.full((BATCH, SOURCE), PAD),
        "target_in": np.full((BATCH, TARGET), PAD),
        "target_out": np.full((BATCH, TARGET), PAD),
    }
    for row, (source, target) in enumerate(zip(*lengths.values(), strict=True)):
        batch["source"][row, :source] = [*rng.integers(FIRST, VOCAB, source - 1), EOS]
        words = rng.integers(FIRST, VOCAB, target - 1)
        batch["target_in"][row, :target] = [BOS, *words]
        batch["target_out"][row, :target] = [*words, EOS]
    batch["source_length"], batch["target_length"] = map(np.array, lengths.values())
    return batch


def sinusoid(length: int) -> torch.Tensor:
    """PE[t, 2i] = sin(t / 10000^(2i / d)), PE[t, 2i + 1] = cos(the same), t from 0."""
    table = torch.zeros(length, D_MODEL)
    for t in range(length):
        for i in range(D_MODEL // 2):
            table[t, 2 * i] = math.sin(t / 10000 ** (2 * i / D_MODEL))
            table[t, 2 * i + 1] = math.cos(t / 10000 ** (2 * i / D_MODEL))
    return table


class Model(nn.Module):
    """Embedding and positions around PyTorch's two stacks."""

    def __init__(self, case: Case) -> None:
        super().__init__()

        def layer(kind: Callable[..., nn.Module]) -> Any:
            return kind(
                D_MODEL,
                HEADS,
                D_FF,
                dropout=0.0,
                activation=case.activation,
                layer_norm_eps=case.epsilon,
                batch_first=True,
                norm_first=case.norm_first,
            )

        def last() -> nn.Module | None:
            return nn.LayerNorm(D_MODEL, eps=case.epsilon) if case.final_norm else None

        encoder_layer = layer(nn.TransformerEncoderLayer)
        decoder_layer = layer(nn.TransformerDecoderLayer)
        # Nested tensors would take a shortcut of inference and cut padding off.
        self.encoder = nn.TransformerEncoder(
            encoder_layer, LAYERS, last(), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder_layer, LAYERS, last())
        self.target_table = nn.Embedding(VOCAB, D_MODEL)
        self.source_table = self.target_table
        self.output = nn.Linear(D_MODEL, VOCAB, bias=case.untied)
        if case.untied:
            self.source_table = nn.Embedding(VOCAB, D_MODEL)
        else:
            self.output.weight = self.target_table.weight

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def embed(table: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
            return math.sqrt(D_MODEL) * table(tokens) + sinusoid(tokens.shape[1])

        source, target = batch["source"], batch["target_in"]
        encoded = self.encoder(
            embed(self.source_table, source), src_key_padding_mask=source == PAD
        )
        later = torch.triu(torch.ones(TARGET, TARGET, dtype=torch.bool), diagonal=1)
        decoded = self.decoder(
            embed(self.target_table, target),
            encoded,
            tgt_mask=later,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return {"encoder": encoded, "logits": self.output(decoded)}


def draw_weights(model: Model, case: Case) -> None:
    """Sets every parameter to float32 numbers drawn at random, around 1 for gains."""
    rng = np.random.default_rng(case.seed)
    for name, parameter in model.named_parameters():
        values = 0.3 * rng.normal(size=parameter.shape)
        if "norm" in name and name.endswith("weight"):
            values += 1
        if name.startswith(case.small):
            values *= 0.03
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def keep_attention(model: Model) -> dict[str, torch.Tensor]:
    """Returns what will hold the weights of every attention of the next pass."""
    kept = {}

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(ask, with_kwargs=True)
            module.register_forward_hook(
                lambda module, args, output, name=name: kept.update({name: output[1]})
            )
    return kept


def losses(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the sums of a batch.

    The paper's code (Tensor2Tensor) spreads the smoothing e over the V - 1 others.
    PyTorch spreads its own, f, over all V: f / V each, and 1 - f + f / V at the true
    token. With f = e V / (V - 1) these are e / (V - 1) and 1 - e.
    """
    smoothing = SMOOTHING * VOCAB / (VOCAB - 1)
    kind = {"ignore_index": PAD, "reduction": "sum"}
    smoothed = nn.CrossEntropyLoss(label_smoothing=smoothing, **kind)
    plain = nn.CrossEntropyLoss(**kind)
    flat = logits.reshape(-1, VOCAB), targets.reshape(-1)
    right = (logits.argmax(-1) == targets) & (targets != PAD)
    return {"loss": smoothed(*flat), "nll": plain(*flat), "correct": right.sum()}


def learning_rate(step: int) -> float:
    """Equation 3 of the paper, times a factor; `step` counts from 1."""
    return FACTOR * D_MODEL**-0.5 * min(step**-0.5, step * WARMUP**-1.5)


def flat(model: Model, gradients: bool = False) -> torch.Tensor:
    """Returns a copy of all parameters, or of their gradients, as one vector."""
    values = [x.grad if gradients else x for x in model.parameters()]
    return torch.cat([x.detach().reshape(-1) for x in values if x is not None])


def run_case(
    case: Case, batch: dict[str, torch.Tensor], updates: int
) -> dict[str, torch.Tensor]:
    """Returns weights, outputs and gradients; with `updates`, what Adam makes of it."""
    model = Model(case)
    draw_weights(model, case)
    attention = keep_attention(model)
    found = {"weights": flat(model)}
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    totals, slopes = [], []
    for step in range(1, max(updates, 1) + 1):
        outputs = model(batch)
        sums = losses(outputs["logits"], batch["target_out"])
        adam.zero_grad()
        (sums["loss"] / batch["target_length"].sum()).backward()
        totals.append(sums["loss"])
        slopes.append(flat(model, gradients=True))
        if step == 1:
            found |= outputs | sums | {"gradients": slopes[0]}
            found |= {f"attention/{name}": x for name, x in attention.items()}
        if updates:
            adam.param_groups[0]["lr"] = learning_rate(step)
            adam.step()
    if updates:
        found["adam/losses"] = torch.stack(totals)
        found["adam/gradients"] = torch.stack(slopes)
        found["adam/weights"] = flat(model)
    return found


def parameter_list(model: Model) -> Arrays:
    """Returns names and shapes of the parameters in the order of `flat`."""
    names, shapes = [], []
    for name, parameter in model.named_parameters():
        names.append(name)
        shapes.append((*parameter.shape, 0)[:2])
    return {"names": np.array(names), "shapes": np.array(shapes, np.int32)}


def to_array(tensor: torch.Tensor) -> np.ndarray:
    array = tensor.detach().numpy()
    return array.astype(np.float32 if array.dtype == np.float64 else np.int32)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    batch = {name: torch.from_numpy(array) for name, array in make_batch().items()}
    arrays = {f"batch/{name}": to_array(value) for name, value in batch.items()}
    for name, case in CASES.items():
        found = run_case(case, batch, UPDATES if name == "post" else 0)
        result = {key: to_array(value) for key, value in found.items()}
        result |= parameter_list(Model(case))
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
    path = pathlib.Path(__file__).with_name("torch_transformer.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {len(arrays)} arrays, torch {torch.__version__}")


if __name__ == "__main__":
    main()
