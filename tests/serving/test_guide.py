"""The guide docs/serve.md works from its first command to its last, and prints what it shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.documented import ROOT, blocks
from tests.serving.service_process import is_ready, wait_for

PAGE = ROOT / "docs" / "serve.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the guide uses curl")
def test_a_newcomer_gets_to_a_prediction_that_has_changed(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "cadam").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cadam "$@"\n')
    (commands / "cadam").chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    first, *later = [b for b in blocks(PAGE) if b.marks.get("tested in") == "tests/serving/test_guide.py"]
    code = first.code.replace("cadam serve", "exec cadam serve --address 0")
    service = subprocess.Popen(["bash", "-ec", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        url = service.stdout.readline().split()[1].rstrip("/")
        wait_for(lambda: is_ready(url), 60)
        outputs = []
        for block in later:
            code = (
                block.code.replace("http://127.0.0.1:8000", url)
                .replace("sleep 2", "sleep 0.5")
                .replace("curl ", "curl -s ")
            )
            command = ["bash", "-ec", code] if block.language == "sh" else [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (block.name, done.stderr)
            outputs.append(done.stdout)
            if "feedback" in code:  # the guide waits for two seconds, which a busy machine may exceed
                wait_for(lambda: httpx.get(f"{url}/model").json()["learned"], 60)
        predicted, accepted, changed, learned, refused, _, rolled_back, migration = outputs
        assert json.loads(predicted)["predictions"][0]["id"] == "e1"
        assert json.loads(accepted) == {"repeated": [], "accepted": 1, "unknown": []}
        score = json.loads(predicted)["predictions"][0]["score"]
        assert json.loads(changed)["predictions"][0]["score"] > score
        assert json.loads(learned)["accepted"] == 2
        assert "price: text 'cheap' is not a number" in json.loads(refused)["error"]
        assert "continues from version 0" in rolled_back
        shown = PAGE.read_text()
        for line in migration.splitlines():
            if "events that wait" not in line:
                assert f"    {line}\n" in shown
        for name in ("cadam_staleness_seconds", "cadam_request_seconds", "cadam_requests_total", "cadam_learner_up"):
            assert f"`{name}`" in PAGE.read_text()
            assert name in httpx.get(f"{url}/metrics").text
        assert "cadam_diverged" in httpx.get(f"{url}/metrics").text
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
