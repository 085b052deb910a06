"""A report of every verb, made of numbers that were not measured. Texts from outside are hostile."""

from __future__ import annotations

import math
from pathlib import Path

from megabatch import audit, config, measurements
from megabatch.measuring.fit import fit_report
from megabatch.measuring.noise import noise_report
from megabatch.measuring.noise.branch import Branch
from megabatch.measuring.profile import profile_report
from megabatch.measuring.sweep import sweep_report
from megabatch.measuring.sweep.summary import Summary
from megabatch.planning.planner import plan
from megabatch.planning.report import plan_report
from megabatch.reporting.report import Report
from megabatch.reporting.run_report import read_folder, run_report

EVIL = "</pre></title><script>document.title='owned'</script>\"'><img src=http://evil.example/x onerror=alert(1)>|`"
RUN = config.as_table(config.build({"schedule": {"steps": 100}, "data": {"source": EVIL}}))
MIB = 2**20


def measured(found: object) -> measurements.Measured:
    return measurements.Measured(found, RUN, f"{EVIL} GPU", "2.13", "2026-11-15")


def fit() -> Report:
    trials = [
        {"size": size, "ran": size <= 48, "peak_bytes": size * MIB, "seconds": 0.5, "why": None if size <= 48 else EVIL}
        for size in (16, 64, 48)
    ]
    return fit_report(measured(measurements.Fit(48, 50 * MIB, (*trials[:2], {**trials[2], "predicted_bytes": 49 * MIB}))))


def profile() -> Report:
    points = [
        {
            "batch": batch, "chunk": 32, "ranks": 1, "keep": 2, "seconds": 0.1 * n, "spread": 0.01, "pairs_per_s": 10 * batch / n,
            "predicted_seconds": 0.09 * n, "peak_bytes": batch * MIB, "predicted_bytes": 1.1 * batch * MIB,
            "reserved_bytes": 2 * batch * MIB, "predicted_reserved": 2.1 * batch * MIB,
        }
        for n, batch in ((1, 1024), (1.2, 2048), (2.3, 4096))
    ]  # fmt: skip
    points.append({"batch": 8192, "chunk": 32, "ranks": 1, "out_of_memory": True})
    found = measurements.Profile(tuple(points), 4096, 2048, 2048, soonest=2048, critical=1000.0, notes=(EVIL,))
    return profile_report(measured(found))


def noise() -> Report:
    course = tuple({"step": step, "critical": 500.0 + step, "low": 300.0, "high": math.inf} for step in range(1, 60))
    branches = [Branch(64, 2.0, 0.0, 0.0, True), Branch(128, 2.01, 0.01, 0.02, True), Branch(256, math.inf, math.inf, 0.02, False)]
    return noise_report(measured(measurements.Noise(559.0, 300.0, math.inf, 64, True, course, 128)), branches)


def sweep() -> Report:
    summaries = [
        Summary(64, 1e-3, 0.1, (0.31, 0.33, 0.32), (9.0, 9.1, 9.2), 700.0, 100, 6400, gap=0.02, pairs=500, lost=(4096,)),
        Summary(1024, 4e-3, 0.1, (0.30, 0.31, 0.30), (4.0, 4.1, 4.2), 1600.0, 7, 6400, gap=0.01, pairs=500, edge="highest"),
    ]
    sides = {"choosing": 0.3, "training": 0.4, "loss": 1.5, "samples": 6400, "peak_bytes": 2**30, "pairs_per_s": 700.0}
    rows = [
        {"batch": each.batch, "lr": each.lr, "weight_decay": 0.1, "seed": seed, "quality": quality, "steps": each.steps,
         "seconds": each.times[seed], "error": None, **sides}
        for each in summaries for seed, quality in enumerate(each.qualities)
    ]  # fmt: skip
    rows.append({**rows[0], "batch": 4096, "quality": None, "error": EVIL})
    return sweep_report(measured(measurements.Sweep(64, 1e-3, "samples", tuple(each.as_row() for each in summaries))), rows)


def audited() -> Report:
    run = config.build({"schedule": {"samples": 400_000_000, "warmup": 0}, "batch": {"size": 8192}, "data": {"source": EVIL}})
    return audit.audit_report([*audit.audit(run), audit.Finding("code", "error", EVIL, EVIL, f"- {EVIL}\n+ fixed")])


def planned() -> Report:
    found = plan("vit + text", data="1M", gpu="8xH100", source=EVIL)
    return plan_report(found)


def trained(folder: Path) -> Report:
    return run_report(read_folder(folder))


VERBS = {"fit": fit, "profile": profile, "noise": noise, "sweep": sweep, "audit": audited, "plan": planned}
