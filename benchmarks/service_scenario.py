"""A service in minutes: a shift, a promotion, an hour of inverted labels and a rollback.

    python -m benchmarks.service_scenario FOLDER [--hour 30]

A `cadam run` learns simulated clicks of the past. From it starts a `cadam serve`, with a champion whose learning rate
is low and a challenger with a higher one. A client asks for predictions, and sends their labels with its next request.
An hour of the simulation has 20,000 clicks and takes --hour seconds. What happens:

1. For an hour nothing changes.
2. The appeal of half of the items changes. The challenger follows sooner, and is promoted automatically.
3. An hour later, all labels are inverted for an hour, as by a client that reports them wrongly. The guard stops the
   publication of snapshots.
4. At the end of that hour, `cadam rollback FOLDER before-alert`, and an hour of correct labels.

For each quarter of an hour it prints the log loss of the answers that clients got and the lowest possible one. Both are
expected values: they are computed with the probabilities of the simulated clicks, not with the clicks. With a Chromium
on the path, it saves screenshots of the status page after the promotion, during the alert and an hour after the
rollback, in two widths, light and dark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cadam.online.data.events import Array
from cadam.serving.client import Client
from cadam.serving.snapshots import GUARD_TAG

SCHEMA = {"features": {"item": "category:50", "device": "category:3", "price": "number?"}, "label": "click"}
CHAMPION, CHALLENGER = "cadam:lr=0.0003", "cadam:lr=0.01"
CLICKS_OF_THE_PAST, CLICKS_AN_HOUR, CLICKS_A_REQUEST = 200_000, 20_000, 200
HOURS_UNTIL_PROMOTION = 6.0
"""The scenario fails if the challenger is not promoted this long after the shift."""
WIDTHS, SCHEMES = (1400, 390), ("dark", "light")


class World:
    """Simulated clicks, whose probability depends on the item, the device and the price."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.appeal = self.random.normal(-0.5, 1.5, 50)
        self.devices = self.random.normal(0, 0.5, 3)

    def shift(self) -> None:
        """Change the appeal of half of the items.

        A larger change would raise an alert of the guard, during which no challenger is promoted.
        """
        self.appeal[:25] += self.random.normal(0, 1, 25)

    def events(self, count: int) -> tuple[list[dict[str, Any]], Array]:
        """Return events and the logits of their clicks."""
        item, device = self.random.integers(50, size=count), self.random.integers(3, size=count)
        price = self.random.uniform(0, 1, count)
        logits: Array = self.appeal[item] + self.devices[device] - price
        columns = zip(item.tolist(), device.tolist(), price.tolist(), strict=True)
        return [{"item": i, "device": d, "price": p} for i, d, p in columns], logits

    def clicks(self, logits: Array) -> list[int]:
        """Draw clicks from their logits."""
        return (self.random.uniform(size=len(logits)) < 1 / (1 + np.exp(-logits))).astype(int).tolist()


def expected_losses(scores: Array, logits: Array) -> list[float]:
    """Return the expected log loss of each score, given the logits of the simulated clicks."""
    losses: list[float] = (np.logaddexp(0, scores) - scores / (1 + np.exp(-logits))).tolist()
    return losses


@dataclass
class Quarter:
    """The answers of a quarter of an hour."""

    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


