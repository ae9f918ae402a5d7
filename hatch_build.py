"""Compiles the C kernels into the wheel: one wheel for every Python and every torch on a platform.

Without a C compiler the package is built all the same, without them; `optimizer.explain()` then says so.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root) / "src" / "cadam" / "kernels" / "build.py"
        spec = importlib.util.spec_from_file_location("cadam_kernels_build", path)
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build()
        except build.BuildError as error:
            print(f"cadam: built without the C kernels: {error}", file=sys.stderr)
            build.LIBRARY.unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append("src/cadam/kernels/native.so")
