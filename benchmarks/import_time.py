"""What `import mattermill` costs next to `import torch`: fresh processes, in turns, median of repeats.

    python benchmarks/import_time.py [--repeats 7]

The third row is the import with the names that a script of stages uses, which does import torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

CASES = {
    "import torch": "import torch",
    "import mattermill": "import mattermill",
    "... and a model, stages, a batch": (
        "import mattermill as mm; mm.models.noble_gases(); mm.Relax(); mm.Produce(mm.NVE(), steps=1); mm.Batch.empty()"
    ),
    "... and a recipe": (
        "import mattermill as mm; mm.Recipe('r', model=mm.models.noble_gases(), graph=mm.Relax() >> mm.Heat(1, 2, 3))"
    ),
}


def measure(code: str) -> float:
    """Seconds that a fresh interpreter takes for `code`, its own start not counted."""
    clock = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", clock], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for code in CASES.values():
        measure(code)  # fill the file cache
    for _ in range(repeats):
        for name, code in CASES.items():
            seconds[name].append(measure(code))
    base = statistics.median(seconds["import torch"])
    table = Table("import", "median (s)", "min - max (s)", "ratio", title=f"imports, {repeats} repeats")
    for name, times in seconds.items():
        middle = statistics.median(times)
        table.add_row(name, f"{middle:.3f}", f"{min(times):.3f} - {max(times):.3f}", f"{middle / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
