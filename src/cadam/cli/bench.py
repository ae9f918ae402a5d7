"""How fast a step is: medians of interleaved runs, as ratios to peers and to the machine's own speed limit.

Every case runs all its contenders in turn, round after round, so that a noisy moment hits them alike. Gradients
move to new addresses between steps, as they do in training. Peers that are not installed are left out by name.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import Adam, CAdam, CAmsGrad
from .exit_codes import DONE, INTERRUPTED, NO_DATA, USAGE

UNSTEADY = 2  # times the fastest run, within which nine of ten must lie
BYTES = 28  # an element of Adam in float32: read p, g, m, v; write p, m, v


@dataclass
class Contender:
    """Something to time: `prepare` is not timed, `step` is."""

    name: str
    step: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Result:
    """One contender in one case."""

    case: str
    name: str
    milliseconds: float
    low: float
    high: float
    ratio: float
    """Times faster than the case's peer."""
    share: float | None = None
    """Of the speed limit measured in the same run."""
    extra_megabytes: float | None = None

    @property
    def unsteady(self) -> bool:
        """Did the machine have so much else to do that the median says little?"""
        return self.high > UNSTEADY * self.low


@dataclass
class Case:
    """Contenders that do the same work; `peer` is the one that ratios refer to."""

    name: str
    peer: str
    contenders: Callable[[], list[Contender]]
    elements: int = 0
    rounds: int = 15
    repeat: int = 1
    """Steps between two looks at the clock."""


# Timing --------------------------------------------------------------------------------------------------------


def measure(case: Case, device: str, limit: Callable[[int], Contender] | None) -> list[Result]:
    """Run a case. With a `limit`, a kernel that only moves the bytes runs in the same rounds.

    Each round has an order of its own, so that nobody always follows the one who empties the caches.
    """
    contenders = case.contenders()
    if limit is not None and case.elements:
        contenders.append(limit(case.elements))
    for contender in contenders:  # compile, allocate state, warm up
        for _ in range(3):
            contender.prepare()
            contender.step()
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    order = random.Random(0)
    for _ in range(case.rounds):
        for contender in order.sample(contenders, len(contenders)):
            contender.prepare()
            gc.collect(0)  # what the one before left behind is not for this one to clear away
            _wait(device)
            start = time.perf_counter()
            for _ in range(case.repeat):
                contender.step()
            _wait(device)
            times[contender.name].append((time.perf_counter() - start) * 1e3 / case.repeat)
    medians = {name: statistics.median(values) for name, values in times.items()}
    results = []
    for contender in contenders:
        name = contender.name
        low, high = min(times[name]), sorted(times[name])[int(0.9 * (len(times[name]) - 1))]
        share = medians["limit"] / medians[name] if "limit" in medians else None
        extra = _extra_memory(contender, device)
        results.append(
            Result(case.name, name, medians[name], low, high, medians[case.peer] / medians[name], share, extra)
        )
    del contenders, contender
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return results


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _extra_memory(contender: Contender, device: str) -> float | None:
    """How much memory a step takes for itself at its peak, in megabytes."""
    contender.prepare()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        contender.step()
        return max(0.0, (_status("VmHWM") - before) / 1e3)
    except OSError:
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


# Contenders ----------------------------------------------------------------------------------------------------


def optimizer(
    name: str,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    shapes: Sequence[Sequence[int]],
    device: str,
    dtype: torch.dtype = torch.float32,
) -> Contender:
    """A dense step over parameters of these shapes, with gradients at new addresses each time."""
    params = [nn.Parameter(torch.randn(tuple(shape), device=device, dtype=dtype) * 0.1) for shape in shapes]
    source = [torch.randn_like(p) for p in params]
    opt = make(list(params))

    def renew() -> None:
        for p, g in zip(params, source, strict=True):
            p.grad = None
            p.grad = g.clone()

    return Contender(name, opt.step, renew)


