"""The cases: which optimizer steps are timed, and on which parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cadam import Adam, CAdam, CAmsGrad
from cadam.native.loader import package_library

Shape = tuple[int, ...]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BYTES_PER_ELEMENT = 28
"""Memory traffic of Adam in float32: it reads p, g, m and v and writes p, m and v."""
IDS_PER_BATCH = 260_000
"""10,000 examples of 26 fields."""
SPARSE_TABLES = (
    ("zipf", 5_000_000, 16),
    ("zipf", 1_000_000, 10),
    ("fields", 1_000_000, 16),
    ("hot", 1_000_000, 16),
    ("uniform", 1_000_000, 16),
    ("skewed", 1_000_000, 16),
)
"""Distribution of the ids, number of rows and width of each table of the sparse cases."""


@dataclass
class Contender:
    """One optimizer of a case. Only `step` is timed; `prepare` runs before it and provides new gradients."""

    name: str
    step: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Case:
    """Contenders that do the same work."""

    name: str
    peer: str
    """The contender that ratios refer to."""
    contenders: Callable[[], list[Contender]]
    """A function that builds the contenders. Parameters exist only while their case runs."""
    elements: int = 0
    """Number of parameters, for the time that memory traffic alone takes. It is measured for large cases only."""
    rounds: int = 15
    repeat: int = 1
    """Steps per time measurement."""


# Contenders ----------------------------------------------------------------------------------------------------


def dense_contender(
    name: str, make: MakeOptimizer, shapes: Sequence[Shape], device: str, dtype: torch.dtype = torch.float32
) -> Contender:
    """Build a contender with dense gradients, which get new memory addresses before each step, as in training."""
    params = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.1) for shape in shapes]
    gradients = [torch.randn_like(p) for p in params]
    optimizer = make(list(params))

    def renew_gradients() -> None:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = None
            p.grad = gradient.clone()

    return Contender(name, optimizer.step, renew_gradients)


def sparse_contender(
    name: str,
    make: MakeOptimizer,
    id_batches: list[Tensor],
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
) -> Contender:
    """Build a contender with one embedding table, whose sparse gradient has the next batch of ids at each step."""
    device, count = id_batches[0].device, len(id_batches[0])
    table = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype).normal_(0, 0.01))
    values = torch.randn(count, width, device=device, dtype=dtype)
    batches = cycle(id_batches)

    def renew_gradient() -> None:
        table.grad = torch.sparse_coo_tensor(next(batches)[None], values, table.shape, check_invariants=False)

    return Contender(name, make([table]).step, renew_gradient)


def tables_contender(name: str, make: MakeOptimizer, tables: int, device: str) -> Contender:
    """Build a contender with many small embedding tables, each with a sparse gradient for 64 ids."""
    rows, width, count = 1000, 16, 64
    params = [nn.Parameter(torch.zeros(rows, width, device=device)) for _ in range(tables)]
    ids = torch.randint(rows, (tables, 1, count), device=device)
    values = torch.randn(tables, count, width, device=device)

    def renew_gradients() -> None:
        for p, ids_of_table, values_of_table in zip(params, ids, values, strict=True):
            p.grad = torch.sparse_coo_tensor(ids_of_table, values_of_table, p.shape, check_invariants=False)

    return Contender(name, make(params).step, renew_gradients)


def captured(contender: Contender) -> Contender:
    """Capture the step of a contender in a CUDA graph, which the new contender replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    contender.prepare()
    with torch.cuda.stream(stream):
        for _ in range(3):
            contender.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contender.step()

    def replay(keep_alive: Contender = contender) -> None:
        graph.replay()

    return Contender(contender.name, replay)


def cpu_limit(elements: int) -> Contender:
    """Build a contender that only moves the bytes of an Adam step, with the same number of threads."""
    library = package_library()
    # Random values, because pages of zeros share one page of physical memory until they are written.
    tensors = [torch.randn(elements) for _ in range(4)]
    addresses = [tensor.data_ptr() for tensor in tensors]

    def move(keep_alive: list[Tensor] = tensors) -> None:
        library.c.cadam_memory_traffic(*addresses, elements, library.parallel_for)

    return Contender("limit", move)


