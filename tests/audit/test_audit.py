"""The audit reports each mistake in files that have it, none in files without mistakes, and its diff fixes the mistake."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffs import apply
from test_corpus import PLANTED
from torch import nn

from megabatch import audit as package
from megabatch import config
from megabatch.audit import RULES, Finding, TrainingFacts, audit, audit_together, exit_code, read_any, rules_page
from megabatch.audit import rule as rule_module
from megabatch.audit.formats.toml_text import parse_toml
from megabatch.audit.readers import run as run_reader
from megabatch.audit.rules import batches, negatives, rates, steps
from megabatch.recipes import TrainingTask, advise_batch, advise_beta2, advise_rate, advise_warmup, too_few_updates
from megabatch.towers import LIBRARIES, build_tower, rows_are_independent
from megabatch.towers.model import build_towers

# Runs without a mistake. Each case below adds one.
GOOD_RUN = """\
out = "runs/good"  # where it goes

[data]
source = "pairs.csv"

[x]
name = "vit"

[y]
name = "text"

[batch]
size = 8192  # pairs
chunk = 512

[optimizer]
lr = 5e-4
betas = [0.9, 0.98]

[schedule]
epochs = 30
warmup = 2000
"""
GOOD_CLIP = """\
#!/bin/bash
# trains a CLIP
torchrun --nproc_per_node 8 -m open_clip_train.main \\
    --train-data 'shards/{0000..0999}.tar' \\
    --train-num-samples 400000000 \\
    --val-data held_out.csv \\
    --model ViT-B-32 --precision amp_bf16 \\
    --batch-size 512 --epochs 10 --lr 5e-4 --warmup 2000 \\
    --local-loss --gather-with-grad 2>&1 | tee log.txt