class Scenario:
    """A client that lives through the scenario.

    Args:
        url: the address of the service.
        folder: the folder of the run with that of the service, in which screenshots are saved.
        seconds_an_hour: how long an hour of the simulation takes.
        world: produces the clicks.
    """

    def __init__(self, url: str, folder: Path, seconds_an_hour: float, world: World) -> None:
        self.url, self.folder, self.seconds_an_hour, self.world = url, folder, seconds_an_hour, world
        self.client, self.quarter = Client(url), Quarter()
        self.start, self.clicks, self.is_inverted = time.monotonic(), 0, False
        self.labels: dict[Any, int] = {}
        """The labels of the last answers, which are sent with the next request."""

    @property
    def hours(self) -> float:
        return self.clicks / CLICKS_AN_HOUR

    def say(self, text: str) -> None:
        """Print what happened, with the hour of the simulation and the seconds since its start."""
        print(f"{self.hours:6.2f} h {time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return the metrics of the service by their names and labels."""
        samples = httpx.get(f"{self.url}status.json").json().get("samples", [])
        return {(name, *labels.values()): value for name, labels, value in samples}

    def send(self) -> None:
        """Send a request for predictions and the labels of the request before, at the pace of the simulation."""
        wait = self.start + self.hours * self.seconds_an_hour - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        if self.labels:
            self.client.feedback(self.labels)
        events, logits = self.world.events(CLICKS_A_REQUEST)
        predictions = self.client.predict(events)
        clicks = self.world.clicks(logits)
        self.quarter.losses += expected_losses(np.array([each.score for each in predictions]), logits)
        self.quarter.entropies += expected_losses(logits, logits)
        self.labels = {
            each.id: 1 - click if self.is_inverted else click for each, click in zip(predictions, clicks, strict=True)
        }
        self.clicks += CLICKS_A_REQUEST
        if self.clicks % (CLICKS_AN_HOUR // 4) == 0:
            self.end_quarter(predictions[-1].model_version)

    def end_quarter(self, version: str) -> None:
        loss, entropy = np.mean(self.quarter.losses), np.mean(self.quarter.entropies)
        champion = next((key[1] for key in self.metrics() if key[0] == "cadam_champion"), "?")
        self.quarter = Quarter()
        self.say(f"log loss {loss:.4f}, lowest possible {entropy:.4f}, version {version}, champion {champion}")

    def run(self, hours: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Send requests for a number of hours, or until a condition holds, and return whether it does."""
        for _ in range(round(hours * CLICKS_AN_HOUR / CLICKS_A_REQUEST)):
            self.send()
            if until():
                return True
        return False

    def live(self) -> None:
        """Live through the scenario.

        Raises:
            SystemExit: if a step does not happen.
        """
        self.say("the service starts with the model of the run")

        def is_promoted() -> bool:
            return self.metrics().get(("cadam_promotions",), 0) > 0

        if self.run(1, is_promoted):
            sys.exit("the challenger was promoted before the world has changed")
        self.world.shift()
        self.say("the world changes: the appeal of half of the items")
        if not self.run(HOURS_UNTIL_PROMOTION, is_promoted):
            sys.exit("the challenger was not promoted")
        self.say("the challenger is promoted")
        self.run(1)
        self.save_screenshots("promoted")
        self.is_inverted = True
        self.say("all labels are inverted from now on")
        inverted_until = self.hours + 1
        if not self.run(1, lambda: self.metrics().get(("cadam_guard_alert",), 0) > 0):
            sys.exit("the guard has not raised an alert")
        self.say("alert of the guard: nothing new is served")
        self.run(inverted_until - self.hours)
        self.save_screenshots("alert")
        self.is_inverted = False
        command = ["rollback", str(self.folder), GUARD_TAG]
        done = subprocess.run([sys.executable, "-m", "cadam", *command], capture_output=True, text=True, check=True)
        self.say(f"labels are correct again, and cadam {' '.join(['rollback', 'FOLDER', GUARD_TAG])}:")
        self.say(done.stdout.strip())
        self.run(1)
        self.save_screenshots("rolled-back")
        metrics = self.metrics()
        names = ("events", "learned", "rejected", "guard_alert", "rollbacks", "promotions")
        self.say(", ".join(f"{name} {metrics[f'cadam_{name}',]:,.0f}" for name in names))

    def save_screenshots(self, name: str) -> None:
        """Save screenshots of the status page in all widths and color schemes, if there is a Chromium."""
        if (browser := shutil.which("chromium")) is None:
            self.say("no screenshot: there is no chromium on the path")
            return
        for width in WIDTHS:
            for scheme in SCHEMES:
                path = self.folder / f"{name}-{width}-{scheme}.png"
                options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                options += [f"--user-data-dir={self.folder / 'chromium'}", "--virtual-time-budget=4000"]
                options += [f"--blink-settings=preferredColorScheme={SCHEMES.index(scheme)}"]
                options += [f"--window-size={width},{1000 if width > 1000 else 2300}", f"--screenshot={path}"]
                subprocess.run([browser, *options, self.url], capture_output=True, timeout=60, check=True)
        self.say(f"screenshots {name}-*.png")


def main() -> None:
    """Start a service and live through the scenario."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument("--hour", type=float, default=30, help="seconds that an hour of the simulation takes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    schema, past, world = options.folder / "given.json", options.folder / "past.jsonl", World()
    schema.write_text(json.dumps(SCHEMA))
    events, logits = world.events(CLICKS_OF_THE_PAST)
    lines = [json.dumps({**event, "click": click}) for event, click in zip(events, world.clicks(logits), strict=True)]
    past.write_text("\n".join(lines))
    cadam = [sys.executable, "-m", "cadam"]
    learn = ["run", str(past), "--schema", str(schema), "--checkpoint", str(options.folder), "--quiet"]
    subprocess.run([*cadam, *learn], check=True)
    command = [*cadam, "serve", str(options.folder), "--address", "0", "--optimizer", CHAMPION]
    command += ["--challenger", CHALLENGER, "--promote", "auto"]
    with open(options.folder / "output.txt", "w", encoding="utf-8") as output:
        service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True, env=os.environ)
    try:
        assert service.stdout is not None
        url = service.stdout.readline().split()[1]
        Scenario(url, options.folder, options.hour, world).live()
    finally:
        service.terminate()
        service.wait()
    print("\nwhat the service wrote:")
    print((options.folder / "output.txt").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
