"""Build hook that generates the C kernels from the rules and compiles them into the wheel.

One wheel serves every version of Python and torch on a platform. Without a C compiler, or with
CADAM_WITHOUT_KERNELS=1, the package is built without kernels, and `optimizer.explain()` says so. A compiler that fails
is an error, and so is a $CC that does not exist.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """The hook that hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel."""
        source = Path(self.root) / "src"
        path = source / "cadam" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("cadam_kernels_build", path)
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        if reason := _compile(build, source):
            print(f"cadam: built without the C kernels: {reason}", file=sys.stderr)
            if version == "editable":  # an editable install runs from this folder, where an old library may be left
                for path in (build.LIBRARY, build.checksum_path(build.LIBRARY)):
                    path.unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += ["src/cadam/native/native.so", "src/cadam/native/native.so.sha256"]


def _header(source: Path) -> str:
    """Generate the C header of the rules in a separate process, which imports this source tree.

    The path is passed as an argument instead of PYTHONPATH, because pip removes the paths of editable installs from it.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import cadam.codegen.c_source as c; sys.stdout.write(c.header())"
    )
    command = [sys.executable, "-c", code, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cadam: the kernels could not be generated from the rules:\n{done.stderr}")
    return done.stdout


def _compile(build: ModuleType, source: Path) -> str:
    """Compile the kernels. Returns the reason if there are none, else an empty string."""
    if os.environ.get("CADAM_WITHOUT_KERNELS", "0") not in ("", "0"):
        return "CADAM_WITHOUT_KERNELS is set"
    try:
        build.build(_header(source))
    except build.NoCompilerError as error:
        return str(error)
    except build.BuildError as error:
        raise SystemExit(
            f"cadam: no C kernels could be compiled; CADAM_WITHOUT_KERNELS=1 builds without them: {error}"
        ) from error
    return ""