echo done
"""
GOOD_HF = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "learning_rate": 2e-05,
    "warmup_ratio": 0.1,
    "max_steps": 30000,
    "adam_beta2": 0.98,
    "eval_strategy": "steps",
    "average_tokens_across_devices": True,
}
GOOD_DS = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0003, "betas": [0.9, 0.95], "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0003, "warmup_num_steps": 500, "total_num_steps": 20000},
    },
    "bf16": {"enabled": True},
}
GOOD_FACTS = """\
[training]
objective = "lm"
micro = 8
ranks = 4
accumulation = 8
optimizer = "adam"
lr = 3e-4
beta2 = 0.95
warmup = 100
steps = 10000
token_mean = "total"
ema = 0.999
ema_at = "step"
clip_at = "step"
schedule_at = "step"
weight_decay = 0.1
decays_gains = false
held_out = true
"""
DATA = {"data": 10_000_000}
CLIP_FACTS = 'objective = "clip"\nranks = 8\nbatch = 8192\n'


class Case(NamedTuple):
    """A file with one mistake. known: facts given beside it. has_diff: whether the fix is a diff of the file."""

    code: str
    severity: str
    file: str
    text: str
    known: dict = {}  # noqa: RUF012
    has_diff: bool = True


def run(*changes: tuple[str, str]) -> str:
    return replaced(GOOD_RUN, *changes)


def clip(*changes: tuple[str, str]) -> str:
    return replaced(GOOD_CLIP, *changes)


def facts(*changes: tuple[str, str]) -> str:
    return replaced(GOOD_FACTS, *changes)


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def hf(**changes) -> str:
    return json.dumps(GOOD_HF | changes, indent=2)


def ds(**changes) -> str:
    return json.dumps(GOOD_DS | changes, indent=4)


BOTH = " --local-loss --gather-with-grad"
CASES = [
    # 8,192 of 10M with 5M different ones: B²/2 · (1/5M − 1/10M) = 3.36 pairs; 100k: 332, more than one in a hundred of the batch.
    Case("duplicates-as-negatives", "note", "run.toml",
         GOOD_RUN + '[loss]\nduplicates = "negative"\n', DATA | {"unique": 5_000_000}),
    Case("duplicates-as-negatives", "warning", "run.toml",
         GOOD_RUN + '[loss]\nduplicates = "negative"\n', DATA | {"unique": 100_000}),
    Case("duplicates-as-negatives", "warning", "args.json", hf(batch_sampler="batch_sampler"),
         {"objective": "clip", "gather": "exact", "ranks": 128, "data": 50_000, "unique": 10_000, "finetuning": True}),
    Case("duplicates-as-negatives", "warning", "train.sh", clip(("400000000", "20000000"), ("epochs 10", "epochs 200")),
         {"unique": 70_000}, has_diff=False),
    Case("scale-unclamped", "warning", "run.toml", GOOD_RUN + "[loss]\nmax_scale = 1000.0  # high\n", DATA),
    Case("not-filled-in", "note", "run.toml", run(('"pairs.csv"', '"FILL IN: the pairs"')), DATA, has_diff=False),
    Case("too-few-updates", "warning", "run.toml", run(("epochs = 30", "samples = 8_000_000"), ("2000", "98")), DATA),
    Case("too-few-updates", "error", "run.toml", run(("epochs = 30", "samples = 400_000"), ("2000", "4")), DATA),
    Case("too-few-updates", "note", "run.toml",
         run(("size = 8192", "size = 4096"), ("epochs = 30", "steps = 1900"), ("2000", "100")), {}),
    # Five epochs of 1,000 pairs make 79 updates of 64, the smallest batch that was measured.
    Case("too-little-training", "warning", "run.toml",
         run(("epochs = 30", "samples = 5_000"), ("2000", "4"), ("size = 8192", "size = 64"), ("chunk = 512", "chunk = 64")),
         {"data": 1_000}, has_diff=False),
    Case("no-negatives", "error", "loop.toml",
         '[training]\nobjective = "clip"\nranks = 1\nbatch = 1\nfinetuning = true\nsamples = 12_000_000\n'),
    Case("no-negatives", "error", "args.json", hf(per_device_train_batch_size=1),
         {"objective": "clip", "ranks": 1, "finetuning": True}),
    Case("too-few-updates", "warning", "train.sh",
         clip(("--epochs 10", "--epochs 1"), ("400000000", "8000000"), ("warmup 2000", "warmup 90"), ("size 512", "size 1024"))),
    # 300M samples pay for 73,242 updates at 4,096.
    Case("batch-below-floor", "warning", "run.toml", run(("size = 8192", "size = 512")), DATA),
    Case("batch-below-floor", "warning", "train.sh", clip(("--batch-size 512", "--batch-size 64"))),
    Case("batch-beyond-saturation", "warning", "run.toml",
         run(("size = 8192", "size = 524288"), ("epochs = 30", "samples = 12_000_000_000"))),
    Case("batch-beyond-saturation", "note", "train.sh",
         clip(("--batch-size 512", "--batch-size 8192 --siglip"), ("epochs 10", "epochs 90"))),
    Case("batch-exceeds-data", "error", "run.toml", run(("epochs = 30", "epochs = 90_000")), {"data": 5000}),
    Case("batch-arithmetic", "error", "ds.json", ds(train_batch_size=250)),
    Case("batch-arithmetic", "error", "ds.json", ds(), {"ranks": 4}),
    Case("batch-from-memory", "warning", "args.json", hf(auto_find_batch_size=True)),
    Case("batch-from-memory", "warning", "ds.json", ds(autotuning={"enabled": True})),
    Case("chunk-exceeds-shard", "note", "run.toml", GOOD_RUN, DATA | {"ranks": 64}),
    Case("finetune-batch", "warning", "args.json", hf(per_device_train_batch_size=512, max_steps=1900),
         {"objective": "supervised", "finetuning": True, "ranks": 2}),
    Case("finetune-batch", "note", "args.json", hf(per_device_train_batch_size=512, max_steps=-1),
         {"objective": "supervised", "finetuning": True, "ranks": 2}),
    Case("finetune-batch", "warning", "run.toml",
         run(('"vit"', '"vit"\nweights = "a"'), ('"text"', '"text"\nweights = "b"'), ("5e-4", "5e-5"), ("2000", "20")),
         {"data": 400_000}),
    Case("finetune-rate", "warning", "train.sh", clip(("--model", "--pretrained laion2b --model"), ("--lr 5e-4", "--lr 5e-3"))),
    # 5e-5 for language models of BERT's size, and ten times that, is not unusual; up to three times more is in doubt.
    Case("finetune-rate", "note", "args.json", hf(learning_rate=1e-3), {"finetuning": True, "objective": "lm"}),
    Case("rate-unusual", "warning", "train.sh", clip(("--lr 5e-4", "--lr 2e-2"))),
    Case("rate-unusual", "note", "args.json", hf(learning_rate=1e-7), {"finetuning": True, "objective": "lm"}),
    # A base of 1e-3 at 256: √32 of it at 8,192 is 5.7e-3; 1.2e-4 at 512 is 4.8e-4.
    Case("rate-not-scaled", "warning", "run.toml", run(("5e-4", "1e-3")), DATA | {"base_lr": 1e-3, "base_batch": 256}),
    Case("rate-not-scaled", "warning", "args.json",
         hf(gradient_accumulation_steps=16), {"base_lr": 2e-5, "base_batch": 16, "ranks": 1}),
    Case("no-warmup", "warning", "run.toml", run(("warmup = 2000", "warmup = 0")), DATA),
    # 30 epochs of 10M make 36,622 updates: 1,831 steps of warm-up.
    Case("no-warmup", "note", "run.toml", run(("warmup = 2000", "warmup = 150")), DATA),
    Case("no-warmup", "warning", "run.toml", run(("warmup = 2000", "warmup = 30")), DATA),
    Case("no-warmup", "warning", "run.toml", run(("5e-4", '0.8\nname = "sgd"'), ("warmup = 2000", "warmup = 0")), DATA),
    Case("no-warmup", "warning", "train.sh", clip(("--epochs 10", "--epochs 10 --skip-scheduler"))),
    Case("no-warmup", "note", "args.json", hf(lr_scheduler_type="constant")),
    Case("warmup-too-long", "error", "train.sh",
         clip(("--epochs 10", "--epochs 1"), ("400000000", "20000000"), (" --warmup 2000", ""))),
    Case("warmup-too-long", "warning", "run.toml", run(("warmup = 2000", "warmup = 0.7")), DATA),
    Case("beta2-too-slow", "warning", "run.toml",
         run(("0.98", "0.999"), ("size = 8192", "size = 16384"), ("epochs = 30", "epochs = 60")), DATA),
    Case("beta2-too-slow", "warning", "train.sh", clip(("--batch-size 512", "--batch-size 4096 --beta2 0.999"))),
    Case("rate-ignores-growth", "warning", "run.toml",
         run(("chunk = 512", 'chunk = 512\nschedule = "linear"\nstart = 512\nlr_rule = "none"'))),
    Case("layerwise-optimizer", "note", "train.sh", clip(("--lr 5e-4", "--lr 5e-4 --opt timm/lamb"))),
    Case("decay-on-gains", "warning", "loop.toml", facts(("decays_gains = false", "decays_gains = true"))),
    Case("decay-on-gains", "note", "ds.json",
         ds(optimizer={"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}), has_diff=False),
    Case("negatives-per-rank", "error", "loop.toml", f'[training]\n{CLIP_FACTS}gather = "none"\n'),
    Case("negatives-per-rank", "note", "ds.json", ds(), {"objective": "clip", "finetuning": True}, has_diff=False),
    Case("gather-without-gradient", "error", "train.sh", clip((" --gather-with-grad", ""))),
    Case("gather-without-gradient", "note", "train.sh", clip((" --gather-with-grad", ""), ("_node 8", "_node gpu"))),
    Case("whole-matrix-on-each-rank", "note", "train.sh", clip((BOTH, ""))),
    Case("whole-matrix-on-each-rank", "note", "train.sh", clip((" --local-loss", ""))),
    Case("whole-matrix-on-each-rank", "warning", "train.sh", clip((BOTH, " --grad-clip-norm 1.0"))),
    Case("accumulation-adds-no-negatives", "error", "args.json", hf(gradient_accumulation_steps=8),
         {"objective": "clip", "gather": "exact", "ranks": 4}),
    Case("accumulation-adds-no-negatives", "error", "ds.json", ds(gradient_accumulation_steps=4),
         {"objective": "clip", "gather": "exact", "finetuning": True}),
    Case("accumulated-scale-gradient", "warning", "train.sh",
         clip(("--batch-size 512", "--batch-size=128 --accum-freq 4 --grad-clip-norm 1"))),
    Case("ema-per-micro-batch", "error", "loop.toml", facts(('ema_at = "step"', 'ema_at = "micro-batch"'))),
    Case("clip-per-micro-batch", "error", "loop.toml", facts(('clip_at = "step"', 'clip_at = "micro-batch"'))),
    Case("schedule-per-micro-batch", "error", "loop.toml", facts(('schedule_at = "step"', 'schedule_at = "micro-batch"'))),
    Case("mean-of-means", "error", "loop.toml", facts(('token_mean = "total"', 'token_mean = "micro-batch"\nragged = true'))),
    Case("mean-of-means", "warning", "args.json", hf(average_tokens_across_devices=False), {"objective": "lm", "ranks": 2}),
    Case("mean-of-means", "note", "ds.json",
         ds(train_batch_size=1024, gradient_accumulation_steps=4), {"objective": "lm"}, has_diff=False),
    # 0.9999 to the power of 10,000 is 0.37.
    Case("ema-remembers-the-start", "warning", "loop.toml", facts(("0.999", "0.9999"))),
    Case("batchnorm-on-few-rows", "warning", "train.sh",
         clip(("ViT-B-32", "RN50"), ("size 512", "size 8"), ("_node 8", "_node 8 --nnodes 64"), ("--lr", "--beta2 0.98 --lr"))),
    Case("batchnorm-on-few-rows", "warning", "run.toml", run(("chunk = 512", "chunk = 8")), DATA | {"batchnorm": True}),
    Case("batchnorm-in-chunks", "note", "run.toml", GOOD_RUN, DATA | {"batchnorm": True, "ranks": 1}, has_diff=False),
    Case("fp16-unscaled", "error", "train.sh", clip(("amp_bf16", "pure_fp16"))),
    Case("fp16-unscaled", "error", "ds.json", ds(bf16={"enabled": False}, fp16={"enabled": True, "loss_scale": 1})),
    Case("half-precision-weights", "warning", "train.sh", clip(("amp_bf16", "bf16"))),
    Case("nothing-held-out", "warning", "run.toml", run(('"pairs.csv"', '"pairs.csv"\nheld_out = 0.0')), DATA),
    Case("nothing-held-out", "note", "args.json", hf(eval_strategy="no")),
    Case("nothing-held-out", "note", "train.sh", clip(("    --val-data held_out.csv \\\n", "")), has_diff=False),
    Case("accumulation-adds-no-negatives", "note", "args.json", hf(gradient_accumulation_steps=8),
         {"objective": "clip", "gather": "exact", "ranks": 4, "negatives": 7, "finetuning": True}),
    Case("negatives-per-rank", "warning", "args.json", hf(),
         {"objective": "clip", "gather": "none", "ranks": 4, "finetuning": True}, has_diff=False),
    Case("scale-outside-ddp", "note", "loop.toml", facts(("ranks = 4", "scale_outside_ddp = true")), has_diff=False),
    Case("cached-gradient-sum", "note", "loop.toml", facts(("ranks = 4", "cached_gradient_sum = true")), has_diff=False),
    Case("chunk-exceeds-shard", "warning", "loop.toml",
         f'[training]\n{CLIP_FACTS}gather = "exact"\nchunk = 32768\nmicro = 1024\naccumulation = 1\n'),
]  # fmt: skip


def audited(folder: Path, file: str, text: str, known: dict) -> list[Finding]:
    (folder / file).write_text(text)
    return audit(read_any(folder / file, **known))


def codes(findings) -> set[str]:
    return {finding.code for finding in findings}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}-{case.file}")
def test_a_file_with_one_mistake_has_one_finding_and_its_diff_fixes_it(case, tmp_path):
    found = audited(tmp_path, case.file, case.text, case.known)
    (finding,) = [f for f in found if f.code == case.code]
    assert finding.severity == case.severity
    worse = [f for f in found if f.code != case.code and f.severity != "note"]
    assert not worse, worse
    assert finding.why and finding.source and finding.where
    is_diff = finding.fix.startswith("--- ")
    assert is_diff == case.has_diff, finding.fix
    if is_diff:
        after = audited(tmp_path, case.file, apply(finding.fix, case.text), case.known)
        assert codes(after) <= codes(found) - {case.code}


def test_every_rule_reports_every_severity_that_it_declares(tmp_path):
    declared = {(rule.code, severity) for rule in RULES for severity in rule.severities}
    reported = {(case.code, case.severity) for case in CASES}
    # The corpus has further cases; only the rules are run on them here.
    for case in PLANTED:
        (tmp_path / case["file"]).write_text(case["text"])
        training = read_any(tmp_path / case["file"], **case.get("known", {})).training
        reported |= {(rule.code, violation.severity) for rule in RULES for violation in rule.violations(training)}
    assert reported == declared
    assert len({rule.code for rule in RULES}) == len(RULES)


GOOD = [
    ("run.toml", GOOD_RUN, DATA),
    ("train.sh", GOOD_CLIP, {}),
    ("args.json", hf(), {"ranks": 2, "objective": "lm"}),
    ("args.json", hf(), {"ranks": 2, "objective": "supervised", "finetuning": True}),
    ("ds.json", ds(), {"objective": "supervised"}),
    ("loop.toml", GOOD_FACTS, {}),
]


@pytest.mark.parametrize(("file", "text", "known"), GOOD)
def test_a_good_run_has_nothing_above_a_note(file, text, known, tmp_path):
    assert [f for f in audited(tmp_path, file, text, known) if f.severity != "note"] == []


def test_the_embedded_default_has_few_updates_and_no_other_finding():
    # The embedded run is short, so that it can serve as a demonstration.
    assert codes(audit(config.build(config.EMBEDDED))) == {"too-few-updates"}


def test_unknown_facts_raise_no_violation():
    for rule in RULES:
        assert rule.violations(TrainingFacts()) == []


def test_one_pair_is_an_error_whatever_else_is_known_unless_it_has_mined_negatives():
    for seen in (None, 100, 10**8):
        training = TrainingFacts(objective="clip", batch=1, ranks=1, samples=seen, lr=1e-5, optimizer="adam")
        assert [violation.severity for violation in batches.no_negatives.violations(training)] == ["error"]
        # A run of megabatch with one pair and no hard negatives is refused when it is read.
        for change in ({"negatives": 7}, {"batch": 2}, {"objective": "supervised"}, {"tool": "megabatch"}):
            assert batches.no_negatives.violations(dataclasses.replace(training, **change)) == []


@pytest.mark.parametrize("data", [50, 500, 2_000, 10_000, 100_000])
@pytest.mark.parametrize("start", ["scratch", "pretrained", "locked"])
@pytest.mark.parametrize("end", ["value", "high"])
def test_the_audit_warns_of_an_advised_batch_where_a_plan_does_and_in_its_words(data, start, end):
    task = TrainingTask("image-text", start, data=data, seen=data)
    size = round(getattr(advise_batch(task), end))
    known = {"finetuning": start == "pretrained", "locked": start == "locked"} if start != "locked" else {"locked": True}
    training = TrainingFacts(objective="clip", batch=size, ranks=1, samples=data, data=data, **known)
    found = [v for rule in batches.RULES for v in rule.violations(training) if v.severity != "note"]
    shortage = too_few_updates(task, size)
    assert [v.severity for v in found] == ([] if shortage is None else ["warning"])
    for violation in found:
        assert shortage.says in violation.text and shortage.remedy[1:] in violation.advice


def test_accumulation_of_a_mean_is_no_mistake_however_long(tmp_path):
    text = facts(("accumulation = 8", "accumulation = 1024"))
    assert audited(tmp_path, "loop.toml", text, {}) == []


@pytest.mark.parametrize(
    ("micro", "accumulation", "ranks", "optimizer", "lr", "fine"),
    [
        # From 0.1 at 256 (Goyal): 3.2 at 8,192. From 1e-3 at 256 by the square root: 4e-3 at 4,096.
        (256, 1, 32, "sgd", 3.2, True),
        (256, 1, 32, "sgd", 0.1, False),
        (32, 8, 32, "sgd", 3.2, True),
        (32, 8, 32, "sgd", 0.4, False),
        (64, 8, 8, "adam", 4e-3, True),
        (64, 8, 8, "adam", 1e-3, False),
        (64, 8, 8, "adam", 16e-3, False),
        (256, 1, 2, "adam", 1e-3, True),
    ],
)
def test_the_rate_follows_the_effective_batch(micro, accumulation, ranks, optimizer, lr, fine):
    base = 0.1 if optimizer == "sgd" else 1e-3
    training = TrainingFacts(
        micro=micro, accumulation=accumulation, ranks=ranks, optimizer=optimizer, lr=lr, base_lr=base, base_batch=256
    )
    assert (rates.rate_not_scaled.violations(training) == []) == fine


def test_a_rate_that_forgot_accumulation_is_named():
    training = TrainingFacts(micro=32, accumulation=8, ranks=32, optimizer="sgd", lr=0.4, base_lr=0.1, base_batch=256)
    (violation,) = rates.rate_not_scaled.violations(training)
    assert "the batch without accumulation (1,024)" in violation.text and violation.changes == {"lr": 3.2}


def test_equal_captions_meet_only_where_the_data_has_some():
    training = TrainingFacts(objective="clip", batch=32_768, unique=70_000, data=1_000_000, duplicates="negative")
    (violation,) = negatives.duplicates_as_negatives.violations(training)
    # 32,768²/2 · (1/70,000 − 1/1,000,000).
    assert "about 7,133 pairs" in violation.text
    for unique in (None, 1_000_000):
        assert negatives.duplicates_as_negatives.violations(dataclasses.replace(training, unique=unique)) == []


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("updates", [300, 30_000, 1_000_000])
def test_warm_up_is_that_of_a_plan_whatever_beta2(beta2, updates):
    training = TrainingFacts(objective="clip", finetuning=False, optimizer="adam", beta2=beta2, warmup=0, steps=updates, batch=4096)
    (violation,) = rates.no_warmup.violations(training)
    planned = advise_warmup(TrainingTask("image-text", seen=updates * 4096), 4096)
    assert violation.changes == {"warmup": planned.value}


@pytest.mark.parametrize("warmup", [500, 2000, 10_000, 20_000])
@pytest.mark.parametrize("beta2", [0.95, 0.98, 0.999])
def test_published_warm_ups_are_not_changed(warmup, beta2):
    training = TrainingFacts(
        objective="clip", finetuning=False, optimizer="adam", lr=5e-4, beta2=beta2, warmup=warmup, steps=100_000, batch=8192
    )
    assert rates.no_warmup.violations(training) == rates.warmup_too_long.violations(training) == []


def test_a_fix_takes_the_rate_of_a_plan_and_never_scales_the_users_rate_up(tmp_path):
    text = "torchrun --nproc_per_node 8 -m open_clip_train.main --train-data d --train-num-samples 400000000 --model ViT-L-14"
    text += " --batch-size 64 --lr {} --warmup 2000 --local-loss --gather-with-grad --val-data v --precision amp_bf16\n"
    # A plausible rate stays; OpenCLIP has no chunks, but accumulates with all negatives.
    (finding,) = audited(tmp_path, "train.sh", text.format("5e-4"), {})
    fixed = apply(finding.fix, text.format("5e-4"))
    assert finding.code == "batch-below-floor" and "--accum-freq 8" in fixed and "--batch-size 64" in fixed and "--lr 5e-4" in fixed
    (finding,) = audited(tmp_path, "train.sh", text.format("5e-2").replace("size 64", "size 512"), {})
    planned = advise_rate(TrainingTask("image-text", seen=32 * 400_000_000), 4096).value
    assert finding.code == "rate-unusual" and f"--lr {planned} " in apply(
        finding.fix, text.format("5e-2").replace("size 64", "size 512")
    )


def test_rows_of_batchnorm_are_those_of_a_chunk_and_of_all_ranks_when_synchronised():
    rule = steps.batchnorm_on_few_rows
    few = TrainingFacts(batchnorm=True, batch=64, ranks=8, sync_batchnorm=False)
    assert rule.violations(few)[0].changes == {"sync_batchnorm": True}
    assert rule.violations(TrainingFacts(batchnorm=True, batch=64, ranks=8, sync_batchnorm=True)) == []
    assert rule.violations(TrainingFacts(batchnorm=True, batch=128, ranks=8, sync_batchnorm=False)) == []
    assert rule.violations(TrainingFacts(batchnorm=True, batch=8, ranks=1))[0].changes == {}


def test_a_model_provides_its_normalization_and_precision():
    built = config.build({"x": {"name": "a:b"}, "batch": {"chunk": 8}, "schedule": {"samples": 40_000_000}})
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert "batchnorm-on-few-rows" not in codes(audit(built))
    assert "batchnorm-on-few-rows" in codes(audit(built, model))
    model[1].eval()
    assert "batchnorm-on-few-rows" not in codes(audit(built, model))
    assert "half-precision-weights" in codes(audit(built, nn.Linear(2, 2).bfloat16()))
    synced = nn.Sequential(nn.SyncBatchNorm(4))
    assert "batchnorm-on-few-rows" not in codes(audit(built, synced, ranks=4))


def test_a_shell_script_is_read_as_the_launcher_and_the_tool_would():
    script = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python -u src/open_clip_train/main.py --batch-size=$B"
    training = read_any(f"{script} --train-data x\n").training
    assert (training.ranks, training.micro, training.size) == (32, None, None)
    # Defaults of open_clip_train/params.py: RN50, β2 0.999, warm-up 10,000; the precision depends on the version.
    assert (training.beta2, training.warmup, training.lr, training.batchnorm) == (0.999, 10000, 5e-4, True)
    assert training.precision is None and training.loss_scaling is None
    assert read_any("python -m training.main --train-data x --model ViT-L-14").training.beta2 == 0.98
    assert read_any("python -m training.main --train-data x --batch-size 32").training.size == 32
    assert read_any("mpirun python -m training.main --train-data x").training.ranks is None


OPEN_CLIP = "python -m open_clip_train.main --train-data x"
CLASSIFY = '[x]\nname = "cnn"\n[y]\nname = "a:b"\n[loss]\nobjective = "classify"\n[schedule]\nsteps = 9\n'
READ = [
    ("a.sh", f"{OPEN_CLIP} --dataset-resampled --train-num-samples 1000 --epochs 4", {"seen": 4000, "data": None, "updates": 63}),
    ("a.sh", f"{OPEN_CLIP} --train-num-samples 1000 --epochs 4", {"seen": 4000, "data": 1000, "accumulates": "features"}),
    ("a.sh", f"{OPEN_CLIP} --opt timm/sgd --lr 1", {"optimizer": "sgd", "beta2": None, "lr": 1.0}),
    ("a.sh", f"{OPEN_CLIP} --lock-image --resume latest", {"batchnorm": None, "finetuning": None}),
    ("a.sh", f"{OPEN_CLIP} --siglip --batch-size 7 | tee --batch-size 9", {"objective": "siglip", "gather": "exact", "micro": 7}),
    ("a.json", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}', {"size": 64, "accumulation": None, "ranks": None}),
    ("a.json", '{"train_micro_batch_size_per_gpu": 4}', {"accumulation": 1, "size": None}),
    ("a.json", ds(train_batch_size=512, gradient_accumulation_steps=2), {"ranks": 8, "size": 512, "beta2": 0.95, "warmup": 500}),
    ("a.json", ds(train_batch_size="auto", gradient_accumulation_steps="auto"), {"size": None, "accumulation": None, "lr": 3e-4}),
    ("a.json", ds(optimizer={"type": "Adam"}, scheduler={"type": "WarmupLR"}), {"beta2": 0.999, "warmup": 1000, "steps": None}),
    ("a.json", ds(optimizer={"type": "Lamb"}, scheduler={"type": "OneCycle"}), {"optimizer": "lamb", "warmup": None}),
    ("a.json", ds(), {"clip_norm": None}),
    ("a.json", ds(gradient_clipping=0.0), {"clip_norm": 0.0}),
    ("a.json", hf(max_grad_norm=2.0), {"clip_norm": 2.0}),
    ("a.json", hf(max_grad_norm=2.0, deepspeed={"gradient_clipping": "auto"}), {"clip_norm": 2.0}),
    ("a.json", hf(max_grad_norm=2.0, deepspeed={"gradient_clipping": 2.0}), {"clip_norm": 2.0}),
    ("a.json", hf(max_grad_norm=2.0, deepspeed={"zero_optimization": {"stage": 1}}), {"clip_norm": None}),
    ("a.json", hf(max_grad_norm=2.0, deepspeed="elsewhere.json"), {"clip_norm": None}),
    ("a.json", ds(fp16={"enabled": True}), {"precision": "fp16", "loss_scaling": True}),
    ("a.json", '{"warmup_steps": 0}', {"micro": 8, "epochs": 3.0, "lr": 5e-5, "beta2": 0.999, "optimizer": "adam", "ranks": None}),
    ("a.json", hf(optim="sgd", fp16=True), {"beta2": None, "loss_scaling": True, "precision": "fp16", "warmup_steps": 3000}),
    ("a.json", hf(batch_sampler="no_duplicates"), {"duplicates": "mask", "token_mean": "total", "held_out": True}),
    ("a.toml", CLASSIFY, {"objective": "supervised", "gather": None, "duplicates": None, "batchnorm": False}),
    ("a.toml", GOOD_RUN + "[compute]\nprecision = 'fp16'\n", {"loss_scaling": True, "seen": None, "warmup_steps": 2000}),
    ("a.toml", run(('"text"', '"text"\nweights = "b"')), {"finetuning": None}),
    ("a.toml", run(('"text"', '"text"\nweights = "b"'), ('"vit"', '"vit"\nlocked = true')), {"finetuning": True}),
    ("a.toml", run(("chunk = 512", 'schedule = "steps"\nstart = 64')), {"rate_follows": True, "epochs": None, "updates": None}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "expected"), READ)
def test_configurations_of_each_tool_become_the_same_facts(file, text, expected, tmp_path):
    (tmp_path / file).write_text(text)
    training = read_any(tmp_path / file).training
    assert {name: getattr(training, name) for name in expected} == expected


REPORTED = [
    (negatives.negatives_per_rank, {"batch": 8192, "ranks": 8, "gather": "none"}, "1,023 negatives instead of 8,191"),
    (
        negatives.accumulation_adds_no_negatives,
        {"micro": 8, "ranks": 1, "accumulation": 8, "accumulates": "plain"},
        "7 negatives per sample, not 63",
    ),
    (negatives.whole_matrix, {"batch": 65536, "ranks": 8, "gather": "matrix"}, "16,384 MiB"),
    (negatives.whole_matrix, {"batch": 64, "ranks": 8, "gather": "whole"}, "8 times too short"),
    (
        rates.rate_not_scaled,
        {"optimizer": "adam", "batch": 32768, "lr": 1e-3, "base_lr": 1e-3, "base_batch": 256},
        "0.011 (square-root). The batch is far",
    ),
    (
        rates.rate_not_scaled,
        {"optimizer": "adam", "batch": 4096, "lr": 1e-3, "base_lr": 1e-3, "base_batch": 256},
        "0.004 (square-root).",
    ),
    (
        rates.rate_not_scaled,
        {"optimizer": "sgd", "batch": 16384, "lr": 0.1, "base_lr": 0.1, "base_batch": 4096},
        "0.4 (linear). The batch is far",
    ),
    (steps.ema_remembers_the_start, {"ema": 0.9999, "steps": 10_000}, "37% of the average"),
]


@pytest.mark.parametrize(("rule", "facts", "numbers"), REPORTED)
def test_a_finding_states_the_numbers(rule, facts, numbers):
    (violation,) = rule.violations(TrainingFacts(objective="clip", **facts))
    assert numbers in violation.text


@pytest.mark.usefixtures("without_law")
def test_another_batch_changes_rate_warm_up_and_chunk():
    training = TrainingFacts(
        objective="clip", batch=8192, ranks=3, chunk=4096, optimizer="adam", lr=1e-3, beta2=0.98, warmup=3, samples=10**7
    )
    # 4,095 is what three ranks share evenly; a rate that is plausible there stays; of 2,443 updates, 5 % warm up.
    assert training.at_batch(4096) == {"batch": 4095, "chunk": 1365, "warmup": 122}
    known = {"base_lr": 2e-3, "base_batch": 1024, "warmup": 200}
    assert dataclasses.replace(training, **known, chunk=64).at_batch(4096) == {"batch": 4095, "lr": 4e-3}


def gradients_over_ranks(patch, ranks, **flags):
    """Gradients of two projections and of the scale, averaged over ranks as DDP does, by OpenCLIP's loss with simulated ranks."""
    loss = pytest.importorskip("open_clip.loss")
    torch.manual_seed(0)
    inputs, weights = torch.randn(2, ranks, 5, 6, dtype=torch.double), torch.randn(2, 6, 3, dtype=torch.double)
    weights, scale = weights.requires_grad_(), torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    sides = [list(F.normalize(side, dim=-1)) for side in torch.einsum("srnd,sde->srne", inputs, weights)]

    def all_ranks(own):
        return next(side for side in sides if any(rows is own for rows in side))

    def fill(outputs, own):
        outputs[:] = [rows.detach().clone() for rows in all_ranks(own)]

    patch.setattr(torch.distributed.nn, "all_gather", all_ranks)
    patch.setattr(loss.dist, "all_gather", fill)
    losses = [loss.ClipLoss(rank=r, world_size=ranks, **flags)(sides[0][r], sides[1][r], scale) for r in range(ranks)]
    return torch.autograd.grad(sum(losses) / ranks, [weights, scale])


