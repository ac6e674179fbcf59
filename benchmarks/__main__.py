"""python -m benchmarks [NAME ...]: measure all, or those named, and write the results into benchmarks/README.md."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys

NAMES = ("construction", "training", "settled", "freezing", "scale", "models")


def main() -> None:
    """Measure each benchmark in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--publish", action="store_true", help="measure nothing: write the README from what was kept")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    if arguments.publish:
        pass
    elif len(names) == 1:
        measure(names[0])
    else:
        for name in names:
            subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)
    from benchmarks import _results

    _results.publish()
    sys.stdout.flush()
    os._exit(0)  # MindSpore prints hundreds of ignored errors when nets outlive its modules


def measure(name: str) -> None:
    """Measure one benchmark, and keep what it gives."""
    import warnings

    from benchmarks import _results

    os.environ.setdefault("GLOG_v", "3")
    warnings.simplefilter("ignore")
    print(f"# {name}", flush=True)
    _results.save(name, importlib.import_module(f"benchmarks.{name}").run())


if __name__ == "__main__":
    main()