def dense_peers(device: str) -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """Ours, torch's and whoever else is installed."""
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "torch Adam fused": lambda p: torch.optim.Adam(p, fused=True),
        "torch Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
        "torch Adam loop": lambda p: torch.optim.Adam(p, foreach=False, fused=False),
        "cadam.CAdam": lambda p: CAdam(p),
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


def cpu_limit(elements: int) -> Contender:
    """The bytes of a step and nothing else, on as many threads."""
    from ..native.library import package_library

    library = package_library()
    tensors = [torch.randn(elements) for _ in range(4)]  # not zeros: those share a single page until written to
    pointers = [t.data_ptr() for t in tensors]

    def move(keep: list[Tensor] = tensors) -> None:
        library.c.cadam_memory_traffic(*pointers, elements, library.parallel_for)

    return Contender("limit", move)


def cuda_limit(elements: int) -> Contender:
    """A copy on the device of as many bytes as a step reads and writes."""
    source = torch.randn(elements * BYTES // 8, device="cuda")
    target = torch.empty_like(source)
    return Contender("limit", lambda: target.copy_(source))


# Cases ---------------------------------------------------------------------------------------------------------


def resnet50(base: int) -> list[tuple[int, ...]]:
    """The 161 parameters of a ResNet-50 with this many channels at its entrance, instead of 64."""
    shapes: list[tuple[int, ...]] = [(base, 3, 7, 7), (base,), (base,)]
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


def growing(tensors: int, elements: int) -> list[tuple[int, ...]]:
    """Many small tensors and few large ones, as in a network: sizes grow as a power."""
    weights = [(i + 1) ** 3 for i in range(tensors)]
    return [(max(8, elements * w // sum(weights)),) for w in weights]


def deepfm_shapes(rows: int, width: int) -> list[tuple[int, ...]]:
    layers = [39 * width, 400, 400, 400, 1]
    mlp = [shape for a, b in pairwise(layers) for shape in ((b, a), (b,))]
    return [(rows, width), (rows, 1), *mlp]


def models(device: str, quick: bool) -> dict[str, Sequence[Sequence[int]]]:
    """What the dense cases train: one huge tensor, a network, many tiny tensors, a recommender."""
    huge = (50_000_000 if device == "cpu" else 1 << 29) // (10 if quick else 1)
    network = growing(200, 26_000_000 // (5 if quick else 1)) if device == "cpu" else resnet50(78)
    return {
        f"one tensor of {huge / 1e6:.0f}M": [(huge,)],
        f"{len(network)} tensors, {_elements(network) / 1e6:.0f}M": network,
        "2,000 tiny tensors": [(100 + i % 57,) for i in range(2000)],
        "DeepFM, dense gradients": deepfm_shapes(200_000, 16),
    }


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def dense_cases(device: str, quick: bool) -> Iterator[Case]:
    for name, shapes in models(device, quick).items():
        elements = _elements(shapes)
        makers = dense_peers(device)
        if elements > 40_000_000:  # a step of the others takes seconds
            makers = {k: v for k, v in makers.items() if k.startswith(("torch Adam f", "cadam.", "DeepSpeed"))}
        build = partial(_dense_contenders, makers, shapes, device)
        yield Case(name, "torch Adam fused", build, elements if elements > 1_000_000 else 0, 7 if quick else 15)


def graph_cases(device: str, quick: bool) -> Iterator[Case]:
    """Steps inside a CUDA graph, beside torch's fused step outside of one."""
    if device != "cuda":
        return
    for name, shapes in models(device, quick).items():
        elements = _elements(shapes)
        build = partial(_graph_contenders, shapes)
        yield Case(
            f"in a graph: {name}", "torch Adam fused", build, elements if elements > 1_000_000 else 0, 15, repeat=10
        )
    for kind, rows, width in ROWS:
        build = partial(_captured_rows, kind, rows, width)
        yield Case(f"in a graph: {_rows_name(kind, rows, width)}", "torch SparseAdam", build, rounds=15, repeat=10)


def _graph_contenders(shapes: Sequence[Sequence[int]]) -> list[Contender]:
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "cadam.CAdam": lambda p: CAdam(p, capturable=True),
        "cadam.CAdam, not counting": lambda p: CAdam(p, capturable=True, track_alignment=False),
        "torch Adam fused, in a graph": lambda p: torch.optim.Adam(p, fused=True, capturable=True),
    }
    contenders = [captured(optimizer(name, make, shapes, "cuda")) for name, make in makers.items()]
    eager = optimizer("torch Adam fused", lambda p: torch.optim.Adam(p, fused=True), shapes, "cuda")
    return [*contenders, eager]


def captured(contender: Contender) -> Contender:
    """The same step as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    contender.prepare()
    with torch.cuda.stream(stream):
        for _ in range(3):
            contender.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contender.step()

    def replay(keep: Contender = contender) -> None:
        graph.replay()

    return Contender(contender.name, replay)


def _dense_contenders(makers: Any, shapes: Any, device: str) -> list[Contender]:
    return [optimizer(name, make, shapes, device) for name, make in makers.items()]


def ids(kind: str, rows: int, count: int, seed: int = 0) -> Tensor:
    """Row numbers as a recommender meets them. Zipf and hot ones are spread over the table by a hash."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if kind == "uniform":
        return (u * rows).long()
    if kind == "zipf":
        a = 1.05
        ranks: Tensor = (((rows ** (1 - a) - 1) * u + 1) ** (1 / (1 - a))).long()
        return ranks * 2654435761 % rows
    if kind == "hot":  # half of all ids fall on a hundred rows
        hot = torch.rand(count, generator=generator) < 0.5
        return torch.where(hot, (u * 100).long(), (u * rows).long()) * 2654435761 % rows
    if kind == "fields":  # 26 fields, half of them with a vocabulary of a few dozen
        field = torch.arange(count) * 26 // count
        size = torch.where(field < 13, 3 + 7 * field, rows).clamp_(max=rows)
        start = torch.where(field < 13, field * 2654435761 % max(1, rows - 100), 0)
        return start + (u ** torch.where(field < 13, 1, 3) * size).long()
    if kind == "skewed":  # nine of ten ids are one and the same
        return torch.where(torch.rand(count, generator=generator) < 0.9, torch.tensor(7), (u * rows).long())
    raise ValueError(f"unknown kind of ids: {kind!r}")


COUNT = 260_000  # ids of a batch: 10,000 examples of 26 fields
ROWS = [
    ("zipf", 5_000_000, 16),
    ("zipf", 1_000_000, 10),
    ("fields", 1_000_000, 16),
    ("hot", 1_000_000, 16),
    ("uniform", 1_000_000, 16),
    ("skewed", 1_000_000, 16),
]


def _rows_name(kind: str, rows: int, width: int) -> str:
    return f"rows {rows / 1e6:g}M x {width}, {kind} ids"


def rows_cases(device: str, quick: bool) -> Iterator[Case]:
    large = [("fields", 50_000_000, 16)] if device == "cuda" else []
    for kind, rows, width in ROWS[:2] if quick else [*ROWS, *large]:
        build = partial(_rows_contenders, kind, rows, width, COUNT, device, True)
        yield Case(_rows_name(kind, rows, width), "torch SparseAdam", build, rounds=7 if quick else 15)


def growth_cases(device: str, quick: bool) -> Iterator[Case]:
    sizes = [1, 5, 20, 50] if device == "cpu" else [1, 50, 519]
    for millions in sizes[: 2 if quick else None]:
        build = partial(_rows_contenders, "zipf", millions * 1_000_000, 16, COUNT, device, False)
        yield Case(f"table of {millions}M x 16", "cadam.CAdam", build, rounds=11)
    for count in (65_000, 130_000, 260_000, 520_000):
        build = partial(_rows_contenders, "uniform", 5_000_000, 16, count, device, False)
        yield Case(f"{count} ids, 5M x 16", "cadam.CAdam", build, rounds=11)


def _rows_contenders(kind: str, rows: int, width: int, count: int, device: str, peers: bool) -> list[Contender]:
    # Other rows in each step, as in training: the caches must not know them from the step before.
    places = [ids(kind, rows, count, seed).to(device) for seed in range(8)]
    contenders = [on_rows("cadam.CAdam", CAdam, places, rows, width)]
    if peers:
        contenders.append(on_rows("torch SparseAdam", torch.optim.SparseAdam, places, rows, width))
    return contenders


def _captured_rows(kind: str, rows: int, width: int) -> list[Contender]:
    places = [ids(kind, rows, COUNT, seed).to("cuda") for seed in range(8)]
    ours = on_rows("cadam.CAdam", partial(CAdam, capturable=True), places, rows, width)
    return [captured(ours), on_rows("torch SparseAdam", torch.optim.SparseAdam, places, rows, width)]


def on_rows(
    name: str,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    places: list[Tensor],
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
) -> Contender:
    """A sparse step over a table, with the next of these ids each time."""
    device, count = places[0].device, len(places[0])
    table = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype).normal_(0, 0.01))
    values = torch.randn(count, width, device=device, dtype=dtype)
    turns = cycle(places)

    def renew() -> None:
        table.grad = torch.sparse_coo_tensor(next(turns)[None], values, table.shape, check_invariants=False)

    return Contender(name, make([table]).step, renew)


class DeepFM(nn.Module):
    """The model a user of recommenders trains: 39 fields, one table, a factorization machine and an MLP."""

    def __init__(self, rows: int, width: int, hidden: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)
        self.linear = nn.Embedding(rows, 1, sparse=sparse)
        nn.init.normal_(self.table.weight, 0, 1e-4)
        self.mlp = nn.Sequential(
            nn.Linear(39 * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, fields: Tensor) -> Tensor:
        e = self.table(fields)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        total: Tensor = pairs + self.linear(fields).sum((1, 2)) + self.mlp(e.flatten(1)).squeeze(1)
        return total


def training_cases(device: str, quick: bool) -> Iterator[Case]:
    rows, batch = 1_000_000, 2_000 if quick else 10_000
    yield Case(
        f"whole DeepFM step, 1M x 10, batch {batch:,}",
        "torch SparseAdam + Adam fused",
        partial(_training_contenders, rows, batch, device),
        rounds=7,
    )


def _training_contenders(rows: int, batch: int, device: str) -> list[Contender]:
    def torch_pair(model: DeepFM) -> list[torch.optim.Optimizer]:
        tables = [model.table.weight, model.linear.weight]
        return [torch.optim.SparseAdam(tables), torch.optim.Adam(model.mlp.parameters(), fused=True)]

    makers: dict[str, tuple[bool, Callable[[DeepFM], list[torch.optim.Optimizer]]]] = {
        "torch SparseAdam + Adam fused": (True, torch_pair),
        "torch Adam fused, dense gradients": (False, lambda m: [torch.optim.Adam(m.parameters(), fused=True)]),
        "cadam.CAdam": (True, lambda m: [CAdam(m.parameters())]),
    }
    fields = ids("zipf", rows, batch * 39).view(batch, 39).to(device)
    labels = torch.randint(0, 2, (batch,), device=device).float()
    contenders = []
    for name, (sparse, make) in makers.items():
        torch.manual_seed(0)
        model = DeepFM(rows, 10, 300, sparse).to(device)
        optimizers = make(model)

        def train(model: DeepFM = model, optimizers: list[torch.optim.Optimizer] = optimizers) -> None:
            for opt in optimizers:
                opt.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(fields), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            for opt in optimizers:
                opt.step()

        contenders.append(Contender(name, train))
    return contenders


SUITES: dict[str, Callable[[str, bool], Iterator[Case]]] = {
    "dense": dense_cases,
    "graphs": graph_cases,
    "rows": rows_cases,
    "growth": growth_cases,
    "training": training_cases,
}


# Reporting -----------------------------------------------------------------------------------------------------


def about(device: str) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    installed = {}
    for package in ("torch", "triton", "numpy", "deepspeed", "pytorch_optimizer", "timm"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device,
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **installed,
    }


def show(results: list[Result], last: str | None) -> None:
    """One case as lines of a table."""
    for r in results:
        if r.case != last:
            print(f"\n{r.case}\n{'':34}      ms  (min to p90)         ratio   limit   extra MB")
            last = r.case
        share = f"{r.share:7.2f}" if r.share is not None else "       "
        extra = f"{r.extra_megabytes:10.1f}" if r.extra_megabytes is not None else ""
        span = f"({r.low:.2f} to {r.high:.2f})"
        mark = "  unsteady" if r.unsteady else ""
        print(f"  {r.name:32} {r.milliseconds:8.2f}  {span:18} {r.ratio:7.2f} {share} {extra}{mark}")
    sys.stdout.flush()


def draw(results: list[Result], path: str) -> None:
    """Ratios to the peer as bars, a panel for each case."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib (pip install matplotlib)") from error
    by_case: dict[str, list[Result]] = {}
    for r in results:
        by_case.setdefault(r.case, []).append(r)
    cases = {case: [r for r in rs if r.name != "limit"] for case, rs in by_case.items() if len(rs) > 1}
    heights = [len(rs) for rs in cases.values()]
    figure, panels = plt.subplots(
        len(cases), 1, figsize=(8, 0.3 * sum(heights) + 0.9 * len(cases)), height_ratios=heights, layout="constrained"
    )
    for panel, (case, rs) in zip([panels] if len(cases) == 1 else panels, cases.items(), strict=True):
        colors = ["#2a6f97" if r.name.startswith("cadam.") else "0.7" for r in rs]
        panel.barh([r.name for r in rs], [r.ratio for r in rs], color=colors)
        panel.axvline(1, color="0.3", lw=0.8, ls=":")
        panel.invert_yaxis()
        panel.set_title(f"{case}: times faster than its peer", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _has_kernels() -> bool:
    from ..native.library import UnavailableError, package_library

    try:
        package_library()
    except UnavailableError as reason:
        print(f"the speed limit is left out, as it is measured with the C kernels: {reason}")
        return False
    return True


def run(options: argparse.Namespace) -> int:
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        print(f"unknown suite {unknown[0]!r}; there are {', '.join(SUITES)}")
        return USAGE
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: there is no CUDA device, or torch is a build without CUDA")
        return NO_DATA
    facts = about(device)
    results: list[Result] = []
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    print("ratio: how many times faster than the case's peer (1.00); limit: share of the machine's speed limit")
    sys.stdout.flush()
    limit = cuda_limit if device == "cuda" else cpu_limit if _has_kernels() else None
    cases = [(name, c) for name in options.suites or SUITES for c in SUITES[name](device, options.quick)]
    start, done, code = time.monotonic(), 0, DONE
    try:
        for name, case in cases:
            ran = time.monotonic() - start
            print(f"case {done + 1} of {len(cases)}, {ran:.0f} s so far: {case.name}", file=sys.stderr, flush=True)
            case_results = measure(case, device, limit if name in ("dense", "graphs") else None)
            show(case_results, results[-1].case if results else None)
            results += case_results
            done += 1
            if options.json:
                content = {"about": facts, "results": [asdict(r) for r in results]}
                Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"interrupted: {done} of {len(cases)} cases were measured", file=sys.stderr)
        code = INTERRUPTED
    if options.plot and results:
        draw(results, options.plot)
    unsteady = {r.case for r in results if r.unsteady}
    if unsteady:
        print(f"\nUnsteady, not to be quoted: {'; '.join(sorted(unsteady))}. Something else was running; run again.")
    return code