def test_open_clips_flags_change_the_gradient_as_the_findings_state(monkeypatch):
    exact, scale = gradients_over_ranks(monkeypatch, 4, local_loss=True, gather_with_grad=True)
    one, one_scale = gradients_over_ranks(monkeypatch, 4, local_loss=False, gather_with_grad=True)
    assert torch.allclose(one, exact) and torch.allclose(one_scale, scale)
    whole, whole_scale = gradients_over_ranks(monkeypatch, 4, local_loss=False, gather_with_grad=False)
    assert torch.allclose(whole, exact / 4) and torch.allclose(whole_scale, scale)
    partial, _ = gradients_over_ranks(monkeypatch, 4, local_loss=True, gather_with_grad=False)
    assert (partial * exact).sum() / exact.square().sum() == pytest.approx(0.5, abs=0.05)
    assert (partial - exact).norm() / exact.norm() == pytest.approx(0.5, abs=0.05)


def test_open_clips_own_parser_has_the_defaults_that_are_assumed():
    params = pytest.importorskip("open_clip_train.params")
    from megabatch.audit.readers import open_clip

    parsed = vars(params.parse_args(["--opt", "timm/x"])) | {"opt": "adamw"}
    # The default precision changed with 4.0, as the option for a compiled step came: both count as unknown.
    parsed |= {"precision": None, "torchcompile_strategy": None, "use_naflex": False}
    for flag, default in open_clip.VALUES.items():
        assert parsed[flag[2:].replace("-", "_")] == default, flag
    for flag in open_clip.SWITCHES:
        assert parsed[flag[2:].replace("-", "_")] is False, flag


