"""MLflow. MLFLOW_TRACKING_URI names the server or the store; the project is the experiment.

Without it, the store is that of MLflow, ``mlflow.db`` in the working directory, and the folder ``mlruns`` where
SQLAlchemy is not installed: mlflow-skinny does not require it.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from nlgrpo.config.comparing import flat
from nlgrpo.training.tracking.trackers import Memory, TrackedRun

AT_ONCE = 100  # parameters of one request
LONGEST = 6000  # characters of a parameter


@dataclass
class MLflow:
    client: MlflowClient
    run: str
    monitor: SystemMetricsMonitor | None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        self.client.log_table(self.run, data, artifact_file="completions.json")

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.finish()
        self.client.set_terminated(self.run)


def begin(run: TrackedRun, memory: Memory) -> MLflow:
    """Start a run, or continue the one of the same folder by its id. Records system metrics if psutil is there."""
    choose_store()
    client = MlflowClient()
    own = memory.get("mlflow")
    if own is None:
        own = client.create_run(_experiment(client, run.project), run_name=run.name).info.run_id
        memory.set("mlflow", own)
        params = [Param(key, str(value)[:LONGEST]) for key, value in flat(run.config).items()]
        for i in range(0, len(params), AT_ONCE):
            client.log_batch(own, params=params[i : i + AT_ONCE])
    else:
        client.update_run(own, status="RUNNING")
    return MLflow(client, own, _monitor(own, resumes=memory.resume_step > 0))


def choose_store() -> None:
    """Choose a store that MLflow can write as it is installed, unless MLFLOW_TRACKING_URI names one."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow refuses to write folders without it
    chosen = mlflow.get_tracking_uri()
    if chosen.startswith("sqlite") and "MLFLOW_TRACKING_URI" not in os.environ and not _has_sqlalchemy():
        mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())


def _has_sqlalchemy() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("sqlalchemy", "alembic"))


def _experiment(client: MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:  # another run has created it meanwhile
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)


def _monitor(run: str, resumes: bool) -> SystemMetricsMonitor | None:
    try:
        monitor = SystemMetricsMonitor(run, resume_logging=resumes)
    except ImportError:  # psutil
        return None
    monitor.start()
    return monitor