def cuda_limit(elements: int) -> Contender:
    """Build a contender that copies as many bytes on the device as an Adam step reads and writes."""
    source = torch.randn(elements * BYTES_PER_ELEMENT // 8, device="cuda")
    target = torch.empty_like(source)
    return Contender("limit", lambda: target.copy_(source))


def named_cadam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build CAdam with named parameters, as `CAdam(model.named_parameters())` does."""
    return CAdam([(f"layers.{number}.weight", p) for number, p in enumerate(params)])


def dense_optimizers(device: str) -> dict[str, MakeOptimizer]:
    """Collect the optimizers for dense gradients: those of cadam, of torch and of other installed packages."""
    makers: dict[str, MakeOptimizer] = {
        "torch Adam fused": lambda p: torch.optim.Adam(p, fused=True),
        "torch Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
        "torch Adam loop": lambda p: torch.optim.Adam(p, foreach=False, fused=False),
        "cadam.CAdam": lambda p: CAdam(p),
        "cadam.CAdam, named": named_cadam,
        "cadam.CAdam, not counting": lambda p: CAdam(p, track_alignment=False),
        "cadam.CAmsGrad": lambda p: CAmsGrad(p),
        "cadam.Adam": lambda p: Adam(p),
    }
    if device == "cpu" and find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        makers["DeepSpeed CPUAdam"] = lambda p: DeepSpeedCPUAdam(p)
    if find_spec("pytorch_optimizer"):
        from pytorch_optimizer import AdamP

        makers["pytorch-optimizer AdamP, cautious"] = lambda p: AdamP(p, cautious=True)
    if find_spec("timm"):
        from timm.optim import create_optimizer_v2

        makers["timm cadamw"] = lambda p: create_optimizer_v2(p, "cadamw")
    return makers


# Shapes and ids ------------------------------------------------------------------------------------------------


def resnet50_shapes(base: int) -> list[Shape]:
    """Return the shapes of the 161 parameters of a ResNet-50 whose first layer has `base` channels instead of 64."""
    shapes: list[Shape] = [(base, 3, 7, 7), (base,), (base,)]
    channels = base
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = base * 2**stage
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def growing_shapes(tensors: int, elements: int) -> list[Shape]:
    """Return shapes whose sizes grow as a power: many small tensors and few large ones, as in a network."""
    weights = [(i + 1) ** 3 for i in range(tensors)]
    return [(max(8, elements * weight // sum(weights)),) for weight in weights]


def deepfm_shapes(rows: int, width: int) -> list[Shape]:
    """Return the shapes of a DeepFM with 39 fields and three hidden layers."""
    layers = [39 * width, 400, 400, 400, 1]
    mlp = [shape for inputs, outputs in pairwise(layers) for shape in ((outputs, inputs), (outputs,))]
    return [(rows, width), (rows, 1), *mlp]


def dense_models(device: str, quick: bool) -> dict[str, list[Shape]]:
    """Return the shapes of the dense cases: one huge tensor, a network, many tiny tensors and a recommender."""
    huge = (50_000_000 if device == "cpu" else 1 << 29) // (10 if quick else 1)
    network = growing_shapes(200, 26_000_000 // (5 if quick else 1)) if device == "cpu" else resnet50_shapes(78)
    return {
        f"one tensor of {huge / 1e6:.0f}M": [(huge,)],
        f"{len(network)} tensors, {count_elements(network) / 1e6:.0f}M": network,
        "2,000 tiny tensors": [(100 + i % 57,) for i in range(2000)],
        "DeepFM, dense gradients": deepfm_shapes(200_000, 16),
    }


def count_elements(shapes: Sequence[Shape]) -> int:
    """Count the elements of tensors of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def sample_ids(distribution: str, rows: int, count: int, seed: int = 0) -> Tensor:
    """Sample ids as a recommender sees them.

    Args:
        distribution: `uniform`; `zipf` with exponent 1.05; `hot`, where half of the ids fall on a hundred rows;
            `fields`, with 26 fields of which half have a vocabulary of a few dozen; or `skewed`, where nine of ten ids
            are the same. Zipf and hot ids are spread over the table by a hash.
        rows: the number of rows of the table.
        count: the number of ids.
        seed: the seed of the random generator.

    Returns:
        An int64 tensor of `count` ids.
    """
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if distribution == "uniform":
        return (u * rows).long()
    if distribution == "zipf":
        a = 1.05
        ranks: Tensor = (((rows ** (1 - a) - 1) * u + 1) ** (1 / (1 - a))).long()
        return ranks * 2654435761 % rows
    if distribution == "hot":
        hot = torch.rand(count, generator=generator) < 0.5
        return torch.where(hot, (u * 100).long(), (u * rows).long()) * 2654435761 % rows
    if distribution == "fields":
        field = torch.arange(count) * 26 // count
        size = torch.where(field < 13, 3 + 7 * field, rows).clamp_(max=rows)
        start = torch.where(field < 13, field * 2654435761 % max(1, rows - 100), 0)
        return start + (u ** torch.where(field < 13, 1, 3) * size).long()
    if distribution == "skewed":
        return torch.where(torch.rand(count, generator=generator) < 0.9, torch.tensor(7), (u * rows).long())
    raise ValueError(f"unknown distribution of ids: {distribution!r}")


class DeepFM(nn.Module):
    """A recommender for 39 fields: one embedding table, a factorization machine and an MLP."""

    def __init__(self, rows: int, width: int, hidden: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)
        self.linear = nn.Embedding(rows, 1, sparse=sparse)
        nn.init.normal_(self.table.weight, 0, 1e-4)
        self.mlp = nn.Sequential(
            nn.Linear(39 * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, fields: Tensor) -> Tensor:
        """Return one logit per example for ids of shape (examples, 39)."""
        e = self.table(fields)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        total: Tensor = pairs + self.linear(fields).sum((1, 2)) + self.mlp(e.flatten(1)).squeeze(1)
        return total


# Suites --------------------------------------------------------------------------------------------------------


def dense_contenders(makers: Mapping[str, MakeOptimizer], shapes: Sequence[Shape], device: str) -> list[Contender]:
    """Build one dense contender per optimizer."""
    return [dense_contender(name, make, shapes, device) for name, make in makers.items()]


def sparse_contenders(
    distribution: str, rows: int, width: int, count: int, device: str, with_peer: bool
) -> list[Contender]:
    """Build CAdam, and torch's SparseAdam if `with_peer`, for one table.

    Each step gets other ids, as in training, so that the caches do not hold the rows of the step before.
    """
    id_batches = [sample_ids(distribution, rows, count, seed).to(device) for seed in range(8)]
    contenders = [sparse_contender("cadam.CAdam", CAdam, id_batches, rows, width)]
    if with_peer:
        contenders.append(sparse_contender("torch SparseAdam", torch.optim.SparseAdam, id_batches, rows, width))
    return contenders


def sparse_name(distribution: str, rows: int, width: int) -> str:
    """Name a case with one table."""
    return f"rows {rows / 1e6:g}M x {width}, {distribution} ids"


def dense_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases with dense gradients."""
    for name, shapes in dense_models(device, quick).items():
        elements = count_elements(shapes)
        makers = dense_optimizers(device)
        if elements > 40_000_000:  # a step of the other optimizers takes seconds
            makers = {k: v for k, v in makers.items() if k.startswith(("torch Adam f", "cadam.", "DeepSpeed"))}
        build = partial(dense_contenders, makers, shapes, device)
        yield Case(name, "torch Adam fused", build, elements, 7 if quick else 15)


def graph_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases whose steps are captured in CUDA graphs; the peer is torch's step outside of a graph."""
    if device != "cuda":
        return
    for name, shapes in dense_models(device, quick).items():
        build = partial(_graph_contenders, shapes)
        yield Case(f"in a graph: {name}", "torch Adam fused", build, count_elements(shapes), repeat=10)
    for distribution, rows, width in SPARSE_TABLES:
        build = partial(_sparse_graph_contenders, distribution, rows, width)
        yield Case(f"in a graph: {sparse_name(distribution, rows, width)}", "torch SparseAdam", build, repeat=10)


def _graph_contenders(shapes: Sequence[Shape]) -> list[Contender]:
    makers: dict[str, MakeOptimizer] = {
        "cadam.CAdam": lambda p: CAdam(p, capturable=True),
        "cadam.CAdam, not counting": lambda p: CAdam(p, capturable=True, track_alignment=False),
        "torch Adam fused, in a graph": lambda p: torch.optim.Adam(p, fused=True, capturable=True),
    }
    contenders = [captured(contender) for contender in dense_contenders(makers, shapes, "cuda")]
    eager = dense_contender("torch Adam fused", lambda p: torch.optim.Adam(p, fused=True), shapes, "cuda")
    return [*contenders, eager]


def _sparse_graph_contenders(distribution: str, rows: int, width: int) -> list[Contender]:
    id_batches = [sample_ids(distribution, rows, IDS_PER_BATCH, seed).to("cuda") for seed in range(8)]
    ours = sparse_contender("cadam.CAdam", partial(CAdam, capturable=True), id_batches, rows, width)
    peer = sparse_contender("torch SparseAdam", torch.optim.SparseAdam, id_batches, rows, width)
    return [captured(ours), peer]


def sparse_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases with the sparse gradient of one large table."""
    large = [("fields", 50_000_000, 16)] if device == "cuda" else []
    for distribution, rows, width in SPARSE_TABLES[:2] if quick else [*SPARSE_TABLES, *large]:
        build = partial(sparse_contenders, distribution, rows, width, IDS_PER_BATCH, device, with_peer=True)
        name = sparse_name(distribution, rows, width)
        yield Case(name, "torch SparseAdam", build, rounds=7 if quick else 15)


def tables_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases with many small tables, whose cost is mostly the overhead per table."""
    makers: dict[str, MakeOptimizer] = {
        "torch SparseAdam": lambda p: torch.optim.SparseAdam(p),
        "cadam.CAdam": lambda p: CAdam(p),
        "cadam.CAdam, named": named_cadam,
    }
    for count in (26, 200) if quick else (26, 200, 800):
        build = partial(_tables_contenders, makers, count, device)
        yield Case(f"{count} sparse tables", "torch SparseAdam", build, rounds=7 if quick else 15)


def _tables_contenders(makers: Mapping[str, MakeOptimizer], count: int, device: str) -> list[Contender]:
    return [tables_contender(name, make, count, device) for name, make in makers.items()]


def growth_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases that show how the time grows with the size of the table and of the batch."""
    sizes = [1, 5, 20, 50] if device == "cpu" else [1, 50, 519]
    for millions in sizes[: 2 if quick else None]:
        rows = millions * 1_000_000
        build = partial(sparse_contenders, "zipf", rows, 16, IDS_PER_BATCH, device, with_peer=False)
        yield Case(f"table of {millions}M x 16", "cadam.CAdam", build, rounds=11)
    for count in (65_000, 130_000, 260_000, 520_000):
        build = partial(sparse_contenders, "uniform", 5_000_000, 16, count, device, with_peer=False)
        yield Case(f"{count} ids, 5M x 16", "cadam.CAdam", build, rounds=11)


def training_cases(device: str, quick: bool) -> Iterator[Case]:
    """Yield the case of a whole training step: forward, backward and update of a DeepFM."""
    rows, batch = 1_000_000, 2_000 if quick else 10_000
    name = f"whole DeepFM step, 1M x 10, batch {batch:,}"
    build = partial(_training_contenders, rows, batch, device)
    yield Case(name, "torch SparseAdam + Adam fused", build, rounds=7)


def _training_contenders(rows: int, batch: int, device: str) -> list[Contender]:
    def torch_pair(model: DeepFM) -> list[torch.optim.Optimizer]:
        tables = [model.table.weight, model.linear.weight]
        return [torch.optim.SparseAdam(tables), torch.optim.Adam(model.mlp.parameters(), fused=True)]

    makers: dict[str, tuple[bool, Callable[[DeepFM], list[torch.optim.Optimizer]]]] = {
        "torch SparseAdam + Adam fused": (True, torch_pair),
        "torch Adam fused, dense gradients": (False, lambda m: [torch.optim.Adam(m.parameters(), fused=True)]),
        "cadam.CAdam": (True, lambda m: [CAdam(m.parameters())]),
    }
    fields = sample_ids("zipf", rows, batch * 39).view(batch, 39).to(device)
    labels = torch.randint(0, 2, (batch,), device=device).float()
    contenders = []
    for name, (sparse, make) in makers.items():
        torch.manual_seed(0)
        model = DeepFM(rows, 10, 300, sparse).to(device)
        contenders.append(Contender(name, partial(_train, model, make(model), fields, labels)))
    return contenders


def _train(model: DeepFM, optimizers: list[torch.optim.Optimizer], fields: Tensor, labels: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(fields), labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


SUITES: dict[str, Callable[[str, bool], Iterator[Case]]] = {
    "dense": dense_cases,
    "graphs": graph_cases,
    "sparse": sparse_cases,
    "tables": tables_cases,
    "growth": growth_cases,
    "training": training_cases,
}