def test_hugging_faces_own_arguments_have_the_defaults_that_are_assumed():
    arguments = pytest.importorskip("transformers").TrainingArguments
    from megabatch.audit.readers import transformers

    # The ratio is gone from newer versions, the fused optimizer is of the same family.
    for key, default in transformers.DEFAULTS.items():
        if key not in ("warmup_ratio", "optim"):
            field = arguments.__dataclass_fields__[key]
            assert getattr(field.default, "value", field.default) == default, key


@pytest.mark.parametrize(
    ("file", "text", "known", "reason"),
    [
        ("a.toml", "[batch\n", {}, "is not valid TOML"),
        ("a.toml", "[batch]\nsiez = 3\n[schedule]\nsteps = 1\n", {}, "did you mean 'size'"),
        ("a.toml", "[training]\nbatch = -4\n", {}, "batch is -4: must be above 0"),
        ("a.toml", "[training]\nbatches = 4\n", {}, "did you mean 'batch'"),
        ("a.toml", '[training]\nobjective = "poetry"\n', {}, "must be one of"),
        ("a.toml", "[training]\nbeta2 = 1.0\n", {}, "must be below 1"),
        ("a.toml", "[training]\nheld_out = 3\n", {}, "must be true or false"),
        ("a.toml", "[training]\nbatch = 2.5\n", {}, "must be an integer"),
        ("a.toml", "[training]\n[batch]\nsize = 3\n", {}, "not both"),
        ("a.toml", GOOD_RUN, {"rank": 2}, "did you mean 'ranks'"),
        ("a.toml", GOOD_RUN, {"ranks": 0}, "ranks is 0"),
        ("a.json", "{", {}, "is not valid JSON"),
        ("a.json", "[1]", {}, "holds a list"),
        ("a.json", '{"colour": "red"}', {}, "has no key of"),
        ("a.json", '{"per_device_train_batch_size": 0}', {}, "must be an integer of at least 1"),
        ("a.json", '{"learning_rate": "fast"}', {}, "must have the type of its default"),
        ("a.json", '{"train_batch_size": "many"}', {}, 'or "auto"'),
        ("a.json", '{"train_batch_size": -8}', {}, "must be above 0"),
        ("a.sh", "echo hello", {}, "cannot be audited"),
        ("a.sh", "python -m open_clip_train.main --train-data x --batch-size big", {}, "must be an integer"),
        ("a.sh", "python -m open_clip_train.main --train-data x --batch-size", {}, "has no value"),
        ("a.sh", "python -m open_clip_train.main --imagenet-val x", {}, "has no --train-data"),
        ("a.sh", "python -m open_clip_train.main --train-data x --precision fp8", {}, "must be one of"),
        ("a.sh", "python -m open_clip_train.main --train-data x --siglip --loss-dist-impl y", {}, "must be one of"),
        ("a.sh", "python -m open_clip_train.main --train-data 'x", {}, "is not valid shell syntax"),
    ],
)
def test_invalid_files_and_facts_raise_with_the_reason(file, text, known, reason, tmp_path):
    with pytest.raises(ValueError, match=re.escape(reason)):
        audited(tmp_path, file, text, known)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read"):
        read_any(tmp_path / "none.toml")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not a text file"):
        read_any(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["batch = {size = 8192, chunk = 512}\nschedule = {epochs = 30, warmup = 0}\n",
                                  "batch.size = 8192\nschedule.epochs = 30\nschedule.warmup = 0\n"])  # fmt: skip
