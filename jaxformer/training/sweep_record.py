"""What a sweep's folder holds besides its runs: what is swept over, and how each run ended."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxformer.training.config import RunConfig, from_json, to_json
from jaxformer.training.overrides import ConfigError
from jaxformer.training.run_directory import RunDirectory, write_json


@dataclasses.dataclass(frozen=True)
class SweepDirectory:
    """Paths inside a sweep's folder.

    Attributes:
      path: the folder.
    """

    path: Path

    @property
    def record(self) -> Path:
        """The sweep: to read, and to go on with."""
        return self.path / "sweep.json"

    @property
    def table(self) -> Path:
        """A row for each run."""
        return self.path / "sweep.csv"

    @property
    def plot(self) -> Path:
        """Curves, and a map where two numbers vary."""
        return self.path / "sweep.png"

    def run(self, name: str) -> RunDirectory:
        """The directory of a run."""
        return RunDirectory(self.path / "runs" / name)


@dataclasses.dataclass
class SweepRecord:
    """A sweep as its folder keeps it.

    Attributes:
      base: the config that all runs begin with.
      sweep: what is swept over, as text.
      separate: whether the runs are trained one after another.
      max_together: runs trained together at most; None = any number.
      runs: by name, a run's status, the seconds it took and how many were trained together in that time.
    """

    base: RunConfig
    sweep: str
    separate: bool = False
    max_together: int | None = None
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def note(self, name: str, status: str, seconds: float, together: int) -> None:
        """Notes how far a run came, and adds the time it took."""
        earlier = self.runs.get(name, {}).get("seconds", 0.0)
        self.runs[name] = {"status": status, "seconds": round(earlier + seconds, 2), "together": together}

    def write(self, directory: SweepDirectory) -> None:
        """Writes the record, at once or not at all."""
        base = {"source": self.base.source, "arg": self.base.arg, "overrides": list(self.base.overrides)}
        stored = {"sweep": self.sweep, "separate": self.separate, "max_together": self.max_together, "runs": self.runs}
        write_json(directory.record, {**stored, **base, **to_json(self.base.config)})


def read_record(directory: SweepDirectory) -> SweepRecord:
    """Reads what `SweepRecord.write` wrote.

    Raises:
      ConfigError: there is no sweep, or it cannot be read.
    """
    try:
        stored = json.loads(directory.record.read_text())
        base = RunConfig(from_json(stored), stored["source"], stored["arg"], tuple(stored["overrides"]))
        return SweepRecord(base, stored["sweep"], stored["separate"], stored["max_together"], stored["runs"])
    except FileNotFoundError:
        raise ConfigError(f"{directory.path} holds no sweep to go on with: begin one with --config, --sweep") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory.record} cannot be read as a sweep: {error}") from error