def test_a_file_whose_lines_cannot_be_found_is_rewritten(text, tmp_path):
    (finding,) = audited(tmp_path, "run.toml", text, DATA)
    assert finding.code == "no-warmup"
    assert audited(tmp_path, "run.toml", apply(finding.fix, text), DATA) == []


def test_a_fix_leaves_comments_and_other_lines_alone(tmp_path):
    text = run(("size = 8192", "size = 512"))
    (finding,) = audited(tmp_path, "run.toml", text, DATA)
    changed = [line for line in finding.fix.splitlines()[2:] if line[0] in "+-"]
    assert changed == ["-size = 512  # pairs", "+size = 4096  # pairs"]


def test_findings_come_worst_first_and_the_exit_code_follows_them(tmp_path):
    text = clip((BOTH, " --local-loss"), ("--val-data held_out.csv", "--accum-freq 2 --grad-clip-norm 1"))
    found = audited(tmp_path, "train.sh", text, {})
    order = [f.severity for f in found]
    assert order == sorted(order, key=["error", "warning", "note"].index) and set(order) == {"error", "warning", "note"}
    by_severity = {severity: [f for f in found if f.severity == severity] for severity in order}
    assert [exit_code(by_severity["warning"], level) for level in ("error", "warning", "note")] == [0, 1, 1]
    assert exit_code(found) == 1 and exit_code([]) == 0 and exit_code(by_severity["note"], "note") == 1
    with pytest.raises(ValueError, match="fail_on is 'never'"):
        exit_code([], "never")


def compared(folder, *texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.toml").write_text(text)
    return audit_together([read_any(folder / f"{number}.toml", **DATA) for number in range(len(texts))])


def test_one_rate_at_several_batches_is_an_unfair_comparison(tmp_path):
    # CLIP's rate from scratch is the same up to 32,768 pairs, and grows with the square root above.
    assert compared(tmp_path, GOOD_RUN, run(("size = 8192", "size = 32768"))) == []
    larger = run(("size = 8192", "size = 131072"))
    (finding,) = compared(tmp_path, GOOD_RUN, larger)
    assert finding.code == "same-settings-across-batches" and finding.where == f"{tmp_path}/1.toml: optimizer.lr"
    fixed = apply(finding.fix, larger)
    assert "lr = 0.001\n" in fixed
    assert compared(tmp_path, GOOD_RUN, fixed) == []
    assert compared(tmp_path, GOOD_RUN, GOOD_RUN) == []


def test_runs_of_different_length_are_an_unfair_comparison(tmp_path):
    steps_each = [run(("size = 8192", f"size = {size}"), ("5e-4", lr), ("epochs = 30", "steps = 20000"))
                  for size, lr in ((8192, "5e-4"), (32768, "1e-3"))]  # fmt: skip
    assert [f.code for f in compared(tmp_path, *steps_each)] == ["unequal-samples"]
    with pytest.raises(ValueError, match="at least two"):
        compared(tmp_path, GOOD_RUN)


def test_an_unlimited_scale_can_be_stated(tmp_path):
    text = f'[training]\n{CLIP_FACTS}gather = "exact"\nmax_scale = inf\n'
    assert codes(audited(tmp_path, "loop.toml", text, {})) == {"scale-unclamped"}


def test_the_readers_names_of_towers_are_those_of_the_libraries():
    assert {name for name in LIBRARIES if rows_are_independent(name)} == set(run_reader.INDEPENDENT)
    assert set(run_reader.RANDOM) <= set(LIBRARIES)
    for name, options in run_reader.OPTIONS.items():
        for option in options:
            with pytest.raises(ValueError, match="must be of the type"):
                build_tower(config.Tower(name, {option: None}), 8, side="x")
        with pytest.raises(ValueError, match=f"its options are {', '.join(options)}$"):
            build_tower(config.Tower(name, {"unknown": 1}), 8, side="x")


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ('"vit"', '"vit"\noptions = {image = 32}', r"x\.options has 'image': .*size, patch"),
        ('"text"', '"text"\noptions = {size = 32}', r"y\.options has 'size': .*length"),
        ('"vit"', '"resnet50"', r"x\.name is 'resnet50'"),
        ('"vit"', '"x"', r"x\.name is 'x'"),
    ],
)
def test_a_run_whose_tower_train_refuses_is_refused(old, new, refused, tmp_path):
    with pytest.raises(ValueError, match=refused):
        audited(tmp_path, "run.toml", run((old, new)), {})
    side = "x" if old == '"vit"' else "y"
    with pytest.raises(ValueError, match=f"tower {side}"):
        build_towers(config.build(parse_toml(run((old, new)), "run.toml")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vit"', '"timm:resnet50"\noptions = {drop_rate = 0.1}'),
        ('"vit"', '"my.towers:small"\noptions = {anything = 1}'),
        ('"text"', '"x"'),
    ],
)
def test_options_that_only_a_built_tower_knows_are_not_refused(old, new, tmp_path):
    assert not [finding for finding in audited(tmp_path, "run.toml", run((old, new)), {}) if finding.severity == "error"]


@pytest.mark.parametrize("samples", [2_000_000, 8_000_000, 400_000_000])
@pytest.mark.parametrize("start", ["scratch", "locked"])
def test_a_run_as_the_rules_advise_has_no_finding(samples, start, tmp_path):
    task = TrainingTask("image-text", start, data=samples, seen=samples)
    size = round(advise_batch(task).value)
    values = (("size = 8192", f"size = {size}"), ("chunk = 512", "chunk = 64"), ("epochs = 30", f"samples = {samples}"))
    values += (("5e-4", str(advise_rate(task, size).value)), ("0.98", str(advise_beta2(task, size).value)))
    values += (("warmup = 2000", f"warmup = {round(advise_warmup(task, size).value)}"),)
    if start == "locked":
        values += (('"vit"', '"vit"\nlocked = true\nweights = "w.pt"'),)
    # Two million samples leave too few updates at any batch.
    allowed = {"too-few-updates"} if samples == 2_000_000 else set()
    assert codes(audited(tmp_path, "run.toml", run(*values), {"data": samples})) <= allowed


def test_docs_audit_lists_the_rules_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text("utf-8")
    assert rules_page() in page, "docs/audit.md is not what rules_page() gives"
    for code in codes(CASES):
        assert f"#### `{code}`" in page


def test_the_examples_of_the_docstrings_run():
    for module in (package, rule_module):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")
@pytest.mark.parametrize("text", [hf(lr_scheduler_type="constant"), hf(lr_scheduler_type="constant") + "\n"])
def test_patch_itself_applies_a_diff(text, tmp_path):
    (finding,) = audited(tmp_path, "args.json", text, {})
    subprocess.run(["patch", "args.json"], input=finding.fix, text=True, cwd=tmp_path, check=True, capture_output=True)
    assert audit(read_any(tmp_path / "args.json")) == []
    assert (tmp_path / "args.json").read_text().endswith("\n") == text.endswith("\n")


def test_every_rule_has_a_reason_a_source_and_a_fix():
    for rule in RULES:
        assert rule.title and rule.because.endswith(".") and rule.remedy.endswith(".") and rule.source, rule.code
    assert set(package.__all__) <= set(dir(package))
